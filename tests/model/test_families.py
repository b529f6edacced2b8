"""The reader of each family: its key names, its defaults with their source, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc.errors import ModelError
from kvcalc.model.caches import FullAttention, LatentAttention, SlidingWindowAttention
from kvcalc.model.hf_config import read_config
from kvcalc.model.type_tables import FAMILIES, REMOTE_FAMILIES, keys_of, reader_of
from tests.rows import every_row

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
MISTRAL = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}
FALCON = {**LLAMA, "model_type": "falcon"}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 8, "n_embd": 512}
BERT = {**LLAMA, "model_type": "bert"}
DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 32, "q_lora_rank": 48,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
}  # fmt: skip


def read(config: dict[str, Any], **changes: Any) -> Any:
    return read_config({**config, **changes}, "test", "a test")


def cache(config: dict[str, Any], **changes: Any) -> Any:
    (group,) = read(config, **changes).layers
    (only,) = group.caches
    return only


def test_llama_without_kv_heads_is_mha_and_derives_head_dim() -> None:
    assert cache(LLAMA) == FullAttention(8, 64, 64)
    assert cache(LLAMA, num_key_value_heads=2) == FullAttention(2, 64, 64)


def test_an_explicit_head_dim_wins_over_hidden_size_by_heads() -> None:
    assert cache(LLAMA, head_dim=128) == FullAttention(8, 128, 128)


def test_llama_has_no_window() -> None:
    assert cache(LLAMA, sliding_window=None) == FullAttention(8, 64, 64)
    with pytest.raises(ModelError, match="sliding_window"):
        read(LLAMA, sliding_window=4096)


def test_a_window_that_is_off_and_longer_than_the_context_is_none() -> None:
    # SpecForge's configs of EAGLE-3 heads for Qwen2.5 (configs/qwen2.5-7b-eagle3.json).
    head = {**LLAMA, "use_sliding_window": False, "max_window_layers": 28, "max_position_embeddings": 32_768}
    assert cache(head, sliding_window=131_072) == FullAttention(8, 64, 64)
    # Engines that ignore the switch keep less with a shorter window, and so does a head without the switch.
    for changes in ({"sliding_window": 512}, {"sliding_window": 131_072, "use_sliding_window": True}):
        with pytest.raises(ModelError, match=r"max_window_layers|use_sliding_window"):
            read(head, **changes)


def test_mistral_windows_every_layer_by_default_and_none_with_null() -> None:
    assert cache(MISTRAL) == SlidingWindowAttention(4096, 2, 64, 64)
    assert cache(MISTRAL, sliding_window=100) == SlidingWindowAttention(100, 2, 64, 64)
    assert type(cache(MISTRAL, sliding_window=None)) is FullAttention


def test_falcon_is_multi_query_unless_told_and_grouped_in_the_new_architecture() -> None:
    assert cache(FALCON) == FullAttention(1, 64, 64)
    assert cache(FALCON, multi_query=False) == FullAttention(8, 64, 64)
    assert cache(FALCON, multi_query=True, num_kv_heads=4) == FullAttention(1, 64, 64)
    assert cache(FALCON, new_decoder_architecture=True, num_kv_heads=4) == FullAttention(4, 64, 64)
    assert cache(FALCON, new_decoder_architecture=True) == FullAttention(8, 64, 64)


def test_falcon_takes_both_names_of_a_key_but_no_contradiction() -> None:
    assert read(FALCON, n_layer=2).num_layers == 2
    with pytest.raises(ModelError, match="num_hidden_layers is 2 but n_layer is 3"):
        read(FALCON, n_layer=3)


def test_gpt2_has_its_own_names_and_biases() -> None:
    spec = read(GPT2, n_positions=77)
    assert cache(GPT2) == FullAttention(8, 64, 64)
    assert spec.max_position_embeddings == 77
    assert spec.attention.qkv_bias
    assert spec.attention.output_bias
    assert spec.attention.rope_dim == 0


def test_bert_is_an_encoder_unless_it_decodes() -> None:
    assert read(BERT).is_encoder
    assert not read(BERT, is_decoder=True).is_encoder


@pytest.mark.parametrize("config", [BERT, GPT2])
def test_cross_attention_of_decoders_is_refused_not_forgotten(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="cross"):
        read(config, add_cross_attention=True)


def test_deepseek_keeps_the_latent_and_the_rotary_key() -> None:
    spec = read(DEEPSEEK)
    assert cache(DEEPSEEK) == LatentAttention(32, 8)
    assert spec.attention.kind == "mla"
    assert spec.attention.qk_head_dim == 24
    assert spec.attention.qk_nope_head_dim == 16


def test_deepseek_v2_lite_has_no_query_rank() -> None:
    assert read(DEEPSEEK, model_type="deepseek_v2", q_lora_rank=None).attention.q_lora_rank == 0


def test_generic_takes_a_window_and_learned_positions() -> None:
    config = {**LLAMA, "model_type": "generic"}
    assert cache(config, sliding_window=9) == SlidingWindowAttention(9, 8, 64, 64)
    assert read(config, position_embedding_type="absolute").attention.rope_dim == 0
    assert read(config).attention.rope_dim == 64


def test_generic_needs_no_width_where_head_dim_is_given() -> None:
    config = {"model_type": "generic", "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    assert read(config).attention.hidden_size is None


def test_an_unknown_model_type_is_refused_with_the_near_ones() -> None:
    with pytest.raises(ModelError) as caught:
        read(LLAMA, model_type="lama")
    assert caught.value.exit_code == 3
    assert "llama" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "key", ["local_window_size", "kv_lora_rank", "num_kv_shared_layers", "layer_types", "global_head_dim", "index_topk"]
)
def test_an_unknown_key_that_may_change_the_cache_is_refused_by_name(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        read(LLAMA, **{key: 8})


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_an_unknown_cache_key_that_is_off_changes_nothing(value: object) -> None:
    assert cache(LLAMA, local_window_size=value) == FullAttention(8, 64, 64)


def test_keys_that_say_nothing_of_the_cache_pass() -> None:
    assert cache(LLAMA, initializer_range=0.02, pad_token_id=0, time_step_limit=[0.0, float("inf")]) == FullAttention(
        8, 64, 64
    )


BAD_VALUES = ["32", 32.0, True, [32], {}, -1, 0]


@every_row("config", [LLAMA, MISTRAL, FALCON, BERT, DEEPSEEK])
@every_row("value", BAD_VALUES)
@every_row("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_numbers_of_the_wrong_kind_are_refused_with_key_and_value(
    config: dict[str, Any], key: str, value: object
) -> None:
    with pytest.raises(ModelError, match=key):
        read(config, **{key: value})


# Of DeepSeek-V3, whose class has a default for every dimension of attention, configs state only what differs.
KIMI = {**DEEPSEEK, "model_type": "kimi_k2"}


@pytest.mark.parametrize("config", [LLAMA, MISTRAL, FALCON, GPT2, BERT, KIMI], ids=lambda c: c["model_type"])
def test_every_fact_that_is_missing_is_named(config: dict[str, Any]) -> None:
    optional = {"num_key_value_heads", "q_lora_rank"}
    for key in config:
        if key in optional:
            continue
        with pytest.raises(ModelError, match=key):
            read({k: v for k, v in config.items() if k != key})


def test_attention_that_a_deepseek_config_leaves_out_is_the_class_own() -> None:
    sizes = {"model_type": "deepseek_v3", "hidden_size": 2, "num_hidden_layers": 1}
    spec = read(sizes)
    assert (spec.attention.num_heads, spec.attention.kv_lora_rank, spec.attention.qk_rope_head_dim) == (128, 512, 64)
    for key in ("hidden_size", "num_hidden_layers"):
        with pytest.raises(ModelError, match=key):
            read({k: v for k, v in sizes.items() if k != key})


def test_a_misspelt_fact_is_missing_with_the_near_key() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}
    with pytest.raises(ModelError) as caught:
        read(config, num_hiden_layers=2)
    assert caught.value.hint == "did you mean num_hiden_layers?"


def test_absurd_layer_counts_are_refused() -> None:
    with pytest.raises(ModelError, match="at most"):
        read(LLAMA, num_hidden_layers=10**9)
    with pytest.raises(ModelError, match="40 digits"):
        read(LLAMA, num_hidden_layers=10**5000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("float16", "fp16"), ("bfloat16", "bf16"), ("torch.float32", "fp32"), ("auto", None), (None, None)],
)
def test_torch_dtype_under_either_name(text: object, expected: str | None) -> None:
    assert read(LLAMA, torch_dtype=text).torch_dtype == expected
    assert read(LLAMA, dtype=text).torch_dtype == expected


def test_an_unknown_torch_dtype_is_refused() -> None:
    with pytest.raises(ModelError, match="float7"):
        read(LLAMA, torch_dtype="float7")


def test_every_family_has_a_function_that_reads() -> None:
    for family in (FAMILIES | REMOTE_FAMILIES).values():
        assert callable(reader_of(family))
        assert isinstance(keys_of(family), frozenset)
