"""SGLang: the pool takes what is free, but for a share of the device kept for activations and graphs.

Source: handle_gpu_memory_settings (srt/arg_groups/memory_hook.py) for the default share, _profile_available_bytes
(srt/mem_cache/kv_cache_configurator.py) for the pool, SGLang 0.5.23: free now - free before loading x (1 -
mem_fraction_static). Sizing the pool after the graphs (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING) is off unless asked for.
"""

from __future__ import annotations

from kvcalc.memory.reserve import ACTIVATION, GIB, MIB, RESERVE, Held, Question, Reserve, fraction

# The context before loading, and NCCL's buffers where there are several ranks.
_CONTEXT_BYTES = 512 * MIB
_NCCL_BYTES = 1024 * MIB
# By the device's memory in GiB: tokens of a prefill step, and the largest decode graph with fewer than four ranks and
# with more.
_BY_MEMORY = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
_LARGEST = (16384, 512, 512)
# What prefill graphs of an MLA model are taken to hold (reserve_for_graph_mb); of others 8 MiB a size.
_MLA_GRAPHS_MIB = 1536


def reserve(question: Question) -> Reserve:
    """What stays free for activations and graphs is one share, as the engine has it."""
    share = fraction(question, "mem-fraction-static", _default_share(question))
    held = [Held(RESERVE, "CUDA context", _CONTEXT_BYTES)]
    if question.ranks > 1:
        held.append(Held(RESERVE, "NCCL buffers", _NCCL_BYTES))
    free = question.memory_bytes - sum(part.bytes for part in held)
    kept = free - int(free * share)
    held.append(Held(ACTIVATION, f"activations and graphs (1 - {share:g})", kept))
    return Reserve(tuple(held), {"mem_fraction_static": share})


def _default_share(question: Question) -> float:
    """(memory - reserved) / memory in MiB, to three places. The largest graph of a prefill is of its step's tokens."""
    memory_mib = question.memory_bytes / MIB
    tokens, few, many = next(
        (row[1:] for row in _BY_MEMORY if question.memory_bytes < row[0] * GIB),
        _LARGEST,
    )
    reserved = 512 + 1.5 * tokens + question.ranks / 8 * 1024 + 2 * (few if question.ranks < 4 else many)
    reserved += _MLA_GRAPHS_MIB if question.is_latent else 8 * _prefill_graphs(tokens)
    if memory_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    # Never nothing at all on a device smaller than what is reserved.
    return max(round((memory_mib - reserved) / memory_mib, 3), 0.001)


def _prefill_graphs(tokens: int) -> int:
    """How many sizes of a prefill are captured (generate_prefill_cuda_graph_batch_sizes)."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return sum(size <= tokens for first, end, step in steps for size in range(first, end, step))
