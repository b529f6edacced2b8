"""No engine: the formulas, to the byte."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.memory.curves import stored_sequence_bytes
from kvcalc.memory.engines import Engine
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.model.spec import ModelSpec


def engine(spec: ModelSpec, settings: Mapping[str, str]) -> Engine:
    """What attention must store, and nothing else."""
    return Engine("logical", None, stored_cache_bytes, {}, sequence_bytes=stored_sequence_bytes)
