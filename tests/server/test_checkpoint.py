"""A printed command names the checkpoint that was asked for, or says that it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.engines.checkpoint import has_unknown_cache
from kvcalc.engines.command import Checkpoint
from kvcalc.server.checkpoint import YOURS, checkpoint_of

CONFIG = '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 8}'


def of(reference: str, dtype: str | None = None) -> Checkpoint:
    return checkpoint_of(kvcalc.load_model(reference), dtype)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
        ("meta-llama/llama-3.1-70b-instruct", "meta-llama/Llama-3.1-70B-Instruct"),
        ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B"), ("llama-3.1-70b", "meta-llama/Llama-3.1-70B"),
        ("llama3.1-70b", "meta-llama/Llama-3.1-70B"), ("kimi-k2-instruct", "moonshotai/Kimi-K2-Instruct"),
        ("bloom-176b", "bigscience/bloom"), ("gpt2", "openai-community/gpt2"),
    ],
)  # fmt: skip
def test_the_name_typed_is_the_name_printed(typed: str, name: str) -> None:
    assert of(typed) == Checkpoint(name)


def test_a_name_resolved_to_a_preset_keeps_its_own() -> None:
    """For example a fine-tune, or a variant named without its organization."""
    spec = kvcalc.load_model("llama-3.1-70b")
    assert checkpoint_of(spec._replace(reference="someone/Llama-3.1-70B-Tuned")).name == "someone/Llama-3.1-70B-Tuned"
    assert checkpoint_of(spec._replace(reference="llama-3.1-70b-instruct")).name == "meta-llama/Llama-3.1-70B-Instruct"
    unknown = checkpoint_of(spec._replace(reference="llama-3.1-70b-tuned"))
    assert unknown.name == YOURS
    assert "llama-3.1-70b-tuned" in (unknown.note or "")


def test_the_hub_has_revisions() -> None:
    spec = kvcalc.load_model("qwen3-8b")._replace(source="hf:Qwen/Qwen3-8B@0123abc")
    assert checkpoint_of(spec._replace(reference="hf:Qwen/Qwen3-8B@v1")) == Checkpoint("Qwen/Qwen3-8B", "v1")
    assert checkpoint_of(spec._replace(reference="hf:Qwen/Qwen3-8B")) == Checkpoint("Qwen/Qwen3-8B")
    assert checkpoint_of(spec._replace(reference="")) == Checkpoint("Qwen/Qwen3-8B")


def test_a_folder_is_named_if_it_holds_weights(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG)
    for path in (folder, folder / "config.json"):
        found = of(str(path))
        assert found.name == "<your checkpoint>"
        assert f"there are no weights next to {folder}/config.json" in (found.note or "")
    spec = kvcalc.load_model(str(folder))
    (folder / "model.safetensors").write_bytes(b"")
    assert checkpoint_of(spec) == Checkpoint(str(folder))
    other = (folder / "config.json").rename(tmp_path / "mine.json")
    assert of(str(other)).name == YOURS


def test_a_preset_file_names_its_source(tmp_path: Path) -> None:
    text = "name: mine\nsource: SOURCE\ndate: 2026-01-01\nconfig: " + CONFIG
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("SOURCE", "https://huggingface.co/me/Mine-1B/blob/main/config.json"))
    assert of(str(path)) == Checkpoint("me/Mine-1B")
    path.write_text(text.replace("SOURCE", "my notes"))
    assert of(str(path)).name == YOURS


def test_what_has_no_checkpoint_is_a_placeholder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of("gpt-3").name == YOURS
    monkeypatch.setattr("kvcalc.model.resolve.read_stdin", lambda most: CONFIG)
    found = of("-")
    assert found.name == "<your checkpoint>"
    assert "stdin" in (found.note or "")


@pytest.mark.parametrize(
    ("model", "dtype", "expected"),
    [
        ("llama-3.1-8b", "bf16", {"dtype": "bf16"}), ("llama-3.1-8b", "fp16", {"dtype": "fp16"}),
        ("llama-3.1-8b", "fp8", {"name": "<your fp8 checkpoint>"}), ("deepseek-v3", "fp8", {"dtype": None}),
        ("llama-3.1-8b", "int4", {"name": "<your int4 checkpoint>"}),
        ("llama-3.1-8b", "nvfp4", {"name": "<your nvfp4 checkpoint>"}),
        ("deepseek-v3", "bf16", {"name": "<your bf16 checkpoint>"}),
        ("gpt-oss-120b", "fp8", {"name": "<your fp8 checkpoint>"}),
    ],
)  # fmt: skip
def test_weights_of_another_type_need_another_checkpoint(model: str, dtype: str, expected: dict[str, Any]) -> None:
    found, own = of(model, dtype), of(model).name
    assert {key: getattr(found, key) for key in expected} == expected
    if "name" in expected:
        assert own in (found.note or "")
        assert f"--dtype {dtype}" in (found.note or "")
        # Engines convert only 16-bit weights, and only to fp8.
        converts = "--quantization fp8 converts" in (found.note or "")
        assert converts is (model == "llama-3.1-8b" and dtype == "fp8")
    else:
        assert found.name == own
        assert found.note is None


def test_a_cache_type_that_was_not_read_is_unknown_under_either_key() -> None:
    """Inferact's recipe has kv_cache_quant_algo, unsloth's kv_cache_scheme; NVIDIA's names the type."""
    names = ("Inferact/Qwen3.8-27B-NVFP4", "unsloth/Qwen3-32B-NVFP4", "nvidia/Qwen3.6-27B-NVFP4")
    assert [has_unknown_cache(kvcalc.load_model(name)) for name in names] == [True, True, False]
