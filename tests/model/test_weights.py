"""Parameter counts: exact counts of published models, families computed by hand, and what is not counted."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import ModelError
from kvcalc.memory.weights import count_parameters
from kvcalc.model.spec import weights_of
from kvcalc.model.tensors import ModelWeights

LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


def weights(model_type: str, **config: Any) -> ModelWeights:
    spec = kvcalc.read_config({"model_type": model_type, **config}, model_type, "test")
    found = weights_of(spec)
    if found is None:
        raise ModelError(str(spec.weights_reason))
    return found


def parameters(model_type: str, **config: Any) -> int:
    return count_parameters(weights(model_type, **config)).total


# Published sizes: the sum over the tensors of the checkpoint, without layers for multi-token prediction. A tied head
# counts once.
@pytest.mark.parametrize(
    ("name", "total", "active", "embedding"),
    [
        ("llama-7b", 6_738_415_616, 6_607_343_616, 131_072_000),
        ("llama-2-70b", 68_976_648_192, 68_714_504_192, 262_144_000),
        ("codellama-34b", 33_743_970_304, 33_481_826_304, 262_144_000),
        ("llama-3-8b", 8_030_261_248, 7_504_924_672, 525_336_576),
        ("llama-3-70b", 70_553_706_496, 69_503_033_344, 1_050_673_152),
        ("mistral-7b-v0.1", 7_241_732_096, 7_110_660_096, 131_072_000),
        ("mistral-7b-v0.3", 7_248_023_552, 7_113_805_824, 134_217_728),
        # The embedding is tied, so it is read as the head. A token reads one row of the positions (1,024 x 768).
        ("gpt2", 124_439_808, 124_439_808 - 786_432, 38_597_376),
        ("gemma-3-27b", 27_009_346_304, 27_009_346_304, 1_409_630_208),
        ("falcon-7b", 6_921_720_704, 6_921_720_704, 295_469_056),
        # An encoder without an output head: a token looks up one row of the embedding, the positions and the types.
        ("bert-base", 109_482_240, 109_482_240 - (30_522 + 512 + 2) * 768, 23_440_896),
        ("deepseek-v2", 235_741_434_880, 20_851_512_320, 524_288_000),
        ("deepseek-v3", 671_026_404_352, 36_625_603_584, 926_679_040),
        ("gpt-oss-120b", 116_829_156_672, 5_132_849_472, 579_133_440),
    ],
)
def test_presets(name: str, total: int, active: int, embedding: int) -> None:
    spec = kvcalc.load_model(name)
    found = weights_of(spec)
    assert found is not None
    assert count_parameters(found) == (total, active, embedding)


def test_a_llama_by_hand() -> None:
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
    layer = attention + 3 * 32 * 48 + 2 * 32
    assert parameters("llama", **LLAMA) == 6 * layer + 2 * 64 * 32 + 32
    assert parameters("llama", **LLAMA, tie_word_embeddings=True) == 6 * layer + 64 * 32 + 32
    biases = 32 + 2 * 16 + 32 + 2 * 48 + 32
    biased = parameters("llama", **LLAMA, attention_bias=True, mlp_bias=True)
    assert biased == 6 * (layer + biases) + 2 * 64 * 32 + 32


def test_the_head_may_have_fewer_rows_than_the_embedding() -> None:
    """Apertus 1.5 reads tokens of images and sounds, and writes text alone."""
    whole, text = (parameters("apertus1p5_text", **LLAMA, **more) for more in ({}, {"output_vocab_size": 40}))
    assert whole - text == (64 - 40) * 32


def test_experts_are_counted_whole_and_read_in_part() -> None:
    config = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}
    counted = count_parameters(weights("mixtral", **config))
    one = 3 * 32 * 48
    assert counted.total - counted.active_per_token == 6 * 6 * one + 64 * 32


def test_layers_without_experts() -> None:
    config = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    moe, dense = 4 * 3 * 32 * 8 + 4 * 32, 3 * 32 * 48
    all_sparse = parameters("qwen3_moe", **config)
    assert all_sparse - parameters("qwen3_moe", **config, mlp_only_layers=[0, 5]) == 2 * (moe - dense)
    assert all_sparse - parameters("qwen3_moe", **config, decoder_sparse_step=2) == 3 * (moe - dense)


def test_a_layer_that_shares_keys_and_values_has_no_matrices_for_them() -> None:
    config = {
        **LLAMA, "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 12, "hidden_size_per_layer_input": 0,
        "sliding_window": 4,
    }  # fmt: skip
    # Five of the last six layers have a window, with K and V of 2 heads of 8 and a norm. One has 2 heads of 16.
    shared = 5 * (2 * 32 * 16 + 8) + 2 * 32 * 32 + 16
    alone = parameters("gemma4_text", **config, num_kv_shared_layers=0)
    assert alone - parameters("gemma4_text", **config, num_kv_shared_layers=6) == shared


def test_qwen3_vl_is_tied_where_the_outer_config_says_so() -> None:
    inner = {**LLAMA, "head_dim": 8, "tie_word_embeddings": True}
    untied = kvcalc.read_config({"model_type": "qwen3_vl", "text_config": inner}, "test", "test")
    tied = kvcalc.read_config({"model_type": "qwen3_vl", "text_config": inner, "tie_word_embeddings": True}, "t", "t")
    found = [weights_of(spec) for spec in (untied, tied)]
    totals = [count_parameters(weights).total for weights in found if weights is not None]
    assert totals[0] - totals[1] == 64 * 32


def test_published_sizes_of_models_that_are_no_presets() -> None:
    minimax = {
        "attn_type_list": ([0] * 7 + [1]) * 10, "head_dim": 128, "hidden_size": 6144, "intermediate_size": 9216,
        "num_attention_heads": 64, "num_experts_per_tok": 2, "num_hidden_layers": 80, "num_key_value_heads": 8,
        "num_local_experts": 32, "shared_intermediate_size": 0, "vocab_size": 200064,
    }  # fmt: skip
    assert parameters("minimax_text_01", **minimax) == 456_089_655_296
    ernie = {
        "hidden_size": 2560, "intermediate_size": 12288, "num_attention_heads": 20, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_k": 6,
        "moe_intermediate_size": 1536, "moe_layer_start_index": 1, "moe_layer_end_index": 28, "moe_layer_interval": 1,
        "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424,
    }  # fmt: skip
    assert parameters("ernie4_5_moe", **ernie) == 21_825_437_888


def test_a_family_that_is_not_counted_gives_no_number() -> None:
    for model_type in ("generic", "granitemoeshared"):
        spec = kvcalc.read_config({"model_type": model_type, **LLAMA}, model_type, "test")
        assert weights_of(spec) is None
        assert spec.weights_reason == f"the weights of model_type {model_type} are not counted"


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("llama", {"vocab_size": 0}, "vocab_size"),
        ("llama", {"intermediate_size": "wide"}, "intermediate_size"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3 is more than"),
        ("mixtral", {"num_local_experts": 2, "num_experts": 4}, "num_experts"),
        ("llama4_text", {"moe_layers": [6]}, "moe_layers"),
        ("gemma3n_text", {"intermediate_size": [48], "num_kv_shared_layers": 0}, "intermediate_size"),
        ("llava", {"num_hidden_layers": 2}, "flat llava config"),
    ],
)
def test_what_is_damaged_is_refused(model_type: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parameters(model_type, **{**LLAMA, "head_dim": 8, **config})
