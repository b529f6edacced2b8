"""What drafts tokens: MTP layers, EAGLE heads and draft models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcalc.errors import UsageError
from kvcalc.model.caches import LatentAttention
from kvcalc.model.drafting import drafter_of, with_drafter
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import ModelSpec, cache_runs, weights_of
from kvcalc.model.tensors import HEAD, ModelWeights


def parameters(weights: ModelWeights | None) -> int:
    assert weights is not None
    total = sum(len(block.numbers) * weight.parameters for block in weights.blocks for weight in block.weights)
    return total + weights.embedding.parameters


def test_the_mtp_module_of_deepseek_v3_has_the_published_size() -> None:
    """11.5 billion parameters of its own: the checkpoint's README_WEIGHTS.md, "MTP Modules"."""
    drafter = drafter_of(load_model("deepseek-v3"), None, "mtp")
    assert drafter is not None
    assert parameters(drafter.held) == pytest.approx(11.5e9, rel=0.01)
    # It shares the embedding and the output head, so they take no memory, but a pass reads the head.
    head = 129_280 * 7168
    assert parameters(drafter.read) == parameters(drafter.held) + 2 * head


def test_the_layers_that_draft_come_after_the_models_own() -> None:
    spec = load_model("deepseek-v3")
    both = with_drafter(spec, drafter_of(spec, None, "mtp"))
    assert (spec.num_layers, both.num_layers, both.first_draft_layer) == (61, 62, 61)
    assert [(first, last) for first, last, _ in cache_runs(both)] == [(0, 60), (61, 61)]
    assert isinstance(both.layers[-1].caches[0], LatentAttention)


def test_a_hybrid_models_mtp_layer_has_attention_and_no_state() -> None:
    spec = load_model("qwen3.6-27b")
    drafter = drafter_of(spec, None, "mtp")
    assert drafter is not None
    assert [cache.kind for group in drafter.layers for cache in group.caches] == ["full_attention"]


@pytest.mark.parametrize("name", ["llama-3-8b", "kimi-k2", "gpt-oss-120b"])
def test_a_model_without_mtp_layers_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError) as refusal:
        drafter_of(load_model(name), None, "mtp")
    assert name in refusal.value.message
    assert "ngram:3" in (refusal.value.hint or "")


def test_ngrams_have_no_layers() -> None:
    spec = load_model("llama-3-8b")
    assert drafter_of(spec, None, "ngram") is None
    both = with_drafter(spec, None)
    assert both.layers == spec.layers
    assert both.first_draft_layer == 32


def test_a_draft_model_keeps_all_its_layers_and_tables() -> None:
    spec, small = load_model("llama-3-70b"), load_model("llama-3.2-1b")
    drafter = drafter_of(spec, small, "draft")
    assert drafter is not None
    # The cache of results may have been cleared in between, so the weights need not be the same object.
    assert drafter.held is drafter.read
    assert parameters(drafter.held) == parameters(weights_of(small))
    assert with_drafter(spec, drafter).num_layers == 80 + 16


def test_a_model_with_an_encoder_cannot_draft() -> None:
    for name in ("bert-base", "t5-small"):
        with pytest.raises(UsageError, match=f"--draft-model {name}"):
            drafter_of(load_model("llama-3-70b"), load_model(name), "draft")


def test_an_eagle_head_is_one_layer_with_wide_inputs() -> None:
    """EAGLE-3 for Llama 3.1 8B: one layer, whose q, k and v read 2 x 4096, and fc from 3 x 4096."""
    spec = load_model("llama-3.1-8b")
    drafter = drafter_of(spec, None, "eagle")
    assert drafter is not None
    layer = 4096 * 2 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336 + 2 * 4096
    assert parameters(drafter.held) == layer + 3 * 4096 * 4096 + 2 * 4096


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b", "mamba-2.8b"])
def test_an_unknown_eagle_head_is_refused_and_not_guessed(name: str) -> None:
    with pytest.raises(UsageError, match="EAGLE head"):
        drafter_of(load_model(name), None, "eagle")


def test_an_eagle_heads_config_is_read_with_its_own_vocabulary(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 17_280,
        "vocab_size": 201_088, "draft_vocab_size": 64_000, "max_position_embeddings": 131_072,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    drafter = drafter_of(load_model("gpt-oss-120b"), load_model(str(path)), "eagle")
    assert drafter is not None
    assert drafter.held is not None
    heads = [weight for block in drafter.held.blocks for weight in block.weights if weight.role == HEAD]
    assert [(head.rows, head.columns) for head in heads] == [(64_000, 2880)]
    assert drafter.layers[0].caches[0].kind == "full_attention"


@pytest.mark.parametrize("method", ["eagle", "eagle1", "dflash"])
def test_a_config_that_is_no_head_is_refused(method: str) -> None:
    with pytest.raises(UsageError, match=r"mamba-2\.8b: not a head that drafts"):
        drafter_of(load_model("llama-3-8b"), load_model("mamba-2.8b"), method)


def test_an_eagle_1_head_is_a_layer_of_the_model_behind_a_projection() -> None:
    """EAGLE for Llama 3.1 8B: the embedding and the last hidden state are joined, and the layer has one norm less."""
    drafter = drafter_of(load_model("llama-3.1-8b"), None, "eagle1")
    assert drafter is not None
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336 + 4096
    assert parameters(drafter.held) == layer + 2 * 4096 * 4096


def _head(tmp_path: Path, **more: object) -> ModelSpec:
    config = {
        "model_type": "qwen3", "num_hidden_layers": 5, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12_288, "vocab_size": 151_936,
        "max_position_embeddings": 40_960, "torch_dtype": "bfloat16", "tie_word_embeddings": False, **more,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load_model(str(tmp_path / "config.json"))


LAYER = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12_288 + 2 * 4096 + 2 * 128


@pytest.mark.parametrize("joined", [3, 6])
def test_a_dflash_head_joins_hidden_states_of_the_layers_it_names(tmp_path: Path, joined: int) -> None:
    head = _head(tmp_path, block_size=16, dflash_config={"target_layer_ids": [*range(joined)], "mask_token_id": 1})
    drafter = drafter_of(load_model("qwen3-8b"), head, "dflash")
    assert drafter is not None
    assert parameters(drafter.held) == 5 * LAYER + joined * 4096 * 4096 + 2 * 4096
    assert sum(group.num_layers for group in drafter.layers) == 5
    # The embedding and the output head are the model's.
    assert parameters(drafter.read) == parameters(drafter.held) + 2 * 151_936 * 4096


def test_only_the_first_layer_of_an_eagle_3_head_reads_the_embedding(tmp_path: Path) -> None:
    head = _head(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 9, 17, 25]})
    drafter = drafter_of(load_model("qwen3-8b"), head, "eagle")
    assert drafter is not None
    doubled, norms = 4096 * (4096 + 2 * 1024), (1 + 5) * 4096
    assert parameters(drafter.held) == 5 * LAYER + doubled + 4 * 4096 * 4096 + norms
