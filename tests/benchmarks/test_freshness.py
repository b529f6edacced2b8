"""benchmarks/score/freshness.py: which architectures an engine registers, and whether kvcalc answers them."""

from __future__ import annotations

import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

VLLM = """
_TEXT_GENERATION_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "BailingMoeV3ForCausalLM": ("bailing_moe_v3", "BailingMoeV3ForCausalLM"),
    "NoSuchForCausalLM": ("no_such", "NoSuchForCausalLM"),
}
_EMBEDDING_MODELS = {"BertModel": ("bert", "BertEmbeddingModel")}
_MULTIMODAL_MODELS = {"Qwen3VLForConditionalGeneration": ("qwen3_vl", "Qwen3VLForConditionalGeneration")}
"""
AUTO = """
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict(
    [
        # Model for Causal LM mapping
        ("gemma", "GemmaForCausalLM"),
        ("xlnet", "XLNetLMHeadModel"),
    ]
)
MODEL_FOR_MASKED_LM_MAPPING_NAMES = OrderedDict(
    [
        ("albert", "AlbertForMaskedLM"),
    ]
)
"""


def wheel(folder: Path, name: str, files: dict[str, str], version: str = "1.0") -> str:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as found:
        for file, text in files.items():
            found.writestr(file, text)
    return str(path)


def test_what_the_wheels_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    freshness = import_module("benchmarks.score.freshness")

    sglang = {
        "sglang/srt/models/llama.py": "EntryClass = [LlamaForCausalLM, LlamaForSequenceClassification]",
        "sglang/srt/models/phi3_small.py": "EntryClass = Phi3SmallForCausalLM",
    }
    wheels = [
        wheel(tmp_path, "vllm", {"vllm/model_executor/models/registry.py": VLLM}),
        wheel(tmp_path, "sglang", sglang),
        wheel(tmp_path, "transformers", {"transformers/models/auto/modeling_auto.py": AUTO}),
    ]
    monkeypatch.setattr(sys, "argv", ["freshness", *wheels])
    freshness.main()
    assert capsys.readouterr().out.splitlines() == [
        "vllm 1.0: 3 of 4 (75.0%)",
        "  NoSuchForCausalLM: its model type is not known",
        "sglang 1.0: 1 of 2 (50.0%)",
        "  Phi3SmallForCausalLM: its block-sparse attention is not modelled",
        "transformers 1.0: 1 of 2 (50.0%)",
        "  XLNetLMHeadModel: model_type xlnet: it keeps hidden states (mems), not keys and values",
    ]


def test_two_wheels_of_one_package_are_both_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    freshness = import_module("benchmarks.score.freshness")
    file = "transformers/models/auto/modeling_auto.py"
    newer = AUTO.replace('("xlnet"', '("llama", "LlamaForCausalLM"),\n        ("xlnet"')
    wheels = [wheel(tmp_path, "transformers", {file: AUTO}), wheel(tmp_path, "transformers", {file: newer}, "1.1")]
    monkeypatch.setattr(sys, "argv", ["freshness.py", *wheels])
    freshness.main()
    out = capsys.readouterr().out
    assert "transformers 1.0: 1 of 2" in out
    assert "transformers 1.1: 2 of 3" in out
