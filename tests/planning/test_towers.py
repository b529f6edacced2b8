"""Towers in a device's weights: lines of their own, unless the engine loads the language model alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.model.towers import tower_parameters
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate, texts


def ask(name: str, **asked: Any) -> dict[str, Any]:
    return estimate(kvcalc.load_model(name), devices=find_devices(asked.pop("devices", "h100")), **asked)


def towers(answer: dict[str, Any]) -> dict[str, int]:
    return {line["name"]: line["bytes"] for line in answer["fit"]["lines"] if "tower" in line["name"]}


@pytest.mark.parametrize("engine", ["logical", "vllm", "sglang", "tensorrt-llm", "transformers"])
def test_engines_load_the_tower(engine: str) -> None:
    answer = ask("qwen2.5-vl-7b", engine=engine)
    parameters = tower_parameters(kvcalc.load_model("qwen2.5-vl-7b"))
    assert towers(answer) == {"vision tower": 2 * parameters}
    assert answer["fit"]["weights_bytes"] == answer["weights"]["bytes"] + 2 * parameters
    (described,) = answer["weights"]["towers"]
    assert (described["parameters"], described["bytes"]) == (parameters, 2 * parameters)


def test_llama_cpp_reads_towers_from_a_file_of_their_own() -> None:
    assert towers(ask("gemma-3-27b", engine="llama.cpp")) == {}


def test_language_model_only() -> None:
    settings = {"language-model-only": True}
    whole, text = ask("gemma-4-e2b", engine="vllm"), ask("gemma-4-e2b", engine="vllm", engine_settings=settings)
    assert list(towers(whole)) == ["vision tower", "audio tower"]
    assert towers(text) == {}
    assert text["fit"]["weights_bytes"] == text["weights"]["bytes"]
    assert not any("encoder cache" in line["name"] for line in text["fit"]["lines"])


def test_ranks_share_the_tower() -> None:
    one, four = (
        towers(ask("qwen3-vl-32b", devices=f"h100x{n}", tensor_parallel_size=n, engine="vllm")) for n in (1, 4)
    )
    assert one["vision tower"] / 4 < four["vision tower"] < one["vision tower"] / 2


def test_a_tower_that_is_not_counted_is_named() -> None:
    answer = ask("gemma-3n-e4b")
    assert towers(answer) == {}
    assert any("the vision tower is not counted" in text for text in texts(answer))


def test_files_that_hold_the_tower_are_not_counted_twice(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "image_size": 28, "patch_size": 14,
        },
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    counted = ask(str(tmp_path))
    total = counted["fit"]["weights_bytes"]
    header = json.dumps({"x": {"dtype": "U8", "shape": [total], "data_offsets": [0, total]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(total))
    stored = ask(str(tmp_path))
    assert stored["weights"]["bytes_source"] == "safetensors"
    assert stored["weights"]["bytes"] == stored["fit"]["weights_bytes"] == total
    assert towers(stored) == towers(counted)
