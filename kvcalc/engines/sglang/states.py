"""How SGLang divides a given memory between states and tokens, and how many states a running request has.

Source: handle_max_mamba_cache and _calculate_mamba_ratio (model_executor/model_runner_kv_cache_mixin.py, since 0.5.16
mem_cache/kv_cache_configurator.py) and the strategies of srt/server_args.py, read in 0.5.2 to 0.5.23.
"""

from __future__ import annotations

from kvcalc.engines.command import DECODE, PREFILL
from kvcalc.engines.declarations import types_of
from kvcalc.engines.place import Place
from kvcalc.engines.sglang.settings import Settings
from kvcalc.model.spec import ModelSpec

# The requests that run if tokens are drafted and no number is given (arg_groups/speculative_hook.py).
DRAFTING_REQUESTS = 48

# The states take a share of the memory, and the prefixes of a request have states too. Before, there were as many
# states as requests.
_SHARE = (0, 5, 4)
# The states for checking drafts: first each cached state had its own, then each request that may run, before the rest
# was divided, and then they count as part of the states' share.
_DRAFTS_OF_REQUESTS, _DRAFTS_IN_SHARE = (0, 5, 7), (0, 5, 13)
# Without the prefix cache and a number of requests, the states take their share too. Before, there were 512.
_ALWAYS_SHARES, _FIXED = (0, 5, 9), 512
# The spare state counts.
_SPARE = (0, 5, 17)
# A prefill instance checks no drafts, and has no states for them.
_NO_DRAFTS_IN_PREFILL = (0, 5, 22)
# A decode instance has states for the requests that it receives (HybridMambaDecodeReqToTokenPool,
# srt/disaggregation/decode.py), whatever the memory: they are not part of the states that take their share of it.
_RECEIVED = (0, 5, 11)
# `auto` means two more states for each request where the model allows it (`with_extra_states`), and Kimi-Linear does
# since 0.5.16. Before, a command had to ask for them.
_EXTRA_BY_DEFAULT, _KIMI, _KIMI_SINCE = (0, 5, 14), "kimi_linear", (0, 5, 16)


def states_of_request(spec: ModelSpec, settings: Settings, place: Place) -> int:
    """The states of a running request: its own, and with the prefix cache those of the prefixes that it uses.

    SGLang runs only as many requests as have these states.
    """
    if settings.disable_radix_cache or not place.since(*_SHARE):
        return 1
    strategy = settings.mamba_radix_cache_strategy
    if strategy == "auto":
        wanted = not settings.disable_overlap_schedule or settings.page_size > 1
        since = _KIMI_SINCE if spec.model_type == _KIMI else _EXTRA_BY_DEFAULT
        has_more = spec.model_type in types_of("sglang", "with_extra_states") and place.since(*since)
        strategy = "extra_buffer" if wanted and has_more else "no_buffer"
    if strategy == "no_buffer":
        return 3
    return 4 if strategy == "extra_buffer_lazy" or settings.disable_overlap_schedule else 5


def checked_tokens(settings: Settings, place: Place) -> int | None:
    """The tokens that a step checks, each with a state in every slot. None if there are no slots."""
    skips = settings.disaggregation_mode == PREFILL and place.since(*_NO_DRAFTS_IN_PREFILL)
    return None if skips else settings.speculative_num_draft_tokens


def least_states(settings: Settings, batch: int, each: int, place: Place) -> int:
    """The states that there are at least for a batch, without the spare one.

    A decode instance has them for all requests that may run or be received; with a prefix cache a request has two fewer
    there than SGLang counts for it (`each`).
    """
    least = max(settings.max_mamba_cache_size or 0, batch * each)
    if settings.disaggregation_mode != DECODE or not place.since(*_RECEIVED):
        return least
    requests = max(batch, settings.max_running_requests or 0) + settings.extra_slots
    return max(least, requests * max(1, each - 2))


def num_states(memory: int | None, state: int, settings: Settings, each: int, place: Place) -> int | None:
    """The states that SGLang allocates, without the spare one (max_mamba_cache_size). None without a memory.

    Without a number, the states take `--mamba-full-memory-ratio` times the memory of the tokens. `state` is the bytes
    of one state, and `each` the states of a running request. From 0.5.4 to 0.5.6, a number did not count.
    """
    off, requests = settings.disable_radix_cache, settings.max_running_requests
    is_read = off or place.since(*_DRAFTS_OF_REQUESTS) or not place.since(*_SHARE)
    if settings.max_mamba_cache_size is not None and is_read:
        return settings.max_mamba_cache_size
    if off or not place.since(*_SHARE):
        if requests is not None:
            return requests
        if not place.since(*_ALWAYS_SHARES):
            return _FIXED
    if memory is None:
        return None
    checked, ratio = checked_tokens(settings, place) or 0, settings.mamba_full_memory_ratio
    if place.since(*_DRAFTS_OF_REQUESTS) and not place.since(*_DRAFTS_IN_SHARE):
        memory -= state * _running(settings) * checked
    budget = memory * ratio / (1 + ratio)
    if place.since(*_SPARE):
        budget -= state * (1 + checked)
    if place.since(*_DRAFTS_IN_SHARE):
        return max(0, int(budget // (state * (1 + checked / each))))
    return max(0, int(budget // state) // (1 if place.since(*_DRAFTS_OF_REQUESTS) else 1 + checked))


def memory_after_states(memory: int, state: int, settings: Settings, each: int, place: Place) -> int:
    """The memory left for tokens after the states, a spare one, and the states of drafts."""
    states = num_states(memory, state, settings, each, place) if state else None
    if states is None:
        return memory
    checked, spare = checked_tokens(settings, place) or 0, int(place.since(*_SPARE))
    running = states
    if place.since(*_DRAFTS_IN_SHARE):
        running = min(_running(settings), states // each)
    elif place.since(*_DRAFTS_OF_REQUESTS):
        running = _running(settings)
    return max(0, memory - state * (states + spare + (running + spare) * checked))


def _running(settings: Settings) -> int:
    """The requests that may run while tokens are drafted."""
    return DRAFTING_REQUESTS if settings.max_running_requests is None else settings.max_running_requests
