"""What SGLang keeps free beside weights and cache."""

from __future__ import annotations

from kvcalc.memory.engines.options import Given
from kvcalc.memory.reserve.by_device import sglang_row
from kvcalc.memory.reserve.parts import ACTIVATION, MIB, Held, Question, Reserve

# The memory SGLang reserves for the prefill graphs of an MLA model (reserve_for_graph_mb). Other models: 8 MiB per
# captured size.
_MLA_GRAPHS_MIB = 1536


def sglang(question: Question) -> Reserve:
    """The pool takes all free memory except a share of the device, which is for activations and graphs.

    Source, in SGLang 0.5.23: handle_gpu_memory_settings (srt/arg_groups/memory_hook.py) for the default share, and
    _profile_available_bytes (srt/mem_cache/kv_cache_configurator.py) for the pool, which is free memory now - free
    memory before loading x (1 - mem_fraction_static). By default, the pool is not sized after the graphs
    (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING). The CUDA context is the one before loading.
    """
    share = Given("sglang", question.settings).share("mem-fraction-static", _default_share(question))
    held = question.driver(512, 1024)
    free = question.memory_bytes - sum(part.bytes for part in held)
    held.append(Held(ACTIVATION, f"activations and graphs (1 - {share:g})", free - int(free * share)))
    return Reserve(held, {"mem_fraction_static": share})


def _default_share(question: Question) -> float:
    """(memory - reserved) / memory in MiB, rounded to three places.

    The largest prefill graph has as many tokens as a prefill step.
    """
    memory_mib = question.memory_bytes / MIB
    tokens, few, many = sglang_row(question.memory_bytes)
    reserved = 512 + 1.5 * tokens + question.ranks / 8 * 1024 + 2 * (few if question.ranks < 4 else many)
    reserved += _MLA_GRAPHS_MIB if question.is_latent else 8 * _prefill_graphs(tokens)
    if question.attention_replicas > 1:
        # More padding, and more again for large graphs (reserve_for_graph_mb).
        graph = few if question.ranks < 4 else many
        reserved += graph * question.attention_replicas * (4.5 if graph > 300 else 3)
    if memory_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    # Above 0 even on a device smaller than the reserve.
    return max(round((memory_mib - reserved) / memory_mib, 3), 0.001)


def _prefill_graphs(tokens: int) -> int:
    """The number of prefill sizes captured as graphs (generate_prefill_cuda_graph_batch_sizes)."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return sum(size <= tokens for first, end, step in steps for size in range(first, end, step))
