"""The head of a checkpoint whose class is no language model, and its attention in both directions."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.memory.weights import count_parameters
from kvcalc.model.spec import weights_of

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
BODY = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 64 * 32 + 32


def parameters(architecture: str, **config: Any) -> int:
    spec = kvcalc.read_config({**LLAMA, "architectures": [architecture], **config}, "test", "test")
    found = weights_of(spec)
    assert found is not None
    return count_parameters(found).total


@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        ("LlamaForCausalLM", 64 * 32),
        ("LlamaModel", 0),
        ("LlamaBidirectionalModel", 0),
        ("LlamaForSequenceClassification", 3 * 32),
        ("LlamaForTokenClassification", 3 * 32 + 3),
        ("LlamaForQuestionAnswering", 2 * 32 + 2),
        ("Qwen2ForRewardModel", 32 * 32 + 32 + 32 + 1),
        ("Qwen2ForProcessRewardModel", 32 * 32 + 32 + 2 * 32 + 2),
        ("InternLM2ForRewardModel", 32),
        ("GPT2LMHeadModel", 64 * 32),
    ],
)
def test_the_head_is_that_of_the_class(architecture: str, head: int) -> None:
    labels = {"id2label": {"0": "bad", "1": "good", "2": "best"}}
    assert parameters(architecture, **labels) == BODY + head
    # A tied embedding is the language model's head alone.
    tied = 0 if head == 64 * 32 else head
    assert parameters(architecture, tie_word_embeddings=True, **labels) == BODY + tied


def test_two_labels_unless_the_config_has_others() -> None:
    assert parameters("LlamaForSequenceClassification") == BODY + 2 * 32
    assert parameters("LlamaForSequenceClassification", num_labels=1) == BODY + 32


def test_a_published_reward_model() -> None:
    """Skywork-Reward-Llama-3.1-8B-v0.2 has one label. Its checkpoint has 7,504,928,768 parameters."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"},
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    found = weights_of(kvcalc.read_config(config, "test", "test"))
    assert found is not None
    assert count_parameters(found).total == 7_504_928_768


@pytest.mark.parametrize("model_type", ["t5", "umt5"])
def test_a_t5_encoder_alone_has_no_decoder(model_type: str) -> None:
    """The text encoder of many image models is T5 1.1 XXL's: 4,762,310,656 parameters. It keeps no cache."""
    config = {
        "model_type": model_type, "architectures": ["T5EncoderModel"], "d_model": 4096, "d_ff": 10240, "d_kv": 64,
        "num_heads": 64, "num_layers": 24, "vocab_size": 32128, "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": 32, "tie_word_embeddings": False,
    }  # fmt: skip
    spec = kvcalc.read_config(config, "test", "test")
    found = weights_of(spec)
    assert spec.is_encoder
    assert found is not None
    tables = 24 if model_type == "umt5" else 1
    assert count_parameters(found).total == 4_762_310_656 + (tables - 1) * 32 * 64


def test_the_class_of_a_tower_is_not_the_language_models() -> None:
    """LlavaLlamaModel and the like are a wrapper's own classes, and have an output matrix."""
    config = {"model_type": "llava", "architectures": ["SomeLlavaModel"], "text_config": LLAMA}
    found = weights_of(kvcalc.read_config(config, "test", "test"))
    assert found is not None
    assert count_parameters(found).total == BODY + 64 * 32
