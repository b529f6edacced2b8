"""Model types in SGLang and the rows of its pools, computed by hand.

A token in one layer of `plain()` has 2 heads x 64 x 2 elements, 512 bytes. Every pool has one dummy row.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc.errors import ModelError, UsageError
from tests.engines.models import ask, latent, lines, plain, total
from tests.engines.shapes import STEP, gemma4, minimax_m3, nemotron_nas, renamed, t5, windowed

ROW = 512
MAMBA = renamed("mamba", hidden_size=768, intermediate_size=1536, num_hidden_layers=24, state_size=16, conv_kernel=4)


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (renamed("baichuan", num_hidden_layers=32, num_attention_heads=32, hidden_size=4096), 32 * 2 * 4096 * 2),
        (
            renamed(
                "chatglm", num_layers=40, num_attention_heads=32, hidden_size=4096, kv_channels=128,
                multi_query_attention=True, multi_query_group_num=2,
            ),
            40 * 2 * 256 * 2,
        ),
        (
            renamed("dbrx", n_layers=40, n_heads=48, d_model=6144, attn_config={"kv_n_heads": 8}, max_seq_len=32768),
            40 * 2 * 1024 * 2,
        ),
        (renamed("gpt_bigcode", n_layer=40, n_head=48, n_embd=6144, n_positions=8192), 40 * 2 * 128 * 2),
        (renamed("gptj", n_layer=28, n_head=16, n_embd=4096), 28 * 2 * 4096 * 2),
        (renamed("qwen", num_hidden_layers=32, num_attention_heads=32, hidden_size=4096), 32 * 2 * 4096 * 2),
        ({**plain(), "model_type": "internlm2"}, 2 * ROW),
        ({**plain(), "model_type": "grok-1"}, 2 * ROW),
        ({**plain(), "model_type": "hy_v3"}, 2 * ROW),
        ({**plain(), "model_type": "llava_llama"}, 2 * ROW),
        # These types keep windows whole.
        (windowed("llava_mistral", 2), 2 * ROW),
        (windowed("afmoe", 8), 8 * ROW),
        (windowed("cohere2_moe", 8), 8 * ROW),
        (windowed("exaone4", 64), 64 * ROW),
        (windowed("exaone_moe", 8), 8 * ROW),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_types_that_have_a_row_for_every_token(config: dict[str, object], token_bytes: int) -> None:
    assert total(config, "sglang", 9999) == 10000 * token_bytes


@pytest.mark.parametrize(
    ("config", "full", "slides"),
    [
        (windowed("granite_swa", 8), 2, 6),
        (windowed("granitemoe_swa", 8), 2, 6),
        (windowed("laguna", 8, layer_types=STEP * 2), 2, 6),
        (windowed("mellum", 4, layer_types=STEP), 1, 3),
        (windowed("muse_glimmer_text", 8), 2, 6),
        (windowed("step3p5", 4, layer_types=STEP), 1, 3),
        (windowed("step3p7", 4, layer_types=STEP), 1, 3),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_types_whose_windows_have_a_pool(config: dict[str, object], full: int, slides: int) -> None:
    # 10,000 tokens and 8,000 in the window pool.
    assert total(config, "sglang", 10000) == (10001 * full + 8001 * slides) * ROW


def test_gemma_3ns_shared_layers_have_rows() -> None:
    config = {**windowed("gemma3n_text", 35, head_dim=256), "num_kv_shared_layers": 15}
    # All 35 layers have 2 x 2 x 256 elements. 4 of 20 have full attention, and 16 have a window that is kept whole.
    assert total(config, "sglang", 999) == 1000 * 35 * 2048
    named = lines(config, "sglang", 999)
    assert named["unused rows"] == 999 * 15 * 2048
    assert named["stored"] == (4 * 999 + 16 * 512) * 2048


def test_gemma_4s_shared_layers_have_rows_in_their_own_pool() -> None:
    # 12 layers. Layers 6 and 12 have full attention (2 x 2 x 512 elements), and the other 10 a window (2 x 2 x 256).
    # The last 4 share caches.
    assert total(gemma4(), "sglang", 10000) == 10001 * 2 * 4096 + 8001 * 10 * 2048
    assert lines(gemma4(), "sglang", 10000)["unused rows"] == 10000 * 4096 + 8000 * 3 * 2048
    assert total(gemma4(shared=0), "sglang", 10000) == total(gemma4(), "sglang", 10000)


def test_nemotron_nas_has_rows_for_layers_without_attention() -> None:
    config = nemotron_nas(4, None, 4)
    # 2 heads of 64 in all 3 layers.
    assert total(config, "sglang", 99) == 100 * 3 * ROW
    assert lines(config, "sglang", 99)["unused rows"] == 99 * ROW
    assert total(nemotron_nas(4, None), "sglang", 99) == 100 * 2 * ROW
    with pytest.raises(ModelError, match="one number of KV heads"):
        ask(nemotron_nas(4, 8), "sglang", 99)


def test_nemotron_nas_may_leave_attention_out_but_not_replace_it() -> None:
    config = nemotron_nas(4, 4, 4)
    blocks: Any = config["block_configs"]
    blocks[1]["attention"] = {"replace_with_linear": True}
    with pytest.raises(ModelError, match="attention is a linear map"):
        ask(config, "sglang", 99)
    blocks[1]["attention"] = {"replace_with_linear": False, "no_op": True}
    assert total(config, "sglang", 99) == 100 * 3 * ROW


def test_chatglm_has_one_group_of_queries_by_default() -> None:
    """ChatGLMConfig of SGLang 0.5.23 (srt/configs/chatglm.py) reads the number of groups alone."""
    config = renamed("chatglm", num_layers=2, num_attention_heads=1, hidden_size=64, kv_channels=64)
    assert total(config, "sglang", 99) == 100 * 2 * 2 * 64 * 2
    assert total({**config, "multi_query_group_num": 1}, "sglang", 99) == 100 * 2 * 2 * 64 * 2
    with pytest.raises(ModelError, match="uses multi_query_group_num"):
        ask({**config, "num_attention_heads": 2, "hidden_size": 128}, "sglang", 99)


def test_whispers_encoder_stands_in_front_of_the_decoder() -> None:
    config = renamed(
        "whisper", encoder_layers=4, decoder_layers=2, encoder_attention_heads=6, decoder_attention_heads=6,
        d_model=384, max_source_positions=1500, max_target_positions=448,
    )  # fmt: skip
    # 1,500 + 400 rows and one dummy row in 4 + 2 + 2 layers of 2 x 384 elements.
    assert total(config, "sglang", 400, 2) == (2 * 1900 + 1) * 8 * 1536
    assert lines(config, "sglang", 400) == {
        "stored": 2 * (400 + 1500) * 1536,
        "unused rows": (2 * 1500 + 2 * 400 + 4 * 1900) * 1536,
        "dummy page": 8 * 1536,
    }
    # The rows that stand beside the encoder's layers are on the first of two pipeline stages alone.
    stages = ask(config, "sglang", 400, pipeline_parallel_size=2)["kv_cache"]
    assert (stages["bytes_per_device"], stages["devices_total_bytes"]) == (1901 * 6 * 1536, 1901 * 8 * 1536)
    with pytest.raises(ModelError, match="one number of heads"):
        ask({**config, "decoder_attention_heads": 8}, "sglang", 400)
    with pytest.raises(UsageError, match="request table of a model with an encoder"):
        ask(config, "sglang", 400, settings={"max-running-requests": "4"})


def test_llama_vision_has_one_table_for_image_and_text() -> None:
    config = {**plain(4), "model_type": "mllama_text_model", "cross_attention_layers": [1]}
    assert total(config, "sglang", 100, encoder_tokens=1600) == 1701 * 4 * ROW
    assert total(config, "sglang", 100) == 101 * 4 * ROW
    # Without an image nothing reads the rows of the layer with cross-attention.
    assert lines(config, "sglang", 100) == {"stored": 300 * ROW, "unused rows": 100 * ROW, "dummy page": 4 * ROW}
    # 1,700 tokens are 27 pages of 64.
    found = ask(
        config, "sglang", 100, encoder_tokens=1600, settings={"page-size": "64"}, kv_memory_bytes=54 * 64 * 2048
    )
    assert found["engine"]["max_concurrency"] == 2.0
    assert found["kv_cache"]["total_bytes"] == 28 * 64 * 4 * ROW


def test_only_minimax_m3s_own_nvfp4_packs_its_pages() -> None:
    plain = total(minimax_m3(), "sglang", 200)
    assert total(minimax_m3(quantization_config={"quant_method": "fp8"}), "sglang", 200) == plain
    with pytest.raises(ModelError, match="minimax_m3_nvfp4 on Blackwell only"):
        total(minimax_m3(quantization_config={"quant_method": "minimax_m3_nvfp4"}), "sglang", 200)


def test_minimax_m3_keeps_index_keys_in_the_models_dtype() -> None:
    # 200 tokens take 2 pages of 128, plus a dummy page. 4 layers of 2,048 bytes, and 3 of them have 256 bytes more.
    assert total(minimax_m3(), "sglang", 200) == 3 * 128 * (4 * 2048 + 3 * 256)
    with_values = {"sparse_attention_freq": [0, 1, 1, 1], "sparse_disable_index_value": [0, 0, 0, 0]}
    with pytest.raises(ModelError, match="sparse_disable_index_value"):
        ask(minimax_m3(sparse_attention_config=with_values), "sglang", 200)
    with pytest.raises(UsageError, match="--kv-dtype fp8: not modelled for minimax_m3"):
        ask(minimax_m3(), "sglang", 200, kv_dtype="fp8")


def test_models_without_attention_keep_states_alone() -> None:
    # 24 layers of 3 columns of 1,536 channels in bf16 and of 1,536 x 16 elements in fp32; 3 states and a spare one.
    state = 24 * (2 * 3 * 1536 + 4 * 1536 * 16)
    assert total(MAMBA, "sglang", 100) == 4 * state
    assert total(MAMBA, "sglang", 100, 2) == 7 * state
    # The pool has as many tokens as the context, and none takes memory.
    found = ask(MAMBA, "sglang", 1024, settings={"context-length": "4096"}, kv_memory_bytes=2**30)
    assert found["engine"]["max_concurrency"] == 4.0


def test_zaya_keeps_the_last_hidden_state_whole_on_each_device() -> None:
    config = {**plain(2), "model_type": "zaya", "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    # 10 heads of 64 have 2 columns, and the hidden state of 512 has one; 3 states and a spare one.
    assert total(config, "sglang", 99) == 100 * 2 * ROW + 4 * 2 * 2 * (2 * 640 + 512)
    found = ask(config, "sglang", 99, tensor_parallel_size=2)["kv_cache"]
    assert found["bytes_per_device"] == 50 * 2 * ROW + 4 * 2 * 2 * (2 * 320 + 512)


def test_inkling_has_room_for_the_convolutions_of_both_kinds_in_every_layer() -> None:
    config = {
        **plain(6), "model_type": "inkling_text", "num_key_value_heads": 2, "head_dim": 64, "sliding_window_size": 512,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 64, "local_layer_ids": [0, 1, 2],
    }  # fmt: skip
    # 3 columns of 2 x 128 and 2 x 256 channels of keys and values, and of 2 x 512 hidden ones, in all 6 layers. A
    # request has 5 states. The window pool has a tenth of the tokens.
    states = 6 * 6 * 2 * 3 * (2 * 128 + 2 * 256 + 2 * 512)
    assert total(config, "sglang", 10_000) == 10_001 * 3 * 512 + 1001 * 3 * 1024 + states
    with pytest.raises(ModelError, match="one kind of layers"):
        total({**config, "local_layer_ids": []}, "sglang", 99)


def test_dots_3_has_latent_rows_in_both_pools() -> None:
    config = {
        **latent(4, "dots3_note_text"), "index_head_dim": 128, "index_n_heads": 2, "index_topk": 2048,
        "layer_types": ["indexed_attention", *["sliding_attention"] * 3], "swa_kv_lora_rank": 1024,
        "swa_qk_rope_head_dim": 64, "sliding_window_size": 512,
    }  # fmt: skip
    # 6,400 tokens and a page of 64; 80 % of them in the window pool.
    assert total(config, "sglang", 6400) == 6464 * (1152 + 132) + 5184 * 3 * 2 * 1088
    fp8 = ask(config, "sglang", 6400, kv_dtype="fp8")["kv_cache"]["total_bytes"]
    assert fp8 == 6464 * (656 + 132) + 5184 * 3 * 1088


def test_gemma_4_with_latent_windows_is_not_counted() -> None:
    assert [row["total_bytes"] for row in ask(gemma4(), "sglang", 99)["variants"] if row["attention"] == "mla"] == [
        None
    ]


@pytest.mark.parametrize("model_type", ["sarvam_moe", "cosmos3_edge_text"])
def test_types_with_plain_attention(model_type: str) -> None:
    assert total({**plain(2), "model_type": model_type}, "sglang", 99) == 100 * 2 * ROW


def test_every_pass_of_hrm_text_has_rows() -> None:
    heads = {"num_key_value_heads": None, "head_dim": 64}
    config = {**plain(2), **heads, "model_type": "hrm_text", "H_cycles": 2, "L_cycles": 3}
    # 2 layers run 2 x 4 times, with 8 heads of 64 each.
    assert total(config, "sglang", 99) == 100 * 16 * 2 * 512 * 2
    assert total(config, "vllm", 96) == 96 * 16 * 2 * 512 * 2


def test_hunyuan_4_is_sparse_attention() -> None:
    config = latent(3, "hy_v4", index_head_dim=128, index_topk=2048, indexer_types=["full", "shared", "full"])
    assert total(config, "sglang", 64) == 128 * (3 * 1152 + 2 * 132)
    with pytest.raises(ModelError, match="indexer_types is missing"):
        ask({key: value for key, value in config.items() if key != "indexer_types"}, "sglang", 64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (t5(), "layout of t5 is not modelled"),
        ({**plain(), "model_type": "smollm3"}, "layout of smollm3 is not modelled"),
        (
            renamed("chatglm", num_layers=2, num_attention_heads=8, hidden_size=512, kv_channels=64),
            "uses multi_query_group_num and ignores",
        ),
    ],
)
def test_what_is_not_established_is_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ask(config, "sglang", 64, **({"encoder_tokens": 10} if config["model_type"] == "t5" else {}))
