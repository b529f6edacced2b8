"""What llama.cpp needs beside weights and cache."""

from __future__ import annotations

from functools import lru_cache

from kvcalc.engines.llama_cpp.settings import Settings, parse_settings
from kvcalc.engines.reserve import ACTIVATION, Held, Question, Reserve
from kvcalc.releases import Release

_FP32, _FP16 = 4, 2
# The driver's context with cuBLAS workspaces, in addition to the buffers in the log. Metal has none ("unaccounted" is 0
# in the memory breakdown of an M1, an M3 Max and an M5).
_CONTEXT_MIB = 400
# Several devices prepare this many micro-batches at once, with inputs of their own (GGML_SCHED_MAX_COPIES,
# ggml/src/ggml-backend.cpp, "sched copies" in the log).
_COPIES = 4
# The 80 % range of buffer and context together, as multiples of the estimate. benchmarks/fit_reserve.py computes it
# from the logs in benchmarks/llama_cpp_memory.tsv.
_LOW, _HIGH = 0.58, 2.18


def reserve(question: Question) -> Reserve:
    """A compute buffer for one micro-batch. llama.cpp keeps no other reserve.

    At the end of a micro-batch, the buffer holds its logits and embeddings in fp32. With 512 tokens, llama.cpp's logs
    print ("compute buffer size") 258.50 MiB for Llama 3 8B (128,256 + 4,096 wide) and 70.50 MiB for Llama 2 7B (32,000
    + 4,096). In a layer, it holds the mask (a value per token and cell: build_attn_inp_kq_mask, llama-graph.cpp of
    llama-cpp-python 0.3.36) and the layer's values. Without flash attention, it also holds the scores of all heads
    (build_attn_mha).
    """
    chosen, width = _parse(tuple(question.settings.items()), question.release), question.width
    tokens, batch = chosen.ubatch_size, question.batch_size
    # Sequences that share one stream of cells have a mask with the cells of all.
    cells = question.context_tokens * (batch if chosen.has_one_stream(batch) else 1) * question.keeps_tokens
    logits, layer = (width.vocab_size + width.hidden_size) * _FP32, width.module_elements * _FP32
    if chosen.flash_attn == "off":
        of_cell = _FP32 * (1 + question.num_heads)
    else:
        of_cell = _FP16 * (_COPIES if question.ranks > 1 else 1)
    held = [Held(ACTIVATION, f"compute buffer of {tokens:,} tokens", tokens * max(logits, layer + cells * of_cell))]
    if not question.is_apple:
        held += question.driver(_CONTEXT_MIB)
    same_until = max(logits - layer, 0) // of_cell
    return Reserve([part.within(_LOW, _HIGH) for part in held], {}, varies=question.keeps_tokens, same_until=same_until)


@lru_cache(maxsize=256)
def _parse(settings: tuple[tuple[str, str], ...], build: Release | None) -> Settings:
    return parse_settings(dict(settings), build)
