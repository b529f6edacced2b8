"""TensorRT-LLM's hybrids: blocks for the layers with attention, and a state for each request in the other layers.

Source: MambaHybridCacheManager and PythonMambaCacheManager (tensorrt_llm/_torch/pyexecutor/mamba_cache_manager.py),
validate_and_set_mamba_ssm_cache_dtype (model_loader.py) and is_hybrid_linear (config_utils.py) at commits b35ac1b64368
and 00bce92cbb90, for releases before 1.3.0rc24. These managers keep no prefixes (enable_block_reuse: false). The
manager of early 2026 that does (CppMambaHybridCacheManager) is not modelled. Since 1.3.0rc24, see
`tensorrt_llm_states`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcalc.engines.account import BlockPool, Line, PoolFigures, lines_of
from kvcalc.engines.engine import not_established
from kvcalc.engines.rounding import round_up
from kvcalc.engines.tensorrt_llm.engine import TensorrtLlm, row_bytes, token_bytes
from kvcalc.errors import LayoutError, ModelError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.model.caches import Cache, FullAttention, RecurrentState
from kvcalc.model.layout import Layout
from kvcalc.model.spec import ModelSpec, all_caches, distinct_caches
from kvcalc.notes import Note

if TYPE_CHECKING:
    from kvcalc.engines.prefixes import Prefixes

_STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Hybrid(TensorrtLlm):
    """Counts a pool of blocks, and states for `--max-batch-size` requests or for those of the batch.

    `no_reuse` is why no prefixes are found again.
    """

    reserves_running = True
    dummies = 0  # the states for requests that fill up a CUDA graph
    no_reuse = "TensorRT-LLM keeps no states of prefixes then (enable_block_reuse: false)"

    def __init__(self, spec: ModelSpec, settings: Mapping[str, str], stages: int, release: str | None) -> None:
        super().__init__(spec, settings, stages, release)
        self.notes = (*self.notes, Note("engine", "no-block-reuse", f"counted without block reuse: {self.no_reuse}"))

    def check_model(self) -> None:
        caches = all_caches(self.spec)
        widths = {(c.k_head_dim, c.v_head_dim) for c in caches if isinstance(c, FullAttention)}
        for cache in caches:
            if not isinstance(cache, (RecurrentState, FullAttention)):
                raise not_established(self.spec, "TensorRT-LLM", cache.kind)
        if len(widths) != 1 or len(set(*widths)) != 1:
            raise not_established(self.spec, "TensorRT-LLM", "heads of several widths")

    def check_ranks(self, spec: ModelSpec, layout: Layout) -> None:
        size = layout.tensor_parallel_size
        groups = {cache.num_groups for cache in all_caches(spec) if isinstance(cache, RecurrentState)}
        if any(number % size for number in groups if number > 1):
            raise LayoutError(
                f"--tp {size} does not divide the {max(groups)} groups of the recurrent state",
                "TensorRT-LLM does not replicate them: use a smaller --tp, or --dp",
            )

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        if isinstance(cache, RecurrentState):
            return self._num_states(1) * self._state_bytes(cache)
        return super().cache_bytes(cache, tokens, dtype)

    def entry_sizes(self, cache: Cache, dtype: Dtype) -> tuple[int, ...]:
        if isinstance(cache, RecurrentState):
            return (self._state_bytes(cache),)
        return super().entry_sizes(cache, dtype)

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        rows = batch * round_up(tokens, self.block) * token_bytes(attending(share), dtype)
        return rows + self._num_states(batch) * self._all_states(share)

    def prefixes(self, share: ModelSpec, dtype: Dtype, whole: bool = False) -> Prefixes:
        hint = "leave --prefix-tokens, --turns and --offload out, or use another engine"
        raise ModelError(f"{share.name}: {self.name} finds no prefixes again: {self.no_reuse}", hint)

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> PoolFigures:
        """The figures of the pool of blocks, in the memory that the states leave."""
        left = None if memory is None else max(0, memory - self._num_states(batch) * self._all_states(share))
        held, with_rows = self.held_bytes(share, dtype, tokens, 1), attending(share)
        if not with_rows.layers:
            return PoolFigures(BlockPool(self.block, 0, held), {"window_pools": None})
        pool = super().blocks(with_rows, dtype, tokens, batch, left)
        return pool._replace(pool=pool.pool and pool.pool._replace(request_bytes=held))

    def lines(self, share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line]:
        return self.pool(share, dtype, tokens, 1)

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line]:
        sizes = dict.fromkeys(("stored", "different layout or dtype", "blocks rounded up"), 0)
        for cache, num_layers in distinct_caches(share):
            stored = num_layers * batch * stored_cache_bytes(cache, tokens, dtype)
            sizes["stored"] += stored
            if isinstance(cache, RecurrentState):
                sizes["different layout or dtype"] += batch * num_layers * self._state_bytes(cache) - stored
            else:
                row = num_layers * batch * row_bytes(cache, dtype)
                sizes["different layout or dtype"] += tokens * row - stored
                sizes["blocks rounded up"] += (round_up(tokens, self.block) - tokens) * row
        state = self._all_states(share)
        sizes["states beyond the batch"] = (self._num_states(batch) - self.dummies - batch) * state
        sizes["dummy state"] = self.dummies * state
        rest = self.held_bytes(share, dtype, tokens, batch) - sum(sizes.values())
        return lines_of({**sizes, "pools in a fixed proportion": rest})

    def _num_states(self, batch: int) -> int:
        return max(batch, self.chosen.max_batch_size or 0)

    def _all_states(self, share: ModelSpec) -> int:
        return sum(n * self._state_bytes(c) for c, n in distinct_caches(share) if isinstance(c, RecurrentState))

    def _state_bytes(self, cache: RecurrentState) -> int:
        return sum(state_parts(self.spec, cache))


def state_parts(spec: ModelSpec, cache: RecurrentState) -> tuple[int, int]:
    """Bytes of the convolution's inputs and of the state, of one request in one layer.

    The inputs are in the model's dtype. So are the states, unless the config names theirs.
    """
    inputs = DTYPES[cache.conv_dtype or "bf16"]
    states = DTYPES[_STATE_DTYPES.get(spec.state_dtype or "", inputs.name)]
    return bytes_of(cache.conv_channels * (cache.conv_kernel - 1), inputs), bytes_of(cache.state_elements, states)


def attending(share: ModelSpec) -> ModelSpec:
    """The layers with K and V."""
    groups = (
        group for group in share.layers if any(not isinstance(cache, RecurrentState) for cache in group.caches)
    )  # fmt: skip
    return share._replace(layers=tuple(groups))
