"""Vision and audio towers: which are counted, and what is said about the others."""

from __future__ import annotations

import pytest

import kvcalc
from kvcalc.memory.weights import count_parameters
from kvcalc.model.spec import weights_of
from kvcalc.model.towers import tower_parameters, towers_of
from kvcalc.model.towers.images import image_tokens

KV = {"num_key_value_heads": 4}

# Parameters of the published checkpoints, as the Hugging Face Hub counts them.
PUBLISHED = {
    "gemma-3-27b": 27_432_406_640,
    "qwen2-vl-2b": 2_208_985_600,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-vl-7b": 8_292_166_656,
    "llama-4-scout": 108_641_793_536,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_language_model_and_its_towers_are_the_whole_checkpoint(name: str) -> None:
    model = kvcalc.load_model(name)
    weights = weights_of(model)
    assert weights is not None
    assert count_parameters(weights).total + tower_parameters(model) == PUBLISHED[name]


def test_gemma_3n_and_its_towers_are_the_whole_checkpoint() -> None:
    """MobileNet V5 is known by its name. The checkpoint also has K and V projections of the 15 layers that share."""
    model = kvcalc.load_model("gemma-3n-e4b")
    weights = weights_of(model)
    assert weights is not None
    unused = 15 * (2 * 2048 * 512 + 256)
    assert count_parameters(weights).total + tower_parameters(model) + unused == 7_849_978_192


@pytest.mark.parametrize(
    ("architecture", "published", "small_image"),
    [("DeepseekOCRForCausalLM", 3_336_106_240, 273), ("DeepseekOCR2ForCausalLM", 3_389_119_360, 257)],
)
def test_deepseek_ocr_and_its_tower_are_the_whole_checkpoint(
    architecture: str, published: int, small_image: int
) -> None:
    """Its config is that of DeepSeek-VL2, with DeepSeek-V2's experts and plain attention.

    OCR 2 has the layers of Qwen2-0.5B where OCR has CLIP's, and no token at the end of a row of an image.
    """
    language = {
        "hidden_size": 1280, "intermediate_size": 6848, "moe_intermediate_size": 896, "num_hidden_layers": 12,
        "num_attention_heads": 10, "num_key_value_heads": 10, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": None, "q_lora_rank": None,
        "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "use_mla": False, "vocab_size": 129280,
    }  # fmt: skip
    config = {
        "model_type": "deepseek_vl_v2", "architectures": [architecture], "language_config": language,
        "vision_config": {"model_type": "vision", "model_name": "deeplip_b_l", "image_size": 1024},
    }  # fmt: skip
    model = kvcalc.read_config(config, "own", "test")
    weights = weights_of(model)
    assert weights is not None
    assert count_parameters(weights).total + tower_parameters(model) == published
    # 12 layers x 2 x 10 heads x 128 x 2 bytes.
    assert kvcalc.estimate(model, context_tokens=1, dtype="bf16")["kv_cache"]["total_bytes"] == 61_440
    assert image_tokens(model, 200, 100, 1) == small_image


QWEN = {
    "model_type": "qwen", "vocab_size": 151936, "kv_channels": 128, "seq_length": 8192, "no_bias": True,
    "tie_word_embeddings": False,
}  # fmt: skip
MOLMO = {
    "model_type": "molmo", "hidden_size": 3584, "intermediate_size": 37888, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "embedding_size": 152064, "vocab_size": 152064,
    "qkv_bias": True, "attention_layer_norm": False, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published"),
    [
        ({**QWEN, "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24,
          "intermediate_size": 11008}, 1_836_828_672),
        ({**QWEN, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
          "intermediate_size": 22016}, 7_721_324_544),
        (MOLMO, 8_021_025_280),
    ],
    ids=["Qwen/Qwen-1_8B", "Qwen/Qwen-7B", "allenai/Molmo-7B-D-0924"],
)  # fmt: skip
def test_models_with_their_own_code_are_the_whole_checkpoint(config: dict[str, object], published: int) -> None:
    """Their configs give the width of gate and up together."""
    model = kvcalc.read_config(config, "own", "test")
    weights = weights_of(model)
    assert weights is not None
    assert count_parameters(weights).total + tower_parameters(model) == published


def test_experts_that_are_not_known_are_not_counted() -> None:
    assert weights_of(kvcalc.read_config({**MOLMO, "moe_num_experts": 64}, "own", "test")) is None


def test_a_text_model_has_no_tower() -> None:
    assert towers_of(kvcalc.load_model("llama-3.1-8b")) == ()
    assert tower_parameters(kvcalc.load_model("gemma-3-1b")) == 0


def test_both_towers_are_named() -> None:
    found = towers_of(kvcalc.load_model("gemma-4-e2b"))
    assert [(tower.name, tower.kind) for tower in found] == [
        ("vision tower", "gemma4_vision"), ("audio tower", "gemma4_audio")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tower", "said"),
    [
        ({"vision_config": {"model_type": "dinov9"}}, "dinov9"),
        ({"vision_config": {"model_type": "qwen3_vl", "depth": "27"}}, "depth is '27'"),
        ({"mm_vision_tower": "own/tower"}, "without its dimensions"),
        (
            {"model_type": "gemma3n_text", "num_kv_shared_layers": 0, "vision_config": {"architecture": "resnet50"}},
            "resnet50",
        ),
        ({"audio_config": {"model_type": "unheard"}}, "unheard"),
    ],
)
def test_a_tower_without_a_rule_is_named(tower: dict[str, object], said: str) -> None:
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **KV, **tower}
    (found,) = towers_of(kvcalc.read_config(config, "own", "test"))
    assert found.parameters is None
    assert said in str(found.reason)


def test_moonvit_is_counted_by_hand() -> None:
    """Kimi K2.5: 27 layers of 1,152, a table of 64 x 64 positions, and two layers over 2 x 2 patches."""
    (tower,) = towers_of(kvcalc.load_model("kimi-k2.5"))
    layer_vectors = (3 * 1152 + 1152) + (4304 + 1152) + 2 * (2 * 1152)  # biases of attention and MLP, two layer norms
    around = (3 * 14 * 14 * 1152 + 1152) + 64 * 64 * 1152 + 2 * 1152  # patches, positions, the last norm
    projector = 2 * 1152 + (4608 * 4608 + 4608) + (4608 * 7168 + 7168)
    assert tower.split_parameters == 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304)
    assert tower.whole_parameters == 27 * layer_vectors + around + projector


def test_a_rank_holds_a_share_of_the_matrices() -> None:
    (tower,) = towers_of(kvcalc.load_model("qwen2.5-vl-7b"))
    assert tower.on_rank(1) == tower.parameters
    assert tower.on_rank(4) == -(-(tower.split_parameters or 0) // 4) + (tower.whole_parameters or 0)
