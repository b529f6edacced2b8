"""The tokens of SGLang's pools in a given memory (max_total_num_tokens).

Source: KVCacheConfigurator (mem_cache/kv_cache_configurator.py) and pool_configurator.py, SGLang 0.5.23.
"""

from __future__ import annotations

from kvcalc.memory.engines.sglang.pools import Pools
from kvcalc.memory.engines.sglang.settings import Settings

# The requests that run if tokens are drafted and no number is given (arg_groups/speculative_hook.py).
_DRAFTING_REQUESTS = 48


def memory_after_states(memory: int, state: int, settings: Settings, states_each: int) -> int:
    """The memory left for tokens after the states, a spare one, and the states of drafts (_handle_max_mamba_cache).

    Without a number, the states take `--mamba-full-memory-ratio` times the memory of the tokens. `state` is the bytes
    of one state, and `states_each` the states of a running request.
    """
    if not state:
        return memory
    checked = settings.speculative_num_draft_tokens or 0
    requests, states = settings.max_running_requests, settings.max_mamba_cache_size
    if states is None and settings.disable_radix_cache and requests is not None:
        states = requests
    if states is None:
        ratio = settings.mamba_full_memory_ratio
        budget = memory * ratio / (1 + ratio)
        states = int((budget - state * (1 + checked)) // (state * (1 + checked / states_each)))
    running = min(_DRAFTING_REQUESTS if requests is None else requests, states // states_each)
    return max(0, memory - state * (states + 1 + (running + 1) * checked))


def profiled_tokens(pools: Pools, settings: Settings, memory: int) -> int | None:
    """max_total_num_tokens for the memory left for tokens: whole pages, without the dummy page.

    None if a pipeline stage has only states.
    """
    share: float = settings.swa_full_tokens_ratio if pools.has_full else 1
    cell = pools.full + share * pools.window if pools.window else pools.full
    return int(memory // cell) // settings.page_size * settings.page_size if cell else None
