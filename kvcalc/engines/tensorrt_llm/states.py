"""TensorRT-LLM's hybrids since 1.3.0rc24: blocks and states are in pools of KVCacheManagerV2.

There is a state for every request that may run, and one for the requests that fill up a CUDA graph. The pools have the
proportion for requests half as long as the longest one (_get_typical_request_capacity), unless that leaves too few
states. Prefixes need snapshots of states, which are off by default (mamba_state_config.periodic_snapshot_interval).

Source: MambaHybridCacheManagerV2 (_torch/pyexecutor/kv_cache/mamba_cache_manager/mamba_cache_manager_v2.py and
common.py) at commit 28295084972c; the default since NVIDIA/TensorRT-LLM#16598 of 28 July 2026.
"""

from __future__ import annotations

from kvcalc.engines.account import BlockPool, PoolFigures
from kvcalc.engines.engine import Engine
from kvcalc.engines.rounding import ceil_div
from kvcalc.engines.tensorrt_llm.engine import cache_buffers, quota_of, token_bytes
from kvcalc.engines.tensorrt_llm.hybrid import Hybrid, attending, state_parts
from kvcalc.engines.tensorrt_llm.pools import (
    RESUMES_BELOW,
    STATE,
    Division,
    Group,
    Sequences,
    check_average,
    least_slots,
    pooled,
)
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import Growth, growth_at_slope
from kvcalc.model.caches import RecurrentState
from kvcalc.model.memo import remembered_of_two
from kvcalc.model.spec import ModelSpec, distinct_caches
from kvcalc.releases import Release

_SINCE = Release.of(1, 3)._replace(phase=-1, of_phase=24)


class HybridPools(Hybrid):
    """Counts a pool of blocks and one of states, which are just large enough for a batch."""

    version = "commit 28295084972c"
    has_pools = True
    dummies = 1  # _get_num_cuda_graph_padding_dummy_slots
    no_reuse = "snapshots of states are off by default (mamba_state_config.periodic_snapshot_interval)"

    @classmethod
    def at(cls, model_type: str, release: Release | None) -> type[Engine]:
        """The rules of a release."""
        return cls if release is None or release >= _SINCE else Hybrid

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        division, states = self._division(share, dtype, tokens, batch), self._num_states(batch)
        typical, blocks = self._typical_blocks(tokens), ceil_div(tokens, self.block)
        if self.chosen.avg_seq_len is None and blocks > 1:
            blocks = 2 * typical
        needed = {None: batch * blocks, STATE: states}
        slots = [needed[group.windows[0]] for group in division.groups]
        if len(slots) == 1:
            return division.smallest(slots)
        return division.multiple(slots, (states - self.dummies) * typical)

    def growth(self, spec: ModelSpec, dtype: Dtype, tokens: int) -> Growth:
        return growth_at_slope(token_bytes(attending(spec), dtype), self.held_bytes(spec, dtype, tokens, 1), tokens)

    def check_context(self, tokens: int) -> None:
        check_average(self.chosen.avg_seq_len, tokens)

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> PoolFigures:
        division, most = self._division(share, dtype, tokens, batch), self.chosen.max_tokens
        rows = token_bytes(attending(share), dtype)
        if most is not None:
            most = ceil_div((most * rows + self._num_states(batch) * self._all_states(share)) * 100, RESUMES_BELOW)
        pool = BlockPool(self.block, self.block * rows, self.held_bytes(share, dtype, tokens, 1))
        quota = quota_of(self.chosen, memory, most)
        if rows and quota is not None:
            slots = division.slots(quota)[0]
            pool = BlockPool(*pool[:3], slots, slots * self.block, slots / ceil_div(tokens, self.block))
        return PoolFigures(pool, {"window_pools": None})

    def _num_states(self, batch: int) -> int:
        """The states of the requests that may run, --max-batch-size in every pipeline stage, and the dummy's."""
        return max(batch, (self.chosen.max_batch_size or 0) * max(1, len(self.bounds))) + self.dummies

    def _typical_blocks(self, tokens: int) -> int:
        """The blocks of the requests that set the proportion: half of the longest one's, which has an even number."""
        average = self.chosen.avg_seq_len
        return ceil_div(tokens, 2 * self.block) if average is None else ceil_div(min(average, tokens), self.block)

    def _division(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> Division:
        states, block, dummies = self._num_states(batch), self.block, Sequences(0, number=self.dummies)
        groups = [Group(tuple(block * size for size in sizes), (None,)) for sizes in (_rows(share, dtype),) if sizes]
        groups += [Group(sizes, (STATE,)) for sizes in (_states(self.spec, share),) if sizes]
        batches = [[Sequences(0, number=states)]]
        if self.chosen.avg_seq_len is not None:
            longest = [Sequences(tokens), Sequences(1, number=states - 1 - self.dummies)]
            batches += [[*longest, dummies], [Sequences(self.chosen.step_tokens), dummies]]
        typical = (Sequences(self._typical_blocks(tokens) * block, number=states - self.dummies), dummies)
        return Division(groups, block, typical, least_slots(groups, block, batches))


@remembered_of_two
def _rows(share: ModelSpec, dtype: Dtype) -> tuple[int, ...]:
    """The bytes of a token in each pool of blocks."""
    return pooled((count, cache_buffers(cache, dtype)) for cache, count in distinct_caches(share))  # a state has none


@remembered_of_two
def _states(spec: ModelSpec, share: ModelSpec) -> tuple[int, ...]:
    """The bytes of a request in each pool of states: the states, and the inputs of the convolutions."""
    caches = [(cache, count) for cache, count in distinct_caches(share) if isinstance(cache, RecurrentState)]
    return pooled((count, state_parts(spec, cache)) for cache, count in caches)
