"""Models whose layers keep states, compressed entries or an encoder's output, with published sizes."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES
from kvcalc.memory.kv_cache import read_cache_bytes
from kvcalc.model.caches import (
    CompressedAttention,
    CrossAttention,
    FullAttention,
    IndexerKeys,
    RecurrentState,
    SlidingWindowAttention,
    read_entries,
    stored_elements,
)
from tests.documents import estimate, texts


def spec_of(model_type: str, **config: Any) -> kvcalc.ModelSpec:
    return kvcalc.read_config({"model_type": model_type, "torch_dtype": "bfloat16", **config}, "test", "test")


def layers(spec: kvcalc.ModelSpec) -> list[tuple[Any, ...]]:
    return [group.caches for group in spec.layers for _ in range(group.num_layers)]


def cache_bytes(spec: kvcalc.ModelSpec, tokens: int, **asked: Any) -> int:
    return int(estimate(spec, context_tokens=tokens, **asked)["kv_cache"]["total_bytes"])


GQA = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
FULL = FullAttention(2, 8, 8)

# config.json of ai21labs/Jamba-v0.1: attention in layers 4, 12, 20 and 28 of 32.
JAMBA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip


def test_jamba_attends_in_four_layers_and_keeps_states_in_the_rest() -> None:
    spec = spec_of("jamba", **JAMBA)
    attending = [number for number, caches in enumerate(layers(spec)) if isinstance(caches[0], FullAttention)]
    assert attending == [4, 12, 20, 28]
    # K and V: 4 layers x 2 x 8 x 128 x 2 bytes = 16,384 per token. State: 3 inputs of 8192 channels in bf16, and
    # 8192 x 16 in fp32, which is 49,152 + 524,288 bytes in each of 28 layers.
    assert cache_bytes(spec, 1000) == 1000 * 16_384 + 28 * (49_152 + 524_288)
    # Transformers also keeps the current input, which adds one column.
    assert cache_bytes(spec, 1000, engine="transformers") == 1000 * 16_384 + 28 * (65_536 + 524_288)


def test_a_state_keeps_its_dtype_whatever_the_cache() -> None:
    spec = spec_of("jamba", **JAMBA)
    assert cache_bytes(spec, 1000, kv_dtype="fp8") == 1000 * 8_192 + 28 * (49_152 + 524_288)


def test_falcon_h1_keeps_both_in_every_layer() -> None:
    spec = spec_of("falcon_h1", **GQA, mamba_d_ssm=24, mamba_n_heads=4, mamba_d_head=6, mamba_d_state=8)
    # Channels: 24 for the inner width, and twice one group of 8. The state is 24 x 8.
    assert layers(spec) == [(FULL, RecurrentState(40, 4, 192, num_heads=4, group_channels=16))] * 6


def test_granite_and_bamba_say_which_layers_attend() -> None:
    mamba = {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 8}
    state = RecurrentState(64 + 2 * 8, 4, 64 * 8, num_heads=4, group_channels=16)
    kinds = ["mamba", "attention", "mamba", "mamba", "attention", "mamba"]
    expected = [(FULL,) if kind == "attention" else (state,) for kind in kinds]
    assert layers(spec_of("granitemoehybrid", **GQA, **mamba, layer_types=kinds)) == expected
    assert layers(spec_of("bamba", **GQA, **mamba, attn_layer_indices=[1, 4])) == expected


def test_zamba_adds_the_shared_block_before_some_layers() -> None:
    zamba = {k: v for k, v in GQA.items() if k not in ("head_dim", "num_key_value_heads")}
    kinds = ["mamba", "hybrid"] * 3
    spec = spec_of("zamba2", **zamba, n_mamba_heads=4, mamba_d_state=8, layers_block_type=kinds)
    # The shared block is twice as wide as the hidden state, so a head is 2 x 32 / 4 wide.
    state = RecurrentState(64 + 2 * 8, 4, 64 * 8, num_heads=4, group_channels=16)
    assert layers(spec) == [(state,), (FullAttention(4, 16, 16), state)] * 3
    with pytest.raises(ModelError, match="layers_block_type is missing"):
        spec_of("zamba2", **zamba, n_mamba_heads=4)


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba"])
def test_mamba_has_no_attention(model_type: str) -> None:
    # Falcon-Mamba-7B has intermediate_size 8192, which does not follow from its expand of 16.
    spec = spec_of(model_type, hidden_size=4096, num_hidden_layers=64, state_size=16, intermediate_size=8192, expand=16)
    answer = estimate(spec, context_tokens=4096)
    assert answer["model"]["attention"] == "none"
    assert answer["kv_cache"]["bytes_per_token"] == 0
    assert answer["kv_cache"]["total_bytes"] == 64 * (3 * 8192 * 2 + 8192 * 16 * 4)
    assert {row["reason"] for row in answer["variants"]} == {"the model has no attention"}
    with pytest.raises(UsageError, match="the model has no attention"):
        estimate(spec, what_if=kvcalc.WhatIf("gqa"))


def test_mamba_2_heads_must_make_up_the_inner_width() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "n_groups": 2, "num_heads": 4}
    assert (
        layers(spec_of("mamba2", **sizes, head_dim=16))
        == [(RecurrentState(64 + 32, 4, 512, num_heads=4, num_groups=2, group_channels=32),)] * 2
    )
    with pytest.raises(ModelError, match="num_heads 4 x head_dim 8 is not the inner width 64"):
        spec_of("mamba2", **sizes, head_dim=8)


def test_rwkv_keeps_two_shifts_and_three_sums() -> None:
    spec = spec_of("rwkv", hidden_size=4096, num_hidden_layers=32)
    # RWKV-4 7B: 32 layers of 2 x 4096 in bf16 and 3 x 4096 in fp32, 2,097,152 bytes, as in Transformers.
    assert cache_bytes(spec, 1) == cache_bytes(spec, 9999, engine="transformers") == 32 * 4096 * (2 * 2 + 3 * 4)


def test_rwkv6_keeps_two_shifts_and_a_matrix_for_every_head() -> None:
    spec = spec_of("rwkv6", hidden_size=4096, num_hidden_layers=32, head_size=64)
    assert cache_bytes(spec, 1) == cache_bytes(spec, 9999) == 32 * (2 * 4096 * 2 + 64 * 64 * 64 * 4)
    assert not spec.in_transformers
    with pytest.raises(ModelError, match="head_size"):
        # The same type with another library's keys.
        spec_of("rwkv6", hidden_size=2048, num_hidden_layers=24, num_heads=4, expand_k=0.5)
    with pytest.raises(ModelError, match="not a multiple of head_size"):
        spec_of("rwkv6", hidden_size=4096, num_hidden_layers=32, head_size=65)


def test_lfm2_convolutions_keep_inputs_and_no_state() -> None:
    kinds = ["conv", "full_attention"] * 3
    assert layers(spec_of("lfm2", **GQA, layer_types=kinds)) == [(RecurrentState(32, 3, 0),), (FULL,)] * 3
    by_number = layers(spec_of("lfm2", **GQA, full_attn_idxs=[1, 3, 5]))
    assert by_number == layers(spec_of("lfm2", **GQA, layer_types=kinds))
    windowed = layers(spec_of("lfm3", **GQA, sliding_window=5))
    conv = (RecurrentState(32, 7, 0),)
    assert windowed == [conv, conv, (FULL,), conv, (SlidingWindowAttention(5, 2, 8, 8),), conv]


def test_recurrent_gemma_is_counted_but_not_as_transformers_cache() -> None:
    spec = spec_of("recurrent_gemma", **GQA, attention_window_size=5, lru_width=24)
    state = (RecurrentState(24, 4, 24),)
    assert layers(spec) == [state, state, (SlidingWindowAttention(5, 2, 8, 8),)] * 2
    with pytest.raises(ModelError, match="outside its cache"):
        estimate(spec, engine="transformers")


KDA = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("full", "delta", "error"),
    [([4], [1, 2, 3], None), ([4], [1, 2], "each of 4 layers once"), ([0], [1, 2, 3], "integers from 1 to 4")],
)
def test_kimi_linear_numbers_its_layers_from_one(full: list[int], delta: list[int], error: str | None) -> None:
    linear = {"full_attn_layers": full, "kda_layers": delta, "head_dim": 8, "num_heads": 2, "short_conv_kernel_size": 4}
    if error:
        with pytest.raises(ModelError, match=error):
            spec_of("kimi_linear", **KDA, linear_attn_config=linear)
        return
    spec = spec_of("kimi_linear", **KDA, linear_attn_config=linear)
    assert layers(spec)[:3] == [(RecurrentState(3 * 2 * 8, 4, 2 * 8 * 8, num_heads=2),)] * 3
    assert layers(spec)[3][0].kind == "latent_attention"


# config.json of deepseek-ai/DeepSeek-V4-Flash. The last ratio is that of its layer for multi-token prediction.
V4_FLASH = {
    "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "index_head_dim": 128, "index_topk": 512, "sliding_window": 128, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 3, 4, 127, 128, 1025, 5000])
def test_deepseek_v4_keeps_a_window_entries_and_buffers(tokens: int) -> None:
    window = 512 * min(tokens, 128)
    heavy = 512 * (tokens // 128) + 2 * 512 * (tokens % 128)
    overlap = 4 if tokens >= 4 else 0
    sparse = (512 + 128) * (tokens // 4) + 2 * (512 + 128) * (2 * (tokens % 4) + overlap)
    elements = 43 * window + 20 * heavy + 21 * sparse
    assert cache_bytes(spec_of("deepseek_v4", **V4_FLASH), tokens) == 2 * elements


def test_deepseek_v4_in_transformers_as_measured() -> None:
    # Bytes of the cache of DeepseekV4ForCausalLM after prefills on the meta device, Transformers 5.23.0.
    spec = spec_of("deepseek_v4", **V4_FLASH)
    measured = {1: 194_560, 17: 1_909_760, 512: 9_589_760, 1025: 13_260_800, 8192: 62_428_160}
    assert {tokens: cache_bytes(spec, tokens, engine="transformers") for tokens in measured} == measured
    with pytest.raises(ModelError, match="static cache of deepseek_v4"):
        estimate(spec, engine="transformers", engine_settings={"cache": "static"})


def test_deepseek_v4_reads_the_entries_its_indexer_picks() -> None:
    sparse = CompressedAttention(128, 512, 4, 128, 512)
    # Tokens of the window, compressed entries, and index keys.
    assert read_entries(sparse, 100_000) == (128, 512, 25_000)
    assert read_entries(sparse, 1000) == (128, 250, 250)
    assert read_entries(CompressedAttention(128, 512, 128), 100_000) == (128, 781, 0)
    assert read_entries(CompressedAttention(128, 512), 100_000) == (128, 0, 0)
    assert read_cache_bytes(sparse, 1000, DTYPES["bf16"]) == 2 * (128 * 512 + 250 * 512 + 250 * 128)


def test_deepseek_v4_slope_is_the_mean_of_a_period() -> None:
    spec = spec_of("deepseek_v4", **V4_FLASH)
    cache = estimate(spec, context_tokens=100_000)["kv_cache"]
    # 128 tokens give 21 layers x 32 entries of 640 elements, and 20 layers x 1 entry of 512, with 2 bytes each.
    assert cache["bytes_per_token"] == 2 * (21 * 32 * 640 + 20 * 512) // 128
    assert cache["fixed_bytes_per_sequence"] == cache["total_bytes"] - 100_000 * cache["bytes_per_token"]


@pytest.mark.parametrize("memory", [10**6, 20_000_000, 20_000_001, 10**9])
def test_the_longest_context_of_compressed_attention_always_fits_up_to_it(memory: int) -> None:
    spec = spec_of("deepseek_v4", **V4_FLASH)
    longest = estimate(spec, kv_memory_bytes=memory)["fit"]["max_context_tokens"]
    around = range(max(longest - 300, 1), longest + 1)
    assert max(cache_bytes(spec, tokens) for tokens in around) <= memory < cache_bytes(spec, longest + 1)


def test_deepseek_v4_has_no_what_if() -> None:
    answer = estimate(spec_of("deepseek_v4", **V4_FLASH), context_tokens=1000)
    assert [row["own"] for row in answer["variants"]] == [False, True, False, False]
    assert [row["total_bytes"] is None for row in answer["variants"]] == [True, False, True, True]
    with pytest.raises(ModelError, match="0, 4 or 128 for each of 43 layers"):
        spec_of("deepseek_v4", **{**V4_FLASH, "compress_ratios": [4] * 42})


def test_minimax_m3_keeps_index_keys_in_sparse_layers_and_reads_the_blocks_picked() -> None:
    config = {"sparse_attention_freq": [0, 0, 1, 1, 1, 1], "sparse_block_size": 4, "sparse_topk_blocks": 3}
    kept = layers(spec_of("minimax_m3", **GQA, sparse_attention_config=config))
    sparse = (FullAttention(2, 8, 8, most_read_tokens=12), IndexerKeys(128))
    assert kept == [(FULL,)] * 2 + [sparse] * 4
    assert (stored_elements(sparse[0], 100), read_entries(sparse[0], 100)) == (100 * 32, (12,))
    assert layers(spec_of("minimax_m3", **GQA)) == [(FULL,)] * 6


def test_lightning_attention_keeps_its_state_in_the_models_dtype() -> None:
    spec = spec_of("minimax", **GQA)
    # 3 layers of 2 x 2 x 8 x 2 bytes per token, and 3 layers of 4 heads x 8 x 8 in bf16, or in fp32 with --dtype fp32.
    assert cache_bytes(spec, 10) == 3 * 10 * 64 + 3 * 512
    assert cache_bytes(spec, 10, dtype="fp32", kv_dtype="bf16") == 3 * 10 * 64 + 3 * 1024


T5_BASE = {"d_model": 768, "d_kv": 64, "num_layers": 12, "num_heads": 12, "n_positions": 512}
# config.json of openai/whisper-large-v3.
WHISPER = {
    "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
    "decoder_attention_heads": 20, "max_source_positions": 1500, "max_target_positions": 448,
}  # fmt: skip


def test_t5_keeps_its_own_tokens_and_the_encoders() -> None:
    spec = spec_of("t5", **T5_BASE)
    answer = estimate(spec, context_tokens=100, encoder_tokens=700)
    assert answer["kv_cache"]["total_bytes"] == 12 * 2 * 12 * 64 * 2 * (100 + 700)
    assert answer["kv_cache"]["bytes_per_token"] == 12 * 2 * 12 * 64 * 2
    assert (answer["workload"]["encoder_tokens"], texts(answer)) == (700, [])
    assert [row["kind"] for row in answer["kv_cache"]["layers"]] == ["full_attention", "cross_attention"]
    unsaid = estimate(spec, context_tokens=100)
    assert unsaid["workload"]["encoder_tokens"] == 100
    assert "--encoder-tokens" in texts(unsaid)[0]


def test_whispers_encoder_always_gives_1500() -> None:
    spec = spec_of("whisper", **WHISPER)
    assert cache_bytes(spec, 448) == 32 * 2 * 20 * 64 * 2 * (448 + 1500)
    with pytest.raises(UsageError, match="always outputs 1,500 tokens"):
        estimate(spec, encoder_tokens=700)


def test_an_encoder_decoder_as_another_kind_changes_both_caches() -> None:
    spec = spec_of("t5", **T5_BASE)
    answer = estimate(spec, context_tokens=100, encoder_tokens=700, what_if=kvcalc.WhatIf("mqa"))
    assert answer["kv_cache"]["total_bytes"] == 12 * 2 * 64 * 2 * (100 + 700)
    assert "latent" in answer["variants"][3]["reason"]


def test_a_model_without_cross_attention_takes_no_encoder_tokens() -> None:
    with pytest.raises(UsageError, match="no cross-attention"):
        estimate(kvcalc.load_model("llama-7b"), encoder_tokens=5)


def test_llama_3_2_vision_keeps_nothing_of_an_image_until_there_is_one() -> None:
    spec = spec_of("mllama_text_model", **GQA, cross_attention_layers=[1, 4])
    assert layers(spec)[1] == (CrossAttention(2, 8, 8),)
    answer = estimate(spec, context_tokens=10)
    assert (answer["kv_cache"]["total_bytes"], answer["workload"]["encoder_tokens"]) == (4 * 10 * 64, 0)
    assert "image" in texts(answer)[0]
    assert cache_bytes(spec, 10, encoder_tokens=6404) == 4 * 10 * 64 + 2 * 6404 * 64


def test_tensor_parallel_divides_the_encoders_keys_too() -> None:
    cache = estimate(spec_of("whisper", **WHISPER), context_tokens=448, tensor_parallel_size=4)["kv_cache"]
    assert cache["bytes_per_device"] * 4 == cache["total_bytes"]


def test_devices_share_the_groups_of_mamba_2_beyond_their_number() -> None:
    state = RecurrentState(64 + 32, 4, 512, num_heads=8, num_groups=2, group_channels=32)
    assert [state.on_device(n).conv_channels for n in (1, 2, 4)] == [96, 48, 32]
    assert [state.on_device(n).state_elements for n in (1, 2, 4)] == [512, 256, 128]
    assert [state.splits_evenly(n) for n in (1, 2, 3, 4, 8, 16)] == [True, True, False, True, True, False]
    assert not state._replace(num_heads=12, num_groups=4).splits_evenly(6)


@pytest.mark.parametrize("engine", ["transformers", "transformers@5.0"])
def test_every_release_of_transformers_is_counted_as_its_class_reads_the_config(engine: str) -> None:
    # MiMoV2FlashConfig ignores hybrid_layer_pattern: full attention in the first and in every sixth layer.
    spec = spec_of(
        "mimo_v2_flash", **GQA, v_head_dim=8, sliding_window=5, hybrid_layer_pattern=[0, 1, 1, 0, 1, 1],
        swa_num_key_value_heads=2,
    )  # fmt: skip
    assert cache_bytes(spec, 1000) == 129_280
    assert cache_bytes(spec, 1000, engine=engine) == 130_048


@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang", "tensorrt-llm"])
def test_engines_ignore_the_keys_that_a_wrappers_class_ignores(engine: str) -> None:
    """A flat gemma3 config: Transformers' class reads text_config alone, which has its own defaults."""
    flat = {**GQA, "sliding_window": 5, "query_pre_attn_scalar": 8}
    written = cache_bytes(spec_of("gemma3", **flat), 64)
    read = cache_bytes(spec_of("gemma3", **flat), 64, engine=engine)
    assert read > 10 * written
