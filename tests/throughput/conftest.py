"""Models on devices for the speed tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcalc.engines import load_engine
from kvcalc.memory.dtypes import Dtype, parse_dtype
from kvcalc.memory.kv_cache import on_device
from kvcalc.memory.reads import Reads
from kvcalc.model.layout import Layout
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.throughput.counts import Counts, count
from kvcalc.throughput.hardware import find_gpu
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.speed import StoredWeights, speed_model
from tests.conftest import loaded

MakeCounts = Callable[..., Counts]
MakeModel = Callable[..., SpeedModel]


def stored(name: str, dtype: str = "bf16") -> StoredWeights:
    spec = loaded(name)
    weights = weights_of(spec)
    assert weights is not None
    given = parse_dtype(dtype, "--dtype")
    linear = None if given.is_float else given
    return StoredWeights(weights, parse_dtype("bf16", "--dtype"), linear, None, dtype)


def formula_reads(spec: ModelSpec, dtype: Dtype, tensor_parallel_size: int = 1, **layout: int) -> Reads:
    """What a step reads of one rank's cache if it is stored as the formula says."""
    return load_engine("logical", spec).reads(on_device(spec, tensor_parallel_size), dtype)


@pytest.fixture
def counts_of() -> MakeCounts:
    def make(name: str, dtype: str = "bf16", kv_dtype: str = "bf16", names: Any = frozenset(), **layout: Any) -> Counts:
        held = stored(name, dtype)
        spec, kv = loaded(name), parse_dtype(kv_dtype, "--kv-dtype")
        reads = formula_reads(spec, kv, **layout)
        return count(spec, held.weights, held.base, reads, Layout(**layout), held.linear, None, names)

    return make


@pytest.fixture
def model_of() -> MakeModel:
    def make(name: str, gpu: str = "h100", engine: str = "vllm", dtype: str = "bf16", **layout: Any) -> SpeedModel:
        spec, kv = loaded(name), parse_dtype("bf16", "--kv-dtype")
        reads = formula_reads(spec, kv, **layout)
        return speed_model(spec, stored(name, dtype), reads, find_gpu(gpu), engine, Layout(**layout))[0]

    return make
