"""Cross-attention to a vision encoder's output, whose length follows from the image and not from the context."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import ModelError
from tests.documents import estimate

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 1024}


def captions(encoder: dict[str, Any]) -> Any:
    config = {"model_type": "vision-encoder-decoder", "encoder": encoder, "decoder": GPT2, "torch_dtype": "bfloat16"}
    return kvcalc.read_config(config, "captions", "test")


@pytest.mark.parametrize(
    ("encoder", "tokens"),
    [
        ({"model_type": "vit"}, 14 * 14 + 1),
        ({"model_type": "vit", "image_size": 384}, 24 * 24 + 1),
        ({"model_type": "deit"}, 14 * 14 + 2),
        ({"model_type": "donut-swin", "image_size": [2560, 1920], "depths": [2, 2, 14, 2]}, 80 * 60),
    ],
)
def test_an_image_has_the_tokens_of_its_patches_whatever_the_context(encoder: dict[str, Any], tokens: int) -> None:
    spec, row = captions(encoder), 2 * 2 * 32 * 2
    for context in (50, 1000):
        document = estimate(spec, context_tokens=context, engine="transformers")
        assert document["workload"]["encoder_tokens"] == tokens
        assert document["kv_cache"]["total_bytes"] == (context + tokens) * row
        assert "encoder" not in " ".join(one["text"] for one in document["warnings"])
    # Other images are counted if their tokens are given.
    assert estimate(spec, context_tokens=50, encoder_tokens=99)["workload"]["encoder_tokens"] == 99


def test_an_encoder_whose_tokens_are_not_known_is_as_long_as_the_context_and_says_so() -> None:
    document = estimate(captions({"model_type": "levit"}), context_tokens=50)
    assert document["workload"]["encoder_tokens"] == 50
    assert any("set --encoder-tokens" in one["text"] for one in document["warnings"])
    with pytest.raises(ModelError, match="image_size"):
        captions({"model_type": "vit", "image_size": [1, 2, 3]})
