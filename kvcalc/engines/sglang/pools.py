"""The bytes of SGLang's pools on one device: rows of all tokens, rows of windows, and states."""

from __future__ import annotations

from collections.abc import Iterable

from kvcalc.engines.command import DECODE
from kvcalc.engines.rounding import round_up
from kvcalc.engines.sglang.layers import FULL, STATE, WINDOW, Layer, layers_of
from kvcalc.engines.sglang.settings import Settings
from kvcalc.engines.sglang.states import DRAFTING_REQUESTS
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.sharding import whole_of
from kvcalc.model.caches import RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple
from kvcalc.throughput.scheduling import STEP_TOKENS


class Pools(NamedTuple):
    """The bytes of one token in all layers of each pool, and the bytes of one state in all layers.

    The bytes are 0 for a pool that the share does not have. The widest window of a window pool, and whether there is a
    pool for all tokens, are those of the whole model: they set the pools' tokens, which every pipeline stage has.
    """

    full: int
    window: int
    state: int
    widest_window: int
    has_full: bool


@remembered
def pools_of(share: ModelSpec, dtype: Dtype) -> Pools:
    """The pools of a share. Raises what `layers_of` raises."""
    sizes, layers = dict.fromkeys((FULL, WINDOW, STATE), 0), layers_of(share, dtype)
    for layer in layers:
        sizes[layer.pool] += layer.num_layers * layer.bytes
    if share.whole is not None:
        return Pools(sizes[FULL], sizes[WINDOW], sizes[STATE], *pools_of(share.whole, dtype)[3:])
    widest = max((layer.cache.window or 0 for layer in layers if layer.pool == WINDOW), default=0)
    return Pools(sizes[FULL], sizes[WINDOW], sizes[STATE], widest, bool(sizes[FULL]))


# How many requests run, and how many tokens fit.
# Source: KVCacheConfigurator (mem_cache/kv_cache_configurator.py) and pool_configurator.py, SGLang 0.5.23.

# If tokens are not drafted and no number is given: a pool with room for 512 requests per request of full length, within
# these limits (resolve_max_num_reqs).
_REQUESTS_OF_LENGTH, _LEAST_REQUESTS, _MOST_REQUESTS = 512, 2048, 4096


def most_requests(settings: Settings, tokens: int | None, longest: int | None) -> int:
    """The most requests that run if states set no limit (resolve_max_num_reqs): at most one for two tokens of the pool.

    `tokens` are those of the pool (None: not known), `longest` those of the longest request (context_len).
    """
    requests = set_requests(settings)
    if requests is None:
        requests = _MOST_REQUESTS
        if tokens is not None and longest is not None:
            requests = min(max(int(tokens / longest * _REQUESTS_OF_LENGTH), _LEAST_REQUESTS), _MOST_REQUESTS)
    return requests if tokens is None else min(requests, tokens // 2)


def set_requests(settings: Settings) -> int | None:
    """The most requests that run if that is given, or if tokens are drafted."""
    if settings.max_running_requests is None and settings.speculative_num_draft_tokens is not None:
        return DRAFTING_REQUESTS
    return settings.max_running_requests


# The decode steps after which tokens outside of a window are evicted (SGLANG_SWA_EVICTION_INTERVAL, srt/environ.py).
_EVICTION = 128


def window_slots(settings: Settings, window: int, requests: int) -> int:
    """The most tokens that `requests` running requests and the steps of prompts have in a pool of windows.

    A request has its window, the tokens until the next eviction and those of its next step. A step that checks drafts
    takes the tokens of two steps if steps overlap, else its own in whole pages. Overlapping steps compute two chunks of
    prompts. A decode instance computes none, and has windows of the requests that it receives. Trees have one draft per
    branch. Source: compute_swa_request_cap (pool_configurator.py), SGLang 0.5.23.
    """
    checked, page = settings.speculative_num_draft_tokens, settings.page_size
    step, overlaps = page, not settings.disable_overlap_schedule
    if checked is not None:
        drafted = max(checked, settings.speculative_eagle_topk)
        step = 2 * drafted if overlaps else round_up(drafted, page)
    each = window + _EVICTION * (checked or 1) + page + step
    if settings.disaggregation_mode == DECODE:
        return each * requests + (window + page) * settings.extra_slots
    return each * requests + (1 + overlaps) * (settings.chunked_prefill_size or STEP_TOKENS) + page


def profiled_tokens(pools: Pools, settings: Settings, memory: int, windows: int | None) -> int | None:
    """max_total_num_tokens for the memory left for tokens: whole pages, without the dummy page, and no more than asked.

    `windows` are the tokens of the window pool if they do not depend on this number. None if a pipeline stage has no
    tokens of the full pool then, or only states.
    """
    share: float = settings.swa_full_tokens_ratio if pools.has_full else 1
    cell = pools.full + share * pools.window if pools.window else pools.full
    if windows is not None:
        cell, memory = pools.full, max(0, memory - windows * pools.window)
    if not cell:
        return None
    tokens, most = int(memory // cell), settings.max_total_tokens
    return min(tokens, most or tokens) // settings.page_size * settings.page_size


# The states that SGLang keeps while drafted tokens are checked, besides those of the cache.
# A slot of a running request has a state for every token that a step checks, so that a rejected token can be undone,
# and the convolution's inputs of all of them. There is one slot for each request that may run, and a spare one. Source:
# MambaPool (mem_cache/memory_pool.py: intermediate_ssm_state_cache, intermediate_conv_window_cache) and
# _build_hybrid_req_pool (mem_cache/kv_cache_configurator.py: mamba_spec_state_size), SGLang 0.5.23.

# KDA keeps the inputs of every token apart (KimiLinearStateShape.disable_conv_window_dedup, configs/mamba_utils.py).
_SEPARATE_INPUTS = ("kimi_linear", "bailing_hybrid")


class DraftSlot(NamedTuple):
    """The bytes of one slot in all layers: the states, and the convolutions' inputs."""

    states: int
    inputs: int


NO_SLOT = DraftSlot(0, 0)


@remembered
def draft_slot(share: ModelSpec, dtype: Dtype, checked_tokens: int | None, branches: int) -> DraftSlot:
    """The slot of a request whose step checks `checked_tokens` tokens, in trees of `branches` branches (1: a chain)."""
    if checked_tokens is None:
        return NO_SLOT
    separate = branches > 1 or whole_of(share).model_type in _SEPARATE_INPUTS
    return slot_of(layers_of(share, dtype), checked_tokens, separate)


def slot_of(layers: Iterable[Layer], checked_tokens: int, separate: bool) -> DraftSlot:
    """The slot in all `layers` with states. `separate`: the inputs of every token are kept apart."""
    slots = [
        _layer_slot(layer, layer.cache, checked_tokens, separate)
        for layer in layers
        if isinstance(layer.cache, RecurrentState)
    ]
    return DraftSlot(sum(slot.states for slot in slots), sum(slot.inputs for slot in slots))


def _layer_slot(layer: Layer, state: RecurrentState, checked_tokens: int, separate: bool) -> DraftSlot:
    """The slot in all layers with this state.

    The inputs of successive tokens overlap and are kept once: a window of `conv_kernel` - 1 inputs moves by one input
    per token. Trees keep a window for each token.
    """
    width = state.conv_kernel - 1
    column = layer.num_layers * bytes_of(state.conv_channels, DTYPES["bf16"])
    columns = checked_tokens * width if separate else checked_tokens + width - 1
    return DraftSlot(
        checked_tokens * (layer.num_layers * layer.bytes - width * column), columns * column if width else 0
    )
