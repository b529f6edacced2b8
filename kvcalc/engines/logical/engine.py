"""No engine: exactly the bytes of the formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.engines.engine import Engine
from kvcalc.memory.curves import stored_curve, stored_sequence_bytes
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import Growth, stored_cache_bytes
from kvcalc.model.caches import Cache
from kvcalc.model.spec import ModelSpec

if TYPE_CHECKING:
    from kvcalc.engines.prefixes import Prefixes
    from kvcalc.engines.reserve import Reserve, ReserveInputs


class Logical(Engine):
    """Counts only the bytes that attention must store."""

    name = "logical"

    def reserve(self, question: ReserveInputs) -> Reserve:
        """No engine: reserve 10% of the device for the software that runs the model, regardless of the model.

        vLLM left the same share unused by default until 0.20 (gpu_memory_utilization 0.9).
        """
        from kvcalc.engines.reserve import RESERVE, Held, Reserve

        return Reserve([Held(RESERVE, "reserved (10 %)", question.memory_bytes // 10)], {})

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        return stored_cache_bytes(cache, tokens, dtype)

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return batch * stored_sequence_bytes(share, dtype, tokens)

    def prefixes(self, share: ModelSpec, dtype: Dtype, whole: bool = False) -> Prefixes:
        from kvcalc.engines.prefixes import LogicalPrefixes

        return LogicalPrefixes(share, dtype)

    def growth(self, spec: ModelSpec, dtype: Dtype, tokens: int) -> Growth:
        curve = stored_curve(spec, dtype)
        return super().growth(spec, dtype, tokens) if curve is None else curve.growth_at(tokens)
