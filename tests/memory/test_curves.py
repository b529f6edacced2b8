"""The curves give the same integers as the formulas at every context, including around every cap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.errors import UsageError
from kvcalc.memory.curves import stored_curve, stored_sequence_bytes
from kvcalc.memory.dtypes import DTYPES, Dtype, pair
from kvcalc.memory.kv_cache import Growth, growth, growth_at_slope, on_device, read_cache_bytes, sequence_bytes
from kvcalc.memory.workload import bind_workload, resolve_workload
from kvcalc.model.caches import CompressedAttention, FullAttention, LatentAttention
from kvcalc.model.layers import LayerGroup
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import ModelSpec, all_caches, windows
from tests.conftest import preset_names
from tests.rows import every_row
from tests.throughput.conftest import formula_reads

BF16 = DTYPES["bf16"]


def bound(name: str) -> ModelSpec:
    model = load_model(name)
    return bind_workload(model, resolve_workload(model, 4096))


@every_row("name", preset_names())
def test_every_preset_around_its_corners(name: str) -> None:
    spec = bound(name)
    most_read = [getattr(cache, "most_read_tokens", None) or 1 for cache in all_caches(spec)]
    corners = {1, 2, 4096, 10**9, *windows(spec), *most_read}
    near = {t for corner in corners for t in (corner - 1, corner, corner + 1) if t >= 1}
    stored, read = stored_curve(spec, BF16), formula_reads(spec, BF16)
    compressed = any(isinstance(cache, CompressedAttention) for cache in all_caches(spec))
    assert (stored is None) == (read.curve is None) == compressed
    for tokens in near:
        by_hand = sequence_bytes(spec, BF16, tokens)
        assert stored_sequence_bytes(spec, BF16, tokens) == by_hand
        assert read.bytes_at(tokens) == sequence_bytes(spec, BF16, tokens, read_cache_bytes)
        if stored is not None:
            assert stored.bytes_at(tokens) == by_hand
            assert stored.growth_at(tokens) == growth(lambda t: sequence_bytes(spec, BF16, t), tokens)


@pytest.mark.parametrize("dtype", [DTYPES["fp8"], DTYPES["q8_0"], pair(DTYPES["q8_0"], DTYPES["q4_0"])], ids=str)
@given(tokens=st.integers(1, 1 << 60), devices=st.sampled_from([1, 2, 4]))
def test_block_types_k_beside_v_and_shares(dtype: Dtype, tokens: int, devices: int) -> None:
    for name in ("gemma-3-27b", "gpt-oss-120b"):
        share = on_device(bound(name), devices)
        curve = stored_curve(share, dtype)
        assert curve is not None
        assert curve.bytes_at(tokens) == sequence_bytes(share, dtype, tokens)


@given(tokens=st.integers(1, 5000))
def test_two_caps_in_one_cache(tokens: int) -> None:
    spec = bound("llama-7b")._replace(
        layers=(LayerGroup(0, 2, (LatentAttention(512, 64, 1000, 700), FullAttention(2, 8, 8, 900))),)
    )
    read = formula_reads(spec, BF16).curve
    assert read is not None
    assert read.starts == (0, 700, 900)
    assert read.bytes_at(tokens) == sequence_bytes(spec, BF16, tokens, read_cache_bytes)


def test_a_row_that_blocks_do_not_divide_is_refused_here_too(generic: dict[str, object]) -> None:
    from kvcalc.model.hf_config import read_config

    spec = read_config({**generic, "head_dim": 3}, "odd", "odd")
    with pytest.raises(UsageError, match="do not divide"):
        stored_curve(spec, DTYPES["nvfp4"])


@pytest.mark.parametrize(
    ("slope", "here", "tokens", "expected"),
    [
        (100, 1100, 10, Growth(100, 100)),
        (100, 1000, 10, Growth(100, 0)),
        # A window or a compressed cache holds less than the slope of later tokens says: nothing is below zero.
        (100, 705, 10, Growth(70, 5)),
    ],
)
def test_what_does_not_grow_is_never_negative(slope: int, here: int, tokens: int, expected: Growth) -> None:
    assert growth_at_slope(slope, here, tokens) == expected
