"""The estimate document: its totals, its shares per device, its variants and its capacity."""

from __future__ import annotations

import json
from fractions import Fraction
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcalc
from tests.conftest import PLAIN_PRESETS, loaded
from tests.documents import estimate, texts

names = st.sampled_from(PLAIN_PRESETS)


@given(names, st.integers(1, 10**18), st.integers(1, 1000), st.sampled_from(["bf16", "fp32", "fp8", "nvfp4"]))
def test_the_documents_figures_agree_with_each_other(name: str, tokens: int, batch: int, kv_dtype: str) -> None:
    answer = estimate(loaded(name), context_tokens=tokens, batch_size=batch, kv_dtype=kv_dtype)
    cache = answer["kv_cache"]
    assert cache["total_bytes"] == cache["stored_bytes"] == batch * cache["bytes_per_sequence"]
    assert cache["bytes_per_sequence"] == cache["fixed_bytes_per_sequence"] + cache["bytes_per_token"] * tokens
    assert cache["bytes_per_sequence"] == sum(
        (r["last"] - r["first"] + 1) * r["bytes_per_layer"] for r in cache["layers"]
    )
    own = [v for v in answer["variants"] if v["own"]]
    assert len(own) == 1
    assert own[0]["total_bytes"] == cache["total_bytes"]
    json.dumps(answer, allow_nan=False)


@given(names, st.integers(1, 10**6), st.integers(1, 64), st.sampled_from(["bf16", "q8_0"]))
def test_the_formulas_numbers_multiply_to_the_stored_bytes(name: str, tokens: int, batch: int, kv_dtype: str) -> None:
    cache = estimate(loaded(name), context_tokens=tokens, batch_size=batch, kv_dtype=kv_dtype)["kv_cache"]
    for row in cache["formulas"]:
        assert prod(map(Fraction, row["numbers"].replace(",", "").split(" x "))) == row["bytes"]
        assert len(row["symbols"].split(" x ")) == len(row["numbers"].split(" x "))
    assert sum(row["bytes"] for row in cache["formulas"]) == cache["stored_bytes"]
    assert len({(row["kind"], row["window"]) for row in cache["formulas"]}) == len(cache["formulas"])


def test_tensor_parallelism_divides_heads_replicates_beyond_and_never_divides_a_latent() -> None:
    def devices(name: str, tp: int) -> tuple[int, int, int]:
        cache = estimate(loaded(name), context_tokens=100, tensor_parallel_size=tp)["kv_cache"]
        return cache["total_bytes"], cache["bytes_per_device"], cache["devices_total_bytes"]

    total, share, together = devices("llama-3-70b", 8)
    assert (share, together) == (total // 8, total)
    total, share, together = devices("llama-3-70b", 16)
    assert (share, together) == (total // 8, 2 * total)
    total, share, together = devices("deepseek-v3", 8)
    assert (share, together) == (total, 8 * total)


def test_a_what_if_changes_the_cache_and_is_echoed() -> None:
    answer = estimate(kvcalc.load_model("llama-3-70b"), context_tokens=10, what_if=kvcalc.WhatIf(num_kv_heads=4))
    assert answer["model"]["num_kv_heads"] == 4
    assert answer["kv_cache"]["total_bytes"] == 2 * 80 * 4 * 128 * 10 * 2
    assert [v["own"] for v in answer["variants"]] == [False] * 4
    assert answer["variants"][2]["total_bytes"] == answer["kv_cache"]["total_bytes"]


def test_a_variant_the_model_cannot_have_is_null_with_a_reason() -> None:
    gqa = estimate(kvcalc.load_model("falcon-7b"))["variants"][2]
    assert gqa["total_bytes"] is None
    assert gqa["ratio_to_mha"] is None
    assert "71" in gqa["reason"]


def test_engine_figures_and_stored_bytes_stay_apart() -> None:
    cache = estimate(kvcalc.load_model("mistral-7b-v0.1"), context_tokens=5000, engine="transformers")["kv_cache"]
    assert cache["stored_bytes"] == 536_870_912
    assert cache["total_bytes"] == 536_870_912 // 4096 * 4095
    assert cache["decode_read_bytes"] == cache["stored_bytes"]


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_only_an_explicit_narrow_kv_dtype_shrinks_the_cache(kv_dtype: str) -> None:
    spec = kvcalc.load_model("llama-3-8b")
    wide = estimate(spec, dtype=kv_dtype)["kv_cache"]["total_bytes"]
    narrow = estimate(spec, kv_dtype=kv_dtype)["kv_cache"]["total_bytes"]
    assert wide == 2 * narrow


@given(names, st.integers(1, 4), st.sampled_from([1, 8]), st.integers(10**6, 10**13))
def test_capacity_is_the_last_that_fits(name: str, batch: int, tp: int, memory: int) -> None:
    spec = loaded(name)
    if spec.attention.num_heads % tp or (
        not spec.attention.is_latent and spec.attention.num_kv_heads % tp and tp % spec.attention.num_kv_heads
    ):
        return

    def share(tokens: int, sequences: int) -> int:
        answer = estimate(spec, context_tokens=tokens, batch_size=sequences, tensor_parallel_size=tp)
        return int(answer["kv_cache"]["bytes_per_device"])

    answer = estimate(spec, context_tokens=100, batch_size=batch, tensor_parallel_size=tp, kv_memory_bytes=memory)
    fit = answer["fit"]
    assert fit["fits"] == (share(100, batch) <= memory)
    assert fit["free_bytes"] == memory - share(100, batch)
    most = fit["max_batch_size"]
    assert share(100, most + 1) > memory
    assert most == 0 or share(100, most) <= memory
    longest = fit["memory_context_tokens"]
    if longest is None:
        assert share(10**15, batch) <= memory
        assert any("does not limit" in warning for warning in texts(answer))
    else:
        assert share(longest + 1, batch) > memory
        assert longest == 0 or share(longest, batch) <= memory


def test_memory_holds_any_number_of_sequences_that_keep_nothing() -> None:
    fit = estimate(kvcalc.load_model("bert-base"), engine="vllm", kv_memory_bytes=10)["fit"]
    assert (fit["fits"], fit["max_batch_size"], fit["memory_context_tokens"]) == (True, None, None)
