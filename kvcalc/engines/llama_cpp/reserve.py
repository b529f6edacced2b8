"""What llama.cpp needs beside weights and cache."""

from __future__ import annotations

from functools import lru_cache

from kvcalc.engines.llama_cpp.settings import Settings, parse_settings
from kvcalc.engines.reserve import ACTIVATION, Held, Reserve, ReserveInputs
from kvcalc.releases import Release

_FP32, _FP16 = 4, 2
# The driver's context with cuBLAS workspaces, in addition to the buffers in the log. Metal has none ("unaccounted" is 0
# in the memory breakdown of an M1, an M3 Max and an M5).
_CONTEXT_MIB = 400
# Several devices prepare this many micro-batches at once, with inputs of their own (GGML_SCHED_MAX_COPIES,
# ggml/src/ggml-backend.cpp, "sched copies" in the log).
_COPIES = 4
# The 80 % range of buffer and context together, as multiples of the estimate. benchmarks/fit/reserve.py computes it
# from the logs in benchmarks/fit/llama_cpp_memory.tsv.
_LOW, _HIGH = 0.58, 2.18


def reserve(question: ReserveInputs) -> Reserve:
    """A compute buffer for one micro-batch. llama.cpp keeps no other reserve.

    - In a layer, the buffer holds the mask (a value per token and cell: build_attn_inp_kq_mask, llama-graph.cpp), and
      in fp32 the widest module's values, the residual and the normed input. Without flash attention, it also holds the
      scores of all heads (build_attn_mha). For Qwen3.8-27B with 512 tokens and 262,144 cells, logs print ("compute
      buffer size") 378.02 MiB: 256 of mask and 122 of an MLP that is 17,408 wide.
    - Several devices have four copies of the mask and of the layer's input: with 2,048 tokens, 4,744.25 MiB.
    - At the end of a micro-batch, it holds logits and hidden states. The server reserves one row of logits for each
      slot and each token that it drafts (server_output_limits, tools/server/server-context.cpp). Older builds reserve
      one for every token: 258.50 MiB for Llama 3 8B (128,256 + 4,096 wide) and 70.50 MiB for Llama 2 7B (32,000 +
      4,096). They make the mask in fp32, and a copy in fp16 for flash attention, and compute MLPs in place.

    Source: llama-cpp-python 0.3.36.
    """
    chosen, width = _parse(tuple(question.settings.items()), question.release), question.width
    tokens, batch = chosen.ubatch_size, question.batch_size
    # Sequences that share one stream of cells have a mask with the cells of all.
    cells = question.context_tokens * (batch if chosen.has_one_stream(batch) else 1) * question.keeps_tokens
    copies = _COPIES if question.layout.num_devices > 1 else 1
    outputs, rows = min(tokens, chosen.slots(batch) * (1 + chosen.draft_max)), 2 if copies == 1 else 2 + copies
    if chosen.reserves_all_logits:
        outputs, rows = tokens, 0
    if chosen.flash_attn == "off":
        of_cell = _FP32 * (copies + question.num_heads)
    else:
        of_cell = _FP32 * chosen.reserves_all_logits + _FP16 * copies
    end = (outputs * width.vocab_size + tokens * width.hidden_size) * _FP32
    layer = tokens * (width.module_elements + rows * width.hidden_size) * _FP32
    size = max(end, layer + tokens * cells * of_cell)
    held = [Held(ACTIVATION, f"compute buffer of {tokens:,} tokens", size)]
    if not question.is_apple:
        held += question.driver(_CONTEXT_MIB)
    same_until = max(end - layer, 0) // (tokens * of_cell)
    return Reserve([part.within(_LOW, _HIGH) for part in held], {}, varies=question.keeps_tokens, same_until=same_until)


@lru_cache(maxsize=256)
def _parse(settings: tuple[tuple[str, str], ...], build: Release | None) -> Settings:
    return parse_settings(dict(settings), build)
