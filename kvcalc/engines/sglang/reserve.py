"""What SGLang keeps free beside weights and cache."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.options import SettingsReader
from kvcalc.engines.reserve import ACTIVATION, GIB, MIB, NEWEST, RESERVE, Held, Question, Reserve
from kvcalc.engines.sglang.settings import steps_by_memory
from kvcalc.model.drafting import DRAFT, NGRAM
from kvcalc.releases import Release

# The memory SGLang reserves for the prefill graphs of an MLA model (reserve_for_graph_mb). Other models: 8 MiB per
# captured size.
_MLA_GRAPHS_MIB = 1536
# The releases since which the default share counts sizes of steps and graphs, the prefill graphs, and no more decode
# graphs than running requests, and the first that has no part for drafts (srt/server_args.py, 0.4.6 to 0.5.23).
_BY_SIZES, _PREFILL_GRAPHS = Release.of(0, 5, 3), Release.of(0, 5, 10)
_LIMITED_GRAPHS, _DRAFTS_UNTIL = Release.of(0, 5, 22), Release.of(0, 5, 14)
# The driver's context before the weights are loaded, and NCCL with the custom all-reduce, which needs fast links.
# benchmarks/fit_reserve.py compares them with the logs in benchmarks/sglang_memory.tsv. On devices that share their
# memory with the host, SGLang counts what is available there.
_CONTEXT_MIB, _SHARED_CONTEXT_MIB, _NCCL_MIB = 640, 10240, 1152
# The 80 % range of these parts together, as multiples of the estimate, computed as for vLLM.
_LOW, _HIGH = 0.52, 2.04
# Memory for the embeddings of images, which are allocated after the pool (SGLANG_VLM_CACHE_SIZE_MB, srt/environ.py).
_EMBEDDINGS_MIB = 100
# The layers and the width of the vision tower that leaves the share as it is, times 0.95 (adjust_mem_fraction_for_vlm).
_USUAL_TOWER = 24 * 1024**2


def reserve(question: Question) -> Reserve:
    """The pool takes all free memory except a share of the device, which is for activations and graphs.

    Source, in SGLang 0.5.23: handle_gpu_memory_settings (srt/arg_groups/memory_hook.py) for the default share, and
    _profile_available_bytes (srt/mem_cache/kv_cache_configurator.py) for the pool, which is free memory now - free
    memory before loading x (1 - mem_fraction_static) - the embeddings of images. By default, the pool is not sized
    after the graphs (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING). The CUDA context is the one before loading.
    """
    given = SettingsReader("sglang", question.settings)
    share = given.share("mem-fraction-static", _default_share(question, given))
    context = _SHARED_CONTEXT_MIB if question.shares_memory else _CONTEXT_MIB
    driver = question.driver(context, _NCCL_MIB if question.has_fast_links else 0)
    free = question.memory_bytes - sum(part.bytes for part in driver)
    kept = [Held(ACTIVATION, f"activations and graphs (1 - {share:g})", free - int(free * share))]
    if question.multimodal is not None:
        kept.append(Held(RESERVE, "embeddings of images", _EMBEDDINGS_MIB * MIB))
    held = [*(part.within(_LOW, _HIGH) for part in driver), *(part.exact() for part in kept)]
    return Reserve(held, {"mem_fraction_static": share})


def _default_share(question: Question, given: SettingsReader) -> float:
    """(memory - reserved) / memory in MiB, rounded to three places, and less for a vision tower."""
    memory_mib, release = question.memory_bytes / MIB, question.release or NEWEST
    reserved = (_reserved_mib if release >= _BY_SIZES else _older_reserved_mib)(question, given, release)
    reserved += _drafting_mib(question.drafts_by, release)
    share = round((memory_mib - reserved) / memory_mib, 3)
    # Above 0 even on a device smaller than the reserve.
    return max(share if question.multimodal is None else round(share * _vision_factor(question.multimodal), 6), 0.001)


def _reserved_mib(question: Question, given: SettingsReader, release: Release) -> float:
    """The largest prefill graph has as many tokens as a prefill step."""
    tokens, few, many = steps_by_memory(question.memory_bytes, question.release)
    tokens = given.count("chunked-prefill-size", tokens)
    graph = few if question.ranks < 4 else many
    if release >= _LIMITED_GRAPHS:
        graph = min(graph, given.count("max-running-requests", graph))
    reserved = 512 + 1.5 * max(tokens, 2048) + question.ranks / 8 * 1024 + 2 * graph
    if release >= _PREFILL_GRAPHS:
        reserved += _MLA_GRAPHS_MIB if question.is_latent else 8 * _prefill_graphs(tokens)
    if question.dp_ranks > 1:
        # More padding, and more again for large graphs (reserve_for_graph_mb).
        reserved += graph * question.dp_ranks * (4.5 if graph > 300 else 3)
    return max(reserved, 10 * 1024) if question.memory_bytes > 60 * GIB else reserved


def _older_reserved_mib(question: Question, given: SettingsReader, release: Release) -> float:
    """Before 0.5.3. Releases before 0.4.8 had a fixed share by the number of ranks, which is not modelled."""
    memory, ranks = question.memory_bytes / GIB, question.ranks
    found = 32.0 if memory >= 160 else 12 + ranks / 2 if memory >= 90 else 9.5 + ranks / 2
    if memory < 35:
        found = 2.8 + ranks / 10
    return 1024 * (found + 4 * (question.dp_ranks > 1))


def _drafting_mib(method: str | None, release: Release) -> int:
    """For a draft model and its graphs, until 0.5.14. Until 0.5.3, also for n-grams."""
    if method is None or release >= _DRAFTS_UNTIL or (method == NGRAM and release >= _BY_SIZES):
        return 0
    if method == DRAFT and release >= _BY_SIZES:
        return 6 * 1024
    return 4 * 1024 if release >= _PREFILL_GRAPHS else 2 * 1024


def _vision_factor(config: Mapping[str, object]) -> float:
    """The factor of the default share for a vision tower: 0.95 for a usual one, and less for a larger one.

    SGLang reads the keys `num_hidden_layers` and `hidden_size` of the tower, whatever its own keys are.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return 1.0
    layers, width = (vision.get(key, usual) for key, usual in (("num_hidden_layers", 24), ("hidden_size", 1024)))
    if not isinstance(layers, int) or not isinstance(width, int):
        return 0.95
    return 0.95 * max(0.8, min(1.05, 1 - 0.1 * (layers * width * width / _USUAL_TOWER - 1)))


def _prefill_graphs(tokens: int) -> int:
    """The number of prefill sizes captured as graphs (generate_prefill_cuda_graph_batch_sizes)."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return sum(size <= tokens for first, end, step in steps for size in range(first, end, step))
