"""Model types in llama.cpp and their caches, computed by hand. Everything is in f16, 2 bytes per element."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError, ModelError
from tests.documents import estimate
from tests.engines.models import ask, latent, lines, plain, total
from tests.engines.shapes import STEP, minimax_m3, renamed, t5, windowed


@pytest.mark.parametrize(
    ("config", "cell_elements"),
    [
        # Baichuan2-7B, XVERSE-7B, MPT-7B: 32 heads of 128 in 32 layers, K and V.
        (renamed("baichuan", num_hidden_layers=32, num_attention_heads=32, hidden_size=4096), 32 * 2 * 4096),
        (renamed("xverse", num_hidden_layers=32, num_attention_heads=32, hidden_size=4096), 32 * 2 * 4096),
        (renamed("mpt", n_layers=32, n_heads=32, d_model=4096), 32 * 2 * 4096),
        # GLM-4-9B: 40 layers, 2 groups of 128.
        (
            renamed(
                "chatglm", num_layers=40, num_attention_heads=32, hidden_size=4096, kv_channels=128,
                multi_query_attention=True, multi_query_group_num=2,
            ),
            40 * 2 * 256,
        ),
        # DBRX: 40 layers, 8 KV heads of 128.
        (
            renamed("dbrx", n_layers=40, n_heads=48, d_model=6144, attn_config={"kv_n_heads": 8}, max_seq_len=32768),
            40 * 2 * 1024,
        ),
        # StarCoder: 40 layers, one KV head of 128.
        (renamed("gpt_bigcode", n_layer=40, n_head=48, n_embd=6144, n_positions=8192), 40 * 2 * 128),
        # Qwen-7B, EXAONE-3-7.8B, InternLM2-7B.
        (renamed("qwen", num_hidden_layers=32, num_attention_heads=32, hidden_size=4096, kv_channels=128), 32 * 8192),
        (
            renamed("exaone", num_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096),
            32 * 2 * 1024,
        ),
        ({**plain(32, 32, 8, 128), "model_type": "internlm2"}, 32 * 2 * 1024),
        # OpenELM: 3 and 5 KV heads of 64.
        (
            renamed(
                "openelm", num_transformer_layers=2, head_dim=64, model_dim=1280, num_query_heads=[12, 20],
                num_kv_heads=[3, 5],
            ),
            2 * 64 * (3 + 5),
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_types_that_keep_k_and_v_of_every_token(config: dict[str, object], cell_elements: int) -> None:
    assert total(config, "llama.cpp", 300) == 512 * cell_elements * 2


@pytest.mark.parametrize(
    "kind",
    ["arctic", "bailing_moe", "deepseek", "ernie4_5_moe", "glm4v_text", "granitemoeshared", "hy_v3", "internlm3",
     "iquestcoder", "jais2", "minicpm", "nemotron", "orion", "solar_open"],
)  # fmt: skip
def test_types_under_llamas_own_keys(kind: str) -> None:
    assert total({**plain(), "model_type": kind}, "llama.cpp", 256) == 256 * 2 * 256 * 2


def test_minicpm3_is_expanded_to_its_heads() -> None:
    config = latent(2, "minicpm3", num_attention_heads=40, hidden_size=2560, kv_lora_rank=256, qk_nope_head_dim=64,
                    qk_rope_head_dim=32, v_head_dim=64)  # fmt: skip
    # 40 heads of 96 in K and of 64 in V. The latent would have 288 elements.
    assert total(config, "llama.cpp", 256) == 256 * 2 * 40 * (96 + 64) * 2
    with pytest.raises(ModelError, match="hidden_size / num_attention_heads"):
        ask({**config, "v_head_dim": 128}, "llama.cpp", 256)


def test_qwen3_8_flash_nexts_cache_is_the_one_that_its_log_prints() -> None:
    # b10969: K and V of 12 layers 192 MiB, indexer keys 24 MiB, R 4.22, S 108 and P (of the n-grams) 0.35 MiB.
    states = 36 * (3 * 10_240 + 48 * 128 * 128) * 4 + 4 * 2560 * 3 * 3 * 4
    assert round(states / 2**20, 2) == 112.57
    spec = kvcalc.load_model("qwen3.8-flash-next")
    question = {"context_tokens": 8192, "engine": "llama.cpp", "engine_settings": {"parallel": "1"}}
    assert estimate(spec, **question)["kv_cache"]["total_bytes"] == (192 + 24) * 2**20 + states
    drafting = {**question, "engine_settings": {"parallel": "1", "draft-max": "2"}}
    assert estimate(spec, **drafting)["kv_cache"]["total_bytes"] == (192 + 24) * 2**20 + 3 * states


def test_glm_5_3_flashs_indexer_keeps_key_gate_and_pooled_key() -> None:
    # 11 layers with a latent of 512 and 3 x 128 of the indexer; 34 with a state, and three convolutions of 8,192.
    states = 34 * (3 * 3 * 8192 + 64 * 128 * 128) * 4
    answer = estimate(
        kvcalc.load_model("glm-5.3-flash"), context_tokens=4096, engine="llama.cpp", engine_settings={"parallel": "1"}
    )
    assert answer["kv_cache"]["total_bytes"] == 4096 * 11 * (512 + 3 * 128) * 2 + states


def test_minimax_m3s_indexer_has_a_v_nothing_is_written_to() -> None:
    # 4 layers of 2 x 512 elements, 3 indexers of 128 + 128.
    config = minimax_m3()
    assert total(config, "llama.cpp", 256) == 256 * (4 * 1024 + 3 * 256) * 2
    assert lines(config, "llama.cpp", 256) == {
        "stored": 256 * (4 * 1024 + 3 * 128) * 2, "V of the indexer": 256 * 3 * 128 * 2,
    }  # fmt: skip
    # Its V is transposed in a separate cache, so it is not padded to the widest V of the other layers.
    assert total(config, "llama.cpp", 256, settings={"flash-attn": "off"}) == 256 * (4 * 1024 + 3 * 256) * 2
    with pytest.raises(ModelError, match="after the leading dense layers"):
        ask(minimax_m3(moe_layer_freq=[0, 0, 1, 1]), "llama.cpp", 256)


def test_t5_makes_k_and_v_of_the_encoder_anew() -> None:
    # 6 decoder layers of 2 x 8 x 64 elements.
    assert lines(t5(), "llama.cpp", 256, encoder_tokens=100) == {
        "stored": (256 + 100) * 6 * 1024 * 2, "encoder K and V, recomputed": -100 * 6 * 1024 * 2,
    }  # fmt: skip
    rows = ask(t5(), "llama.cpp", 256, encoder_tokens=100)["kv_cache"]["layers"]
    assert [row["bytes_per_layer"] for row in rows] == [256 * 1024 * 2, 0]
    with pytest.raises(ModelError, match="uses the encoder's number of layers"):
        ask(t5(6, 4), "llama.cpp", 256, encoder_tokens=100)


FULL, WINDOW = 8192 * 512, 1024 * 512


@pytest.mark.parametrize(
    ("config", "full", "slides"),
    [
        (windowed("afmoe", 8, global_attn_every_n_layers=4), 2, 6),
        (windowed("laguna", 8, layer_types=STEP * 2), 2, 6),
        (windowed("cohere2_moe", 8, layer_types=["full_attention"] * 3 + ["sliding_attention"] * 5), 3, 5),
        (windowed("granite_swa", 8), 2, 6),
        (windowed("exaone_moe", 8), 2, 6),
        (windowed("mellum", 4, layer_types=STEP), 1, 3),
        (windowed("step3p5", 4, layer_types=STEP), 1, 3),
        (windowed("exaone4", 64), 16, 48),
        # Other sizes of EXAONE 4 keep windows whole, and so do these types.
        (windowed("exaone4", 32), 32, 0),
        (windowed("smollm3", 4, layer_types=STEP), 4, 0),
        (windowed("dots1", 4, layer_types=STEP), 4, 0),
        (windowed("qwen2_moe", 4, use_sliding_window=True, layer_types=STEP), 4, 0),
        (windowed("qwen2_vl_text", 4, use_sliding_window=True, max_window_layers=2), 4, 0),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_windows_of_more_types(config: dict[str, object], full: int, slides: int) -> None:
    # 512 tokens of the window and 512 tokens of a step.
    assert total(config, "llama.cpp", 8192, settings={"parallel": "1"}) == full * FULL + slides * WINDOW


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (windowed("afmoe", 6, global_attn_every_n_layers=3), "the last of every 4"),
        (windowed("laguna", 4, layer_types=["sliding_attention"] * 4), "the first of every 4"),
        (windowed("gemma3_text", 4, sliding_window_pattern=2), "the last of every 6"),
        (windowed("cohere2", 4, layer_types=STEP[::3] * 2), "the last of every 4"),
    ],
)
def test_layers_the_architecture_has_windows_in_are_its_own(config: dict[str, object], rule: str) -> None:
    with pytest.raises(ModelError, match=rule):
        ask(config, "llama.cpp", 8192)


def test_mimo_v2s_window_is_the_files() -> None:
    config = {
        **plain(2, 8, 2, 192), "model_type": "mimo_v2_flash", "v_head_dim": 128, "swa_num_key_value_heads": 4,
        "sliding_window": 128, "sliding_window_size": 128, "hybrid_layer_pattern": [0, 1],
    }  # fmt: skip
    # One stream for 4 slots keeps 4 x 128 + 512 = 1,024 tokens. 4 x 129 would take 256 more cells.
    unified = {"kv-unified": "", "parallel": "4"}
    assert total(config, "llama.cpp", 4096, settings=unified) == (4096 * 2 + 1024 * 4) * 320 * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**plain(), "model_type": "mimo"}, "llama.cpp does not convert mimo"),
        (renamed("codegen", n_layer=2, n_head=8, n_embd=512), "does not convert codegen"),
        (renamed("gpt_bigcode", n_layer=2, n_head=8, n_embd=512, multi_query=False), "one KV head for gpt_bigcode"),
        (
            renamed("chatglm", num_layers=2, num_attention_heads=8, hidden_size=512, multi_query_group_num=2),
            "uses multi_query_group_num and ignores",
        ),
        ({**windowed("gemma3n_text", 30), "num_kv_shared_layers": 15}, "first 20 layers of gemma3n"),
        ({**plain(), "model_type": "beam"}, "does not convert beam"),
    ],
)
def test_what_is_not_established_is_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ask(config, "llama.cpp", 256)


def test_every_known_type_is_placed_once() -> None:
    from kvcalc.engines.declarations import table
    from kvcalc.model.hf_config import known_types

    rows = table("llama.cpp", "models")
    placed = [*rows["fixed"]]
    for name in ("listed", "ruled", "full_length", "plain", "not_converted"):
        placed += rows[name].split()
    assert len(placed) == len(set(placed))
    assert set(placed) <= {*known_types()}


def deepseek_v4(*ratios: int) -> dict[str, object]:
    """A head of 512, an indexer of 128, a window of 128."""
    return renamed(
        "deepseek_v4", num_hidden_layers=len(ratios), num_attention_heads=8, hidden_size=1024, head_dim=512,
        num_key_value_heads=1, qk_rope_head_dim=64, sliding_window=128, index_head_dim=128, index_topk=512,
        compress_ratios=list(ratios),
    )  # fmt: skip


def test_deepseek_v4_keeps_windows_entries_and_states_in_fp32() -> None:
    window = 768 * 512 * 2  # 128 + 512 tokens
    # 8,192 / 4 = 2,048 entries of 512 and index keys of 128, and 2 x 8 rows of 1,024 and of 256 in fp32.
    sparse = 2048 * (512 + 128) * 2 + 2 * 8 * (1024 + 256) * 4
    # 8,192 / 128 = 64 entries in 256 cells, and 2 x 128 rows of 512 in fp32.
    heavy = 256 * 512 * 2 + 2 * 128 * 512 * 4
    one = {"parallel": "1"}
    answer = ask(deepseek_v4(0, 4, 128), "llama.cpp", 8192, settings=one)
    assert [row["bytes_per_layer"] for row in answer["kv_cache"]["layers"]] == [window, window + sparse, window + heavy]
    assert total(deepseek_v4(0, 4, 128), "llama.cpp", 8192, settings=one) == 3 * window + sparse + heavy
    # Each slot has its own cells for a whole sequence, even if they are unified (n_ctx_seq is then n_ctx).
    assert total(deepseek_v4(0, 4, 128), "llama.cpp", 8192, 2, settings=one) == 2 * (3 * window + sparse + heavy)
    for batch in (1, 2, 4):
        assert total(deepseek_v4(0, 4, 128), "llama.cpp", 8192, batch) == 4 * (3 * window + sparse + heavy)
    assert total(deepseek_v4(0), "llama.cpp", 8192, 2, settings={"kv-unified": "", "parallel": "4"}) == 4 * window
    unified = {"kv-unified": "", "parallel": "2"}
    assert total(deepseek_v4(128), "llama.cpp", 65536, 2, settings=unified) == 2 * (
        window + 512 * 512 * 2 + 2 * 128 * 512 * 4
    )
    # The compressors' states are kept once more for each drafted token.
    drafts = total(deepseek_v4(0, 4, 128), "llama.cpp", 8192, settings={**one, "draft-max": "2"})
    assert drafts == 3 * window + sparse + heavy + 2 * (2 * 8 * (1024 + 256) * 4 + 2 * 128 * 512 * 4)
    # The states stay in fp32: q8_0 takes 34 bytes for 32 elements.
    small = 768 * 16 * 34 + 2048 * 20 * 34 + 2 * 8 * 1280 * 4
    assert total(deepseek_v4(4), "llama.cpp", 8192, kv_dtype="q8_0", settings=one) == small


def test_deepseek_v4s_growth_is_that_of_its_entries() -> None:
    # 640 elements per 4 tokens, and 512 elements per 128 tokens, 2 bytes each.
    one = {"parallel": "1"}
    assert ask(deepseek_v4(4), "llama.cpp", 65536, settings=one)["kv_cache"]["bytes_per_token"] == 320
    assert ask(deepseek_v4(128), "llama.cpp", 65536, settings=one)["kv_cache"]["bytes_per_token"] == 8
    # A longer context is longer for every slot.
    assert ask(deepseek_v4(4), "llama.cpp", 65536)["kv_cache"]["bytes_per_token"] == 4 * 320


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (deepseek_v4(4), {"settings": {"before-pull": "19067"}}, "do not run this model"),
        ({**deepseek_v4(4), "compress_rate_csa": 8}, {}, "compresses by 4 with an indexer"),
        (deepseek_v4(4), {"kv_dtype": "q8_0", "settings": {"flash-attn": "off"}}, "--cache-type-v q8_0"),
    ],
)
def test_deepseek_v4s_llama_cpp_does_not_run(config: dict[str, object], options: dict[str, Any], message: str) -> None:
    with pytest.raises(KvcalcError, match=message):
        ask(config, "llama.cpp", 8192, **options)
