"""Models on devices for the speed tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcalc.memory.dtypes import parse_dtype
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import weights_of
from kvcalc.throughput.counts import Counts, Layout, count
from kvcalc.throughput.hardware import find_gpu
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.speed import StoredWeights, speed_model

MakeCounts = Callable[..., Counts]
MakeModel = Callable[..., SpeedModel]


def stored(name: str, dtype: str = "bf16") -> StoredWeights:
    spec = load_model(name)
    weights = weights_of(spec)
    assert weights is not None
    given = parse_dtype(dtype, "--dtype")
    linear = None if given.is_float else given
    return StoredWeights(weights, parse_dtype("bf16", "--dtype"), linear, None, dtype)


@pytest.fixture
def counts_of() -> MakeCounts:
    def make(name: str, dtype: str = "bf16", kv_dtype: str = "bf16", **layout: Any) -> Counts:
        held = stored(name, dtype)
        kv = parse_dtype(kv_dtype, "--kv-dtype")
        return count(load_model(name), held.weights, held.base, kv, Layout(**layout), held.linear)

    return make


@pytest.fixture
def model_of() -> MakeModel:
    def make(name: str, gpu: str = "h100", engine: str = "vllm", dtype: str = "bf16", **layout: Any) -> SpeedModel:
        kv = parse_dtype("bf16", "--kv-dtype")
        return speed_model(load_model(name), stored(name, dtype), kv, find_gpu(gpu), engine, Layout(**layout))[0]

    return make
