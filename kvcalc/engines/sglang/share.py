"""The default of --mem-fraction-static: the share of the memory for weights and caches, by release.

Source: handle_gpu_memory_settings (srt/arg_groups/memory_hook.py) in SGLang 0.5.23, and __post_init__ of ServerArgs
(srt/server_args.py) in 0.4.0 to 0.5.18.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.command import DECODE, PREFILL
from kvcalc.engines.options import SettingsReader
from kvcalc.engines.reserve import GIB, MIB, NEWEST, ReserveInputs
from kvcalc.engines.sglang.models import MINIMAX_M3
from kvcalc.engines.sglang.settings import BOTH, steps_by_memory
from kvcalc.model.drafting import DRAFT, NGRAM
from kvcalc.releases import Release

# The memory SGLang reserves for the prefill graphs of an MLA model (reserve_for_graph_mb). Other models: 8 MiB per
# captured size.
_MLA_GRAPHS_MIB = 1536
# The releases since which the default share counts sizes of steps and graphs, the prefill graphs, and no more decode
# graphs than running requests, and the first that has no part for drafts.
_BY_SIZES, _PREFILL_GRAPHS = Release.of(0, 5, 3), Release.of(0, 5, 10)
_LIMITED_GRAPHS, _DRAFTS_UNTIL = Release.of(0, 5, 22), Release.of(0, 5, 14)
# Since these, separate instances have no parts for the steps and graphs of the other role, and a decode instance none
# for images. In the releases before the first of them that have prefill graphs, separate instances have none.
_BY_ROLE, _NO_IMAGES_IN_DECODE = Release.of(0, 5, 15), Release.of(0, 5, 17)
# Before the first of these, a table by the number of devices decides. Devices with more than 80 GiB had rules of their
# own since the others, and drafts a part in 0.4.7.
_BY_MEMORY = Release.of(0, 4, 7, post=1)
_LARGE_DEVICES, _LARGER_DEVICES = Release.of(0, 4, 5, post=3), Release.of(0, 4, 6, post=2)
_DRAFTS_SINCE, _BY_DEVICES = Release.of(0, 4, 7), ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))
# The layers and the width of the vision tower that leaves the share as it is, times 0.95 (adjust_mem_fraction_for_vlm).
# Before, every model with towers had one factor, and until 0.4.9 also with a given share.
_USUAL_TOWER, _BY_TOWER = 24 * 1024**2, Release.of(0, 4, 9, post=3)
_LEAST_FACTOR = 0.8
LEAST_VISION_FACTOR = 0.95 * _LEAST_FACTOR
_ONE_FACTOR = {Release.of(0, 4, 4, post=1): 0.9, Release.of(0): 0.95}
_NOT_IF_GIVEN = Release.of(0, 4, 9)
# AITER's kernels, the default on AMD's devices, need memory beside the pool for contexts of more than 8,192 tokens, so
# SGLang also reduces a given share (handle_attention_backend_compatibility, since 0.4.7). For MLA they are the default
# with these numbers of heads on a device (get_num_kv_heads). Sparse attention and these types have other kernels.
AITER_TOKENS, _AITER, _AITER_SINCE, _AITER_LATENT_HEADS = 8192, 0.85, Release.of(0, 4, 7), (16, 128)
_OTHER_KERNELS = ("deepseek_v4", *MINIMAX_M3)


def share_of(question: ReserveInputs, given: SettingsReader) -> float:
    """The share of the memory that was free before the weights were loaded."""
    release = question.release or NEWEST
    share = given.share("mem-fraction-static", _default_share(question, given, release))
    is_given = "mem-fraction-static" in given.settings
    if is_given and question.multimodal is not None and release < _NOT_IF_GIVEN:
        share = round(share * _vision_factor(question.multimodal, release), 6)
    return round(share * _AITER, 6) if _uses_aiter(question, release) else share


def _uses_aiter(question: ReserveInputs, release: Release) -> bool:
    if not question.is_amd or release < _AITER_SINCE or question.context_tokens <= AITER_TOKENS:
        return False
    if question.has_sparse_latent or question.model_type in _OTHER_KERNELS:
        return False
    return not question.is_latent or question.num_heads // question.layout.tensor_parallel_size in _AITER_LATENT_HEADS


def _default_share(question: ReserveInputs, given: SettingsReader, release: Release) -> float:
    """(memory - reserved) / memory in MiB, rounded to three places, and less for a vision tower."""
    if release < _BY_MEMORY:
        share = _oldest_share(question, release)
    else:
        memory_mib = question.memory_bytes / MIB
        reserved = (_reserved_mib if release >= _BY_SIZES else _older_reserved_mib)(question, given, release)
        share = round((memory_mib - reserved - _drafting_mib(question.drafts_by, release)) / memory_mib, 3)
    decodes = given.choice("disaggregation-mode") == DECODE
    if question.multimodal is not None and not (decodes and release >= _NO_IMAGES_IN_DECODE):
        share = round(share * _vision_factor(question.multimodal, release), 6)
    # Above 0 even on a device smaller than the reserve.
    return max(share, 0.001)


def _reserved_mib(question: ReserveInputs, given: SettingsReader, release: Release) -> float:
    """The largest prefill graph has as many tokens as a prefill step. A decode instance computes a token of a request.

    Prefill and decode instances have no graphs of the other's steps.
    """
    tokens, few, many = steps_by_memory(question.memory_bytes, question.release)
    tokens, role = given.count("chunked-prefill-size", tokens), given.choice("disaggregation-mode")
    graph = few if question.layout.num_devices < 4 else many
    if release >= _LIMITED_GRAPHS:
        graph = min(graph, given.count("max-running-requests", graph))
    has_prefill_graphs = release >= _PREFILL_GRAPHS and role == BOTH
    if release >= _BY_ROLE:
        has_prefill_graphs = role != DECODE
        if role == DECODE:
            tokens = given.count("max-running-requests", graph) * given.count("speculative-num-draft-tokens", 1)
        elif role == PREFILL:
            graph = 0
    reserved = 512 + 1.5 * max(tokens, 2048) + question.layout.num_devices / 8 * 1024 + 2 * graph
    if has_prefill_graphs:
        reserved += _MLA_GRAPHS_MIB if question.is_latent else 8 * _prefill_graphs(tokens)
    if question.layout.data_parallel_size > 1:
        # More padding, and more again for large graphs (reserve_for_graph_mb).
        reserved += graph * question.layout.data_parallel_size * (4.5 if graph > 300 else 3)
    return max(reserved, 10 * 1024) if question.memory_bytes > 60 * GIB else reserved


def _older_reserved_mib(question: ReserveInputs, given: SettingsReader, release: Release) -> float:
    """Before 0.5.3."""
    memory, ranks = question.memory_bytes / GIB, question.layout.num_devices
    gib = 32.0 if memory >= 160 else 12 + ranks / 2 if memory >= 90 else 9.5 + ranks / 2
    if memory < 35:
        gib = 2.8 + ranks / 10
    return 1024 * (gib + 4 * (question.layout.data_parallel_size > 1))


def _oldest_share(question: ReserveInputs, release: Release) -> float:
    """Before 0.4.7.post1: by the number of devices, and more where a device has more than 80 GiB."""
    memory, drafts = question.memory_bytes / MIB, question.drafts_by is not None and release >= _DRAFTS_SINCE
    share = next(share for devices, share in _BY_DEVICES if question.layout.num_devices >= devices)
    if memory > 81_920 and release >= _LARGE_DEVICES:
        share = 0.88 if release >= _LARGER_DEVICES else (memory - 13 * 1024) / memory
    if memory > 180_000 and release >= _DRAFTS_SINCE and not question.is_amd:
        return 0.79
    if memory > 96 * 1024 and release >= _LARGER_DEVICES:
        reserved = (20 if drafts else 18) * 1024
        return round(min(share + 48 * 1024 * (1 - share) / memory, (memory - reserved) / memory), 6)
    return round(share * 0.95 if drafts else share, 6)


def _drafting_mib(method: str | None, release: Release) -> int:
    """For a draft model and its graphs, until 0.5.14. Until 0.5.3, also for n-grams."""
    if method is None or release >= _DRAFTS_UNTIL or (method == NGRAM and release >= _BY_SIZES):
        return 0
    if method == DRAFT and release >= _BY_SIZES:
        return 6 * 1024
    return 4 * 1024 if release >= _PREFILL_GRAPHS else 2 * 1024


def _vision_factor(config: Mapping[str, object], release: Release) -> float:
    """The factor of the default share for a vision tower: 0.95 for a usual one, and less for a larger one.

    SGLang reads the keys `num_hidden_layers` and `hidden_size` of the tower, whatever its own keys are.
    """
    if release < _BY_TOWER:
        return next(factor for since, factor in _ONE_FACTOR.items() if release >= since)
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return 1.0
    layers, width = (vision.get(key, usual) for key, usual in (("num_hidden_layers", 24), ("hidden_size", 1024)))
    if not isinstance(layers, int) or not isinstance(width, int):
        return 0.95
    return 0.95 * max(_LEAST_FACTOR, min(1.05, 1 - 0.1 * (layers * width * width / _USUAL_TOWER - 1)))


def _prefill_graphs(tokens: int) -> int:
    """The number of prefill sizes captured as graphs (generate_prefill_cuda_graph_batch_sizes)."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return sum(size <= tokens for first, end, step in steps for size in range(first, end, step))
