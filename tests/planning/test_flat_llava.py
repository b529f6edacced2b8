"""LLaVA's own flat configs: vLLM loads the converted checkpoint, whose language model and tower are the same."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.model.towers.images import image_tokens
from tests.documents import estimate, texts

CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
}  # fmt: skip
LLAMA = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "torch_dtype": "float16",
}  # fmt: skip
FLAT = {
    **LLAMA, "architectures": ["LlavaLlamaForCausalLM"], "mm_hidden_size": 1024, "mm_projector_type": "mlp2x_gelu",
    "mm_vision_tower": "openai/clip-vit-large-patch14-336",
}  # fmt: skip
CONVERTED = {"model_type": "llava", "text_config": {"model_type": "llama", **LLAMA}, "vision_config": CLIP}


def ask(config: dict[str, Any]) -> dict[str, Any]:
    return estimate(kvcalc.read_config(config, "own", "test"), engine="vllm", context_tokens=4096)


@pytest.mark.parametrize("model_type", ["llava", "llava_llama"])
def test_a_flat_config_is_answered_like_its_converted_version(model_type: str) -> None:
    flat, converted = ask({"model_type": model_type, **FLAT}), ask(CONVERTED)
    assert flat["engine"]["request_bytes"] == converted["engine"]["request_bytes"] == 2**31
    assert flat["weights"]["parameters"] == converted["weights"]["parameters"] == 6_738_415_616
    assert flat["weights"]["towers"] == converted["weights"]["towers"]
    assert any("converted version (-hf)" in text for text in texts(flat))
    assert not any("-hf" in text for text in texts(converted))


def test_a_flat_config_of_another_size_says_which_engine_counts_its_weights() -> None:
    """Transformers' class ignores the flat keys, and builds LLaMA 7B."""
    model = kvcalc.read_config({"model_type": "llava", **FLAT, "num_hidden_layers": 40}, "own", "test")
    weights = estimate(model)["weights"]
    assert weights["parameters"] is None
    assert "--engine transformers counts" in weights["reason"]
    assert estimate(model, engine="transformers")["weights"]["parameters"] == 6_738_415_616


def test_the_tokens_of_an_image_are_those_of_the_tower_that_is_named() -> None:
    assert image_tokens(kvcalc.read_config({"model_type": "llava", **FLAT}, "own", "test"), 1920, 1080) == 576


def test_llava_1_5_13b_is_the_whole_checkpoint() -> None:
    size = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40}
    heads = {"num_attention_heads": 40, "num_key_value_heads": 40}
    weights = ask({"model_type": "llava_llama", **FLAT, **size, **heads})["weights"]
    assert weights["parameters"] + weights["towers"][0]["parameters"] == 13_350_839_296
