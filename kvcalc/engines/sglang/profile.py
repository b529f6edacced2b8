"""How SGLang divides a given memory: the states, the tokens (max_total_num_tokens), and the requests that run.

Source: KVCacheConfigurator (mem_cache/kv_cache_configurator.py) and pool_configurator.py, SGLang 0.5.23.
"""

from __future__ import annotations

from kvcalc.engines.sglang.pools import Pools
from kvcalc.engines.sglang.settings import Settings

# The requests that run if tokens are drafted and no number is given (arg_groups/speculative_hook.py).
DRAFTING_REQUESTS = 48
# Otherwise a pool with room for 512 requests per request of full length, within these limits (resolve_max_num_reqs).
_REQUESTS_OF_LENGTH, _LEAST_REQUESTS, _MOST_REQUESTS = 512, 2048, 4096


def num_states(memory: int | None, state: int, settings: Settings, states_each: int) -> int | None:
    """The states that SGLang allocates, without the spare one (max_mamba_cache_size). None without a memory.

    Without a number, the states take `--mamba-full-memory-ratio` times the memory of the tokens. `state` is the bytes
    of one state, and `states_each` the states of a running request.
    """
    if settings.max_mamba_cache_size is not None:
        return settings.max_mamba_cache_size
    if settings.disable_radix_cache and settings.max_running_requests is not None:
        return settings.max_running_requests
    if memory is None:
        return None
    checked, ratio = settings.speculative_num_draft_tokens or 0, settings.mamba_full_memory_ratio
    budget = memory * ratio / (1 + ratio)
    return max(0, int((budget - state * (1 + checked)) // (state * (1 + checked / states_each))))


def memory_after_states(memory: int, state: int, settings: Settings, states_each: int) -> int:
    """The memory left for tokens after the states, a spare one, and the states of drafts (_handle_max_mamba_cache)."""
    states = num_states(memory, state, settings, states_each) if state else None
    if states is None:
        return memory
    checked, requests = settings.speculative_num_draft_tokens or 0, settings.max_running_requests
    running = min(DRAFTING_REQUESTS if requests is None else requests, states // states_each)
    return max(0, memory - state * (states + 1 + (running + 1) * checked))


def most_requests(settings: Settings, tokens: int | None, longest: int | None) -> int:
    """The most requests that run if states set no limit (resolve_max_num_reqs): at most one for two tokens of the pool.

    `tokens` are those of the pool (None: not known), `longest` those of the longest request (context_len).
    """
    requests = settings.max_running_requests
    if requests is None and settings.speculative_num_draft_tokens is not None:
        requests = DRAFTING_REQUESTS
    if requests is None:
        requests = _MOST_REQUESTS
        if tokens is not None and longest is not None:
            requests = min(max(int(tokens / longest * _REQUESTS_OF_LENGTH), _LEAST_REQUESTS), _MOST_REQUESTS)
    return requests if tokens is None else min(requests, tokens // 2)


def profiled_tokens(pools: Pools, settings: Settings, memory: int) -> int | None:
    """max_total_num_tokens for the memory left for tokens: whole pages, without the dummy page.

    None if a pipeline stage has only states.
    """
    share: float = settings.swa_full_tokens_ratio if pools.has_full else 1
    cell = pools.full + share * pools.window if pools.window else pools.full
    return int(memory // cell) // settings.page_size * settings.page_size if cell else None
