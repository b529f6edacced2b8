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
    assert answer["fit"]["weights_bytes"] - tables(answer) == answer["weights"]["bytes"] + 2 * parameters
    (described,) = answer["weights"]["towers"]
    assert (described["parameters"], described["bytes"]) == (parameters, 2 * parameters)


def tables(answer: Any) -> int:
    """The bytes of the rotary tables, which vLLM makes while it loads the weights."""
    return sum(line["bytes"] for line in answer["fit"]["lines"] if line["name"] == "rotary tables")


def test_llama_cpp_reads_towers_from_a_file_of_their_own() -> None:
    assert towers(ask("gemma-3-27b", engine="llama.cpp")) == {}


def test_language_model_only() -> None:
    settings = {"language-model-only": True}
    whole, text = ask("gemma-4-e2b", engine="vllm"), ask("gemma-4-e2b", engine="vllm", engine_settings=settings)
    assert list(towers(whole)) == ["vision tower", "audio tower"]
    assert towers(text) == {}
    assert text["fit"]["weights_bytes"] - tables(text) == text["weights"]["bytes"]
    assert not any("encoder cache" in line["name"] for line in text["fit"]["lines"])


def test_ranks_share_the_tower() -> None:
    one, four = (
        towers(ask("qwen3-vl-32b", devices=f"h100x{n}", tensor_parallel_size=n, engine="vllm")) for n in (1, 4)
    )
    assert one["vision tower"] / 4 < four["vision tower"] < one["vision tower"] / 2


CONFIG: dict[str, Any] = {
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


def test_a_tower_that_is_not_counted_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vision_config": {"model_type": "dinov9"}}))
    answer = ask(str(tmp_path))
    assert towers(answer) == {"tower of unknown size": 0}
    assert any("the vision tower is not counted" in text for text in texts(answer))


def write_tensors(folder: Path, **sizes: int) -> None:
    """A safetensors file of tensors of these names, with __ for a dot."""
    header, end = {}, 0
    for name, size in sizes.items():
        header[name.replace("__", ".")] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_files_that_hold_the_tower_are_not_counted_twice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    counted = ask(str(tmp_path))
    total = counted["fit"]["weights_bytes"]
    write_tensors(tmp_path, x=total)
    stored = ask(str(tmp_path))
    assert stored["weights"]["bytes_source"] == "safetensors"
    assert stored["weights"]["bytes"] == stored["fit"]["weights_bytes"] == total
    assert towers(stored) == towers(counted)


def test_files_with_a_part_of_the_tower_are_not_complete(tmp_path: Path) -> None:
    """Without any tensor of the tower, they are a checkpoint of the language model alone."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights = ask(str(tmp_path))["weights"]
    text, (tower,) = weights["bytes"], (found["bytes"] for found in weights["towers"])

    def source(**sizes: int) -> tuple[str, list[str]]:
        write_tensors(tmp_path, **sizes)
        answer = ask(str(tmp_path))
        return answer["weights"]["bytes_source"], [said for said in texts(answer) if "config describes" in said]

    assert source(model__x=text) == ("safetensors", [])
    assert source(model__x=text, vision_tower__y=tower) == ("safetensors", [])
    half = {"vision_tower__y": tower // 2}
    found, (said,) = source(model__x=text, **half)
    assert found == "config"
    assert "for its towers; the size is computed from the config" in said
    # The tower's tensors do not stand for those that the language model lacks.
    assert source(model__x=text * 9 // 10, model__vision_tower__y=tower)[0] == "config"
