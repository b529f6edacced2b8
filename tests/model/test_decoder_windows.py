"""Which layers have a window by each family's pattern, and which keys enable it."""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc.errors import ModelError
from kvcalc.model.hf_config import read_config
from tests.model.test_hybrid_families import letters
from tests.rows import every_row

EIGHT = {"num_hidden_layers": 8, "sliding_window": 5}


@every_row(
    "model_type, config, expected",
    [
        ("afmoe", {}, "sssfsssf"),
        ("afmoe", {"global_attn_every_n_layers": 3}, "ssfssfss"),
        ("beam", {}, "sssssfsf"),
        ("cohere2_moe", {}, "sssfsssf"),
        ("cohere2_moe", {"first_k_dense_replace": 3}, "fffsssfs"),
        ("cohere2_moe", {"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2}, "sfssssfs"),
        ("cohere_compass_text", {}, "ffffffff"),
        ("cohere_compass_text", {"layer_types": ["sliding_attention"] * 7 + ["full_attention"]}, "sssssssf"),
        ("cwm", {}, "fsssfsss"),
        ("dots1", {}, "ffffffff"),
        ("dots1", {"max_window_layers": 6}, "ffffffss"),
        ("doge", {}, "ssssssss"),
        ("doge", {"keep_window_size": 3, "sliding_window": None}, "ffffffff"),
        ("exaone4", {}, "sssfsssf"),
        ("exaone4", {"sliding_window_pattern": 2}, "sfsfsfsf"),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": None}, "ffffffff"),
        ("exaone_moe", {}, "sssfsssf"),
        ("flint", {}, "ffsssfsf"),
        ("granite_swa", {}, "fsssfsss"),
        ("granitemoe_swa", {}, "fsssfsss"),
        ("kolibri1", {}, "ssssfsss"),
        ("laguna", {}, "ffffffff"),
        ("laguna", {"layer_types": ["full_attention", "sliding_attention"] * 4}, "fsfsfsfs"),
        ("mellum", {}, "ffffffff"),
        ("ministral", {}, "ssssssss"),
        ("ministral", {"layer_types": ["full_attention", "sliding_attention"] * 4}, "fsfsfsfs"),
        ("muse_glimmer_text", {}, "sssfsssf"),
        ("muse_glimmer_text", {"num_hidden_layers": 7}, "ssfsssf"),
        ("muse_spark_text", {}, "sssfsssf"),
        ("phi4_multimodal", {}, "ssssssss"),
        ("qwen2_moe", {}, "ffffffff"),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 5}, "sfsfsfff"),
        ("qwen2_5_omni_text", {"use_sliding_window": True, "max_window_layers": 6}, "ffffffss"),
        ("smollm3", {}, "ffffffff"),
        ("smollm3", {"use_sliding_window": True}, "fffsfffs"),
        ("smollm3", {"use_sliding_window": True, "no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 0]}, "sffffffs"),
        ("smollm3", {"layer_types": ["sliding_attention"] + ["full_attention"] * 7}, "sfffffff"),
        ("step3p5", {}, "ffffffff"),
        ("step3p5", {"layer_types": ["full_attention", "sliding_attention"] * 4}, "fsfsfsfs"),
    ],
)
def test_which_layers_have_a_window(model_type: str, config: dict[str, Any], expected: str) -> None:
    assert letters(model_type, **{**EIGHT, **config}) == expected


@pytest.mark.parametrize(
    ("model_type", "window"),
    [
        ("afmoe", 1024), ("beam", 512), ("cohere2_moe", 4096), ("cwm", 8192), ("exaone4", 4096), ("exaone_moe", 4096),
        ("flint", 513), ("granite_swa", 128), ("granitemoe_swa", 128), ("kolibri1", 513), ("ministral", 4096),
        ("muse_glimmer_text", 2048), ("muse_spark_text", 2048),
    ],
)  # fmt: skip
def test_windows_a_config_may_leave_out(model_type: str, window: int) -> None:
    config = {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 32}
    spec = read_config({"model_type": model_type, **config}, "x", "x")
    assert {cache.window for group in spec.layers for cache in group.caches} == {window, None} - (
        {None} if model_type == "ministral" else set()
    )


def test_a_list_of_layers_and_a_window_for_all_contradict_each_other() -> None:
    with pytest.raises(ModelError, match="layer_types"):
        letters("mistral", **EIGHT, layer_types=["full_attention"] * 8)
    assert letters("mistral", **{**EIGHT, "sliding_window": None}, layer_types=["full_attention"] * 8) == "f" * 8


def test_step_lists_the_layers_that_predict_ahead_too() -> None:
    listed = ["full_attention", "sliding_attention"] * 4 + ["sliding_attention"]
    assert letters("step3p5", **EIGHT, layer_types=listed, num_nextn_predict_layers=1) == "fsfsfsfs"
    with pytest.raises(ModelError, match="list of 10"):
        letters("step3p5", **EIGHT, layer_types=listed, num_nextn_predict_layers=2)


def test_step_may_not_give_sliding_layers_other_kv_heads() -> None:
    assert letters("step3p5", **EIGHT, attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 2})
    with pytest.raises(ModelError, match="attention_other_setting"):
        letters("step3p5", **EIGHT, attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 1})


def test_a_window_may_have_another_name_and_its_layers_a_pattern_of_words() -> None:
    """As in the configs that ExecuTorch has for MediaTek's devices."""
    config = {
        "model_type": "gemma3", "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 16, "sliding_window_attention_size": 12,
        "global_local_attention_pattern": ["SLIDING_LOCAL", "GLOBAL"],
    }  # fmt: skip
    spec = read_config(config, "x", "x")
    assert [group.caches[0].window for group in spec.layers] == [12, None, 12, None, 12]
    with pytest.raises(ModelError, match="may contain only GLOBAL and SLIDING_LOCAL"):
        read_config({**config, "global_local_attention_pattern": ["LOCAL"]}, "x", "x")


@pytest.mark.parametrize(("letters", "windows"), [("LLG", [5, 5, None, 5]), ("G", [None] * 4)])
def test_exaone_s_pattern_may_be_letters(letters: str, windows: list[int | None]) -> None:
    config = {
        "model_type": "exaone4", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "sliding_window": 5, "sliding_window_pattern": letters,
    }  # fmt: skip
    groups = read_config(config, "x", "x").layers
    assert [group.caches[0].window for group in groups for _ in range(group.num_layers)] == windows


def test_llama_s_window_is_that_of_the_listed_layers() -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    assert [group.caches[0].window for group in read_config(config, "x", "x").layers] == [None, 5]
    del config["layer_types"]
    with pytest.raises(ModelError, match="sliding_window without layer_types"):
        read_config(config, "x", "x")
