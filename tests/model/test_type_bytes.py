"""Small models of many types: the bytes that Transformers 5.23.0 keeps for 13 tokens, and the layers of other types.

The bytes in type_bytes.jsonl were counted on models built from these configs, as tests/oracle does it; those of Dory,
LaraMini and Apertus 1.5 with Transformers 5.24.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcalc.engines import engine_class, load_engine
from kvcalc.errors import ModelError
from kvcalc.memory.dtypes import DTYPES
from kvcalc.model.caches import (
    FullAttention,
    IndexerKeys,
    LatentAttention,
    RecurrentState,
    SlidingWindowAttention,
)
from kvcalc.model.hf_config import is_remote, known_types, read_config
from kvcalc.model.layers import LayerGroup
from kvcalc.model.spec import all_caches
from kvcalc.model.type_tables import REFUSED
from tests.documents import estimate
from tests.rows import every_row

ROWS = [json.loads(line) for line in Path(__file__).with_name("type_bytes.jsonl").read_text().splitlines()]
PLAIN = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
KV = {**PLAIN, "num_key_value_heads": 2}


@every_row("row", ROWS)
def test_a_small_model_keeps_what_transformers_keeps(row: dict[str, Any]) -> None:
    spec = read_config(row["config"], "small", "small")
    answer = estimate(
        spec, context_tokens=13, dtype=row["dtype"], engine="transformers", encoder_tokens=row["encoder_tokens"]
    )  # fmt: skip
    assert answer["kv_cache"]["total_bytes"] == row["bytes"]


def test_a_token_more_takes_an_entry_more() -> None:
    kinds, bf16 = set(), DTYPES["bf16"]
    for row in ROWS:
        rules = load_engine("transformers", read_config(row["config"], "small", "small"))
        for cache in all_caches(rules.spec):
            if cache.window is None and isinstance(cache, (FullAttention, LatentAttention, IndexerKeys)):
                held = [rules.cache_bytes(cache, 4096 * number, bf16) for number in (1, 2)]
                assert held[1] - held[0] == 4096 * sum(rules.entry_sizes(cache, bf16)), row["config"]
                kinds.add(cache.kind)
    assert len(kinds) == 3


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_without_a_cache_is_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(ModelError, match=model_type) as caught:
        read_config({"model_type": model_type, **PLAIN}, "x", "x")
    assert REFUSED[model_type] in caught.value.message
    assert model_type not in known_types()


def layers(config: dict[str, Any]) -> tuple[LayerGroup, ...]:
    spec = read_config(config, "x", "x")
    assert is_remote(config["model_type"])
    assert not spec.in_transformers
    return spec.layers


@pytest.mark.parametrize("model_type", ["telechat3", "solar", "param2moe"])
def test_these_types_have_the_attention_of_llama(model_type: str) -> None:
    (group,) = layers({"model_type": model_type, **KV})
    assert group.caches == (FullAttention(2, 16, 16),)
    with pytest.raises(ModelError, match="num_key_value_heads is missing"):
        read_config({"model_type": model_type, **PLAIN}, "x", "x")


def test_sarvam_is_a_class_of_transformers() -> None:
    """SarvamMoEConfig, Transformers 5.24.0."""
    spec = read_config({"model_type": "sarvam_moe", **PLAIN, **KV}, "x", "x")
    assert spec.in_transformers
    assert not read_config({"model_type": "solar", **PLAIN, **KV}, "x", "x").in_transformers


def test_step_s_groups_are_its_kv_heads_and_step3_has_one() -> None:
    assert layers({"model_type": "step1", **PLAIN, "num_attention_groups": 4})[0].caches == (FullAttention(4, 16, 16),)
    assert layers({"model_type": "step3_text", **PLAIN, "num_attention_groups": 1})[0].caches == (
        FullAttention(1, 256, 256),
    )


def test_step5_has_a_window_in_every_second_layer_unless_the_config_lists_them() -> None:
    config = {"model_type": "step5", **PLAIN, "num_attention_groups": 2, "sliding_window": 8}
    first, second, *_ = layers(config)
    assert first.caches == (SlidingWindowAttention(8, 2, 16, 16),)
    assert second.caches == (FullAttention(2, 16, 16),)
    listed = {**config, "num_nextn_predict_layers": 1, "layer_types": ["full_attention"] * 8 + ["sliding_attention"]}
    assert [group.num_layers for group in layers(listed)] == [8]
    assert [group.num_layers for group in layers({**config, "sliding_window": None})] == [8]
    with pytest.raises(ModelError, match="sparse_config"):
        read_config({**config, "sparse_config": {"num_heads": 2}}, "x", "x")


@pytest.mark.parametrize("window", [{}, {"window_size": 16}, {"sliding_window": 16}, {"sliding_window": [16, None]}])
def test_plamo3_has_a_window_in_seven_of_eight_layers(window: dict[str, Any]) -> None:
    first, last = layers({"model_type": "plamo3", **KV, **window})
    assert (first.num_layers, first.caches[0].window) == (7, 16 if window else 128)
    assert last.caches == (FullAttention(2, 128, 128),)


def test_plamo3_with_several_windows_is_refused() -> None:
    with pytest.raises(ModelError, match="sliding_window: all layers"):
        read_config({"model_type": "plamo3", **KV, "sliding_window": [16, 8]}, "x", "x")


def test_domyn_edge_has_a_width_and_a_window_for_each_layer() -> None:
    windows = {"window_sizes": [[-1, 0], [4, 0]] * 4}
    wide, narrow = FullAttention(2, 32, 32), SlidingWindowAttention(5, 2, 8, 8)
    saved = {"head_dim": 32, "per_layer_config": {str(number): {"head_dim": 8} for number in range(1, 8, 2)}}
    for widths in ({"head_sizes": [32, 8] * 4}, saved):
        found = layers({"model_type": "domynedge", **KV, **windows, **widths})
        assert [group.caches for group in found] == [(wide,), (narrow,)] * 4
    with pytest.raises(ModelError, match="must list 8 layers"):
        read_config({"model_type": "domynedge", **KV, "head_sizes": [8] * 8, "window_sizes": [[4, 0]]}, "x", "x")


def test_alice_ai_has_kimis_delta_attention() -> None:
    config = {**KV, "model_type": "alice_ai", "linear_num_key_heads": 4, "linear_num_value_heads": 4}
    delta, full = layers({**config, "linear_key_head_dim": 8, "linear_value_head_dim": 8})[:2]
    assert (delta.num_layers, delta.caches) == (3, (RecurrentState(3 * 32, 4, 4 * 8 * 8, num_heads=4),))
    assert full.caches == (FullAttention(2, 256, 256),)
    with pytest.raises(ModelError, match="linear_num_key_heads and linear_num_value_heads must be the same"):
        read_config({**config, "linear_num_value_heads": 8}, "x", "x")


def test_gigachat_3_5_has_delta_nets_and_mla() -> None:
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = {**KV, **latent, "model_type": "gigachat3_5", "linear_key_head_dim": 8, "linear_value_head_dim": 16}
    delta, full = layers({**config, "full_attention_layers": [7]})
    assert (delta.num_layers, delta.caches) == (7, (RecurrentState(2 * 16 + 64, 4, 4 * 8 * 16, num_heads=2),))
    assert full.caches == (LatentAttention(16, 4),)


def test_jet_nemotron_has_states_windows_and_attention() -> None:
    efficient = {"jet": {"num_heads": 2, "head_dim": 6, "expand_v": 2.6666666667, "conv_size": 4}}
    kinds = ["jet"] * 6 + ["attn", "swa"]
    config = {**KV, "model_type": "jet_nemotron", "layer_types": kinds}
    with_window = {**efficient, "swa": {"window_size": 12}}
    jet, full, window = layers({**config, "efficient_attention_config": with_window})
    # 6 * 2.6666666667 is 16.
    assert (jet.num_layers, jet.caches) == (6, (RecurrentState(2 * (2 * 6 + 16), 4, 2 * 6 * 16, num_heads=2),))
    assert (full.caches, window.caches) == ((FullAttention(2, 16, 16),), (SlidingWindowAttention(12, 2, 16, 16),))
    with pytest.raises(ModelError, match="layer_types is missing"):
        read_config({**config, "layer_types": None, "efficient_attention_config": with_window}, "x", "x")


def test_minicpm_sala_repeats_its_mixers() -> None:
    config = {**PLAIN, "num_key_value_heads": 2, "model_type": "minicpm_sala", "lightning_nkv": 4}
    full, lightning = layers({**config, "mixer_types": ["minicpm4", "lightning-attn"]})[:2]
    assert full.caches == (FullAttention(2, 16, 16),)
    assert lightning.caches == (RecurrentState(0, 1, 4 * 16 * 16, num_heads=4),)
    for wrong, message in (({"lightning_nkv": 2}, "must be the same"), ({"mixer_types": ["rwkv"]}, "mixer_types")):
        with pytest.raises(ModelError, match=message):
            read_config({**config, "mixer_types": ["lightning-attn"], **wrong}, "x", "x")


def test_inkling_2_runs_its_middle_layers_again() -> None:
    """Transformers 5.24.0 keeps 48 layers for 24, of which 12 run three times."""
    config = {**KV, "num_hidden_layers": 24, "model_type": "inkling2_loop_text"}
    for own in ({}, {"loop_config": {"core_start": 6, "core_end": 18, "num_passes": 3}}):
        assert sum(group.num_layers for group in read_config({**config, **own}, "x", "x").layers) == 48
    twice = {"loop_layer_index_start": 6, "loop_layer_index_end": 12, "loop_num_passes": 2}
    assert sum(group.num_layers for group in read_config({**config, **twice}, "x", "x").layers) == 30


def test_mimo_v2_has_other_heads_in_the_layers_with_a_window() -> None:
    config = {
        **KV, "model_type": "mimo_v2", "head_dim": 16, "v_head_dim": 8, "swa_head_dim": 24, "swa_v_head_dim": 12,
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "sliding_window_size": 4,
        "hybrid_layer_pattern": [0, 1] * 4,
    }  # fmt: skip
    first, second, *_ = layers(config)
    assert first.caches == (FullAttention(2, 16, 8),)
    assert second.caches == (SlidingWindowAttention(5, 1, 24, 12),)


def test_transformers_builds_mimo_v2_flash_by_its_own_pattern() -> None:
    """Its class ignores hybrid_layer_pattern, and doubles the KV heads of the layers with a window."""
    config = {
        **KV, "model_type": "mimo_v2_flash", "head_dim": 16, "v_head_dim": 8, "sliding_window_size": 4,
        "hybrid_layer_pattern": [0, 1] * 4, "swa_num_key_value_heads": 1,
    }  # fmt: skip
    spec = read_config(config, "x", "x")
    stored = estimate(spec, context_tokens=13, dtype="bf16")["kv_cache"]["total_bytes"]
    assert stored == 4 * 13 * 2 * (16 + 8) * 2 + 4 * 5 * 1 * (16 + 8) * 2
    held = estimate(spec, context_tokens=13, dtype="bf16", engine="transformers")
    # Layers 0 and 5 keep 13 tokens of 2 heads, and the other six keep 4 tokens of 4 heads.
    assert held["kv_cache"]["total_bytes"] == (2 * 13 * 2 + 6 * 4 * 4) * (16 + 8) * 2
    assert any("does not read all keys" in note["text"] for note in held["warnings"])


def test_a_static_indexer_of_minimax_m3_has_one_counter_for_the_batch() -> None:
    config = {
        **KV, "model_type": "minimax_m3_vl_text", "head_dim": 16, "index_head_dim": 8,
        "sparse_attention_config": {"sparse_attention_freq": [0, 1] * 4},
    }  # fmt: skip
    spec = read_config(config, "x", "x")
    one, three = (
        estimate(
            spec, context_tokens=10, dtype="bf16", batch_size=batch, engine="transformers",
            engine_settings={"cache": "static"},
        )["kv_cache"]["total_bytes"]
        for batch in (1, 3)
    )  # fmt: skip
    kept = 10 * 2 * (8 * 2 * 2 * 16 + 4 * 8)
    assert (one, three) == (kept + 4 * 8, 3 * kept + 4 * 8)


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm"])
def test_an_engine_refuses_types_whose_layout_nobody_has_read(engine: str) -> None:
    assert engine_class(engine).unread <= set(known_types())
    spec = read_config({**KV, "model_type": "zaya", "head_dim": 16}, "x", "x")
    with pytest.raises(ModelError, match="layout of zaya is not modelled"):
        estimate(spec, engine=engine)


def test_vllm_counts_its_own_types_and_other_engines_refuse_them() -> None:
    spec = read_config({**KV, "model_type": "telechat3"}, "x", "x")
    assert estimate(spec, context_tokens=16, dtype="bf16", engine="vllm")["kv_cache"]["total_bytes"] > 0
    for engine in ("tensorrt-llm", "sglang", "llama.cpp", "transformers"):
        with pytest.raises(ModelError):
            estimate(spec, engine=engine)
