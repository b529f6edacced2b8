"""Make a stand-in for Llama 3.1 8B in Q4_K_M: python docs/start/make_gguf.py FILE.gguf

The header is that of the real file, without its vocabulary. The weights are a hole of the right size: the file takes a
few kilobytes of the disk. kvcalc reads only headers; no engine can run the file. Needs `pip install gguf`.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

LAYERS, HIDDEN, KV, MLP, VOCABULARY = 32, 4096, 1024, 14336, 128256
Q4, Q6, F32 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K, gguf.GGMLQuantizationType.F32


def tensors() -> list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    """Name, shape and type of every tensor. Q4_K_M keeps some values and down projections in Q6_K (llama-quant.cpp)."""
    found = [
        ("token_embd", (VOCABULARY, HIDDEN), Q4),
        ("output", (VOCABULARY, HIDDEN), Q6),
        ("output_norm", (HIDDEN,), F32),
    ]
    for layer in range(LAYERS):
        eighth = LAYERS // 8
        more = Q6 if layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2 else Q4
        found += [
            (f"blk.{layer}.{name}", shape, kind)
            for name, shape, kind in (
                ("attn_norm", (HIDDEN,), F32), ("attn_q", (HIDDEN, HIDDEN), Q4), ("attn_k", (KV, HIDDEN), Q4),
                ("attn_v", (KV, HIDDEN), more), ("attn_output", (HIDDEN, HIDDEN), Q4), ("ffn_norm", (HIDDEN,), F32),
                ("ffn_gate", (MLP, HIDDEN), Q4), ("ffn_up", (MLP, HIDDEN), Q4), ("ffn_down", (HIDDEN, MLP), more),
            )
        ]  # fmt: skip
    return [*found, ("rope_freqs", (64,), F32)]


def main() -> None:
    """Write the header, and leave a hole for the weights."""
    path = sys.argv[1]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Llama 3.1 8B Instruct")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_block_count(LAYERS)
    writer.add_context_length(131072)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    total = 0
    for name, shape, kind in tensors():
        block, size = gguf.GGML_QUANT_SIZES[kind]
        elements = int(np.prod(shape))
        held = elements // block * size
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), held, raw_dtype=kind)
        total += -(-held // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with open(path, "r+b") as file:
        header = file.seek(0, 2)
        file.truncate(-(-header // 32) * 32 + total)


if __name__ == "__main__":
    main()
