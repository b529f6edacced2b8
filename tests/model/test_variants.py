"""What-if variants: every kind from every other kind, the requested numbers, and what is not possible."""

from __future__ import annotations

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.model.caches import FullAttention, LatentAttention, SlidingWindowAttention
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.spec import cache_runs
from kvcalc.model.variants import VARIANTS, WhatIf, apply, variant
from tests.conftest import PLAIN_PRESETS
from tests.rows import every_row


def only_cache(spec: kvcalc.ModelSpec) -> object:
    ((_, _, caches),) = cache_runs(spec)
    return caches[0]


def as_kind(name: str, kind: str, **asked: int) -> object:
    changed = variant(kvcalc.load_model(name), kind, WhatIf(kind, **asked))
    assert not isinstance(changed, str), changed
    return only_cache(changed)


@pytest.mark.parametrize("name", PLAIN_PRESETS)
def test_a_models_own_kind_is_the_model_itself(name: str) -> None:
    spec = kvcalc.load_model(name)
    changed = variant(spec, spec.attention.kind)
    assert changed == spec


@every_row("name", PLAIN_PRESETS)
@every_row("kind", VARIANTS)
def test_a_variant_is_of_its_kind_or_says_why_not(name: str, kind: str) -> None:
    changed = variant(kvcalc.load_model(name), kind)
    if isinstance(changed, str):
        assert (name, kind) == ("falcon-7b", "gqa")
        assert "71" in changed
    else:
        assert changed.attention.kind == kind
        assert changed.num_layers == kvcalc.load_model(name).num_layers


@pytest.mark.parametrize(
    ("name", "groups"), [("llama-3-70b", 8), ("llama-7b", 8), ("bert-base", 6), ("deepseek-v3", 8), ("palm-540b", 8)]
)
def test_groups_are_the_models_own_else_the_largest_divisor_up_to_8(name: str, groups: int) -> None:
    cache = as_kind(name, "gqa")
    assert isinstance(cache, FullAttention)
    assert cache.num_kv_heads == groups


def test_windows_stay() -> None:
    for kind in ("mha", "mqa", "gqa"):
        cache = as_kind("mistral-7b-v0.1", kind)
        assert isinstance(cache, SlidingWindowAttention)
        assert cache.window == 4096
    assert as_kind("mistral-7b-v0.1", "mla") == LatentAttention(512, 64, 4096)


def test_an_mla_model_keeps_the_widths_of_its_keys_and_values() -> None:
    assert as_kind("deepseek-v3", "mha") == FullAttention(128, 192, 128)
    assert as_kind("deepseek-v3", "mqa") == FullAttention(1, 192, 128)
    assert as_kind("deepseek-v3", "gqa", num_kv_heads=16) == FullAttention(16, 192, 128)


def test_ranks_that_are_asked_for_replace_the_models_or_the_papers() -> None:
    assert as_kind("deepseek-v3", "mla", kv_lora_rank=256) == LatentAttention(256, 64)
    assert as_kind("llama-7b", "mla", qk_rope_head_dim=32) == LatentAttention(512, 32)


@pytest.mark.parametrize(
    ("what_if", "kind"),
    [
        (WhatIf(), None),
        (WhatIf("mqa"), "mqa"),
        (WhatIf(num_kv_heads=4), "gqa"),
        (WhatIf(kv_lora_rank=4), "mla"),
        (WhatIf(qk_rope_head_dim=4), "mla"),
        (WhatIf("mla", kv_lora_rank=4), "mla"),
        (WhatIf("mqa", num_kv_heads=1), "mqa"),
    ],
)
def test_an_option_that_only_one_kind_has_asks_for_it(what_if: WhatIf, kind: str | None) -> None:
    assert what_if.kind == kind


@pytest.mark.parametrize(
    "what_if",
    [
        WhatIf("foo"),
        WhatIf("mla", num_kv_heads=2),
        WhatIf("gqa", kv_lora_rank=4),
        WhatIf("mqa", num_kv_heads=2),
        WhatIf(num_kv_heads=2, kv_lora_rank=4),
        WhatIf("mha", num_kv_heads=2),
        WhatIf(num_kv_heads=5),
    ],
)
def test_contradictions_are_refused(what_if: WhatIf) -> None:
    with pytest.raises(UsageError):
        apply(kvcalc.load_model("llama-7b"), what_if)


def test_kv_heads_equal_to_heads_is_mha_and_one_is_mqa() -> None:
    spec = kvcalc.load_model("llama-3-70b")
    assert apply(spec, WhatIf("gqa", num_kv_heads=64)).attention.kind == "mha"
    assert apply(spec, WhatIf(num_kv_heads=1)).attention.kind == "mqa"


def test_nothing_asked_changes_nothing() -> None:
    spec = kvcalc.load_model("deepseek-v2")
    assert apply(spec, WhatIf()) is spec


def test_parameters_are_unknown_without_the_models_width() -> None:
    assert Attention(AttentionShape(8, 8, 64, 64, None)).parameters is None


def test_parameters_of_deepseek_v3s_layer_by_hand() -> None:
    down, up = 7168 * (512 + 64), 512 * 128 * (128 + 128)
    query = 7168 * 1536 + 1536 * 128 * 192
    assert Attention(kvcalc.load_model("deepseek-v3").attention).parameters == query + down + up + 128 * 128 * 7168
