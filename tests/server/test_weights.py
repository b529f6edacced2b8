"""The weights in an estimate: requested dtypes, quantisation, what-ifs, and checkpoint files next to the config."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.memory.sharding import Width
from kvcalc.model.checkpoint import INDEX, StoredWeights
from kvcalc.model.presets import find_preset
from kvcalc.server.device_weights import DeviceWeights, _file_on_device
from kvcalc.server.weights import believed_bytes, files_of
from kvcalc.units import format_size
from tests.conftest import Result
from tests.documents import estimate, texts
from tests.model.test_checkpoint import write

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
LINEAR = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96)
REST = 2 * 128 * 64 + 5 * 64


def config_of(name: str) -> dict[str, Any]:
    preset = find_preset(name)
    assert preset is not None
    return dict(preset.config)


def weights(config: dict[str, Any] | str, **options: Any) -> tuple[dict[str, Any], list[str]]:
    spec = kvcalc.load_model(config) if isinstance(config, str) else kvcalc.read_config(config, "test", "test")
    document = estimate(spec, **options)
    return document["weights"], texts(document)


def test_in_the_configs_dtype_or_the_one_asked_for() -> None:
    found, warnings = weights(LLAMA)
    assert found == {
        "parameters": LINEAR + REST,
        "active_parameters_per_token": LINEAR + REST - 128 * 64,
        "input_embedding_parameters": 128 * 64,
        "bytes": 2 * (LINEAR + REST),
        "active_bytes_per_token": 2 * (LINEAR + REST - 128 * 64),
        "dtype": "bf16",
        "bytes_source": "config",
        "reason": None,
        "towers": [],
    }
    assert warnings == []
    assert weights(LLAMA, dtype="fp32")[0]["bytes"] == 4 * (LINEAR + REST)
    for dtype, total in (("fp8", LINEAR), ("int4", LINEAR // 2), ("mxfp4", LINEAR // 32 * 17)):
        found, _ = weights(LLAMA, dtype=dtype)
        assert (found["dtype"], found["bytes"]) == (dtype, total + 2 * REST)


def test_a_dtype_which_is_assumed_is_said_to_be_whatever_the_caches_is() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    found, warnings = weights(config, kv_dtype="fp8")
    assert found["dtype"] == "bf16"
    assert [w for w in warnings if "assuming bf16" in w]


def test_the_configs_quantisation_unless_a_dtype_is_asked_for() -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    found, warnings = weights(config)
    assert (found["dtype"], found["bytes"]) == ("fp8", LINEAR + 2 * 7 * 4 + 2 * REST)
    assert warnings == []
    assert weights(config, dtype="bf16")[0]["bytes"] == 2 * (LINEAR + REST)


def test_published_gpt_oss_is_as_large_as_its_index_says() -> None:
    # metadata.total_size in model.safetensors.index.json of openai/gpt-oss-120b.
    config = kvcalc.load_model("gpt-oss-120b")
    assert estimate(config)["weights"]["bytes"] == 65_248_815_744


@pytest.mark.parametrize("quantization", [{"quant_method": "hqq"}, "fp8", ["fp8"]])
def test_a_quantisation_that_is_not_modelled_leaves_the_parameters(quantization: Any) -> None:
    found, warnings = weights({**LLAMA, "quantization_config": quantization})
    assert found["parameters"] == LINEAR + REST
    assert (found["bytes"], found["dtype"], found["bytes_source"]) == (None, None, None)
    assert any("is not modelled" in warning for warning in warnings)


def test_other_kv_heads_change_the_projections() -> None:
    per_head = 2 * 2 * 64 * 16
    found, _ = weights(LLAMA, what_if=kvcalc.WhatIf("mha"))
    assert found["parameters"] == LINEAR + REST + 2 * per_head
    found, _ = weights(LLAMA, what_if=kvcalc.WhatIf("mqa"))
    assert found["parameters"] == LINEAR + REST - per_head
    found, _ = weights(LLAMA, what_if=kvcalc.WhatIf("gqa"))
    assert found["parameters"] == LINEAR + REST
    # GPT-2 has queries, keys and values in one matrix. K and V each lose 11 of 12 heads of 64, with their biases.
    found, _ = weights("gpt2", what_if=kvcalc.WhatIf("mqa"))
    assert found["parameters"] == 124_439_808 - 12 * 2 * 11 * 64 * (768 + 1)


@pytest.mark.parametrize(("name", "attention"), [("llama-3-8b", "mla"), ("deepseek-v3", "mha")])
def test_an_attention_whose_other_weights_are_not_known_gives_no_number(name: str, attention: str) -> None:
    found, warnings = weights(name, what_if=kvcalc.WhatIf(attention))
    assert found["parameters"] is None
    assert found["bytes"] is None
    assert found["reason"] in warnings[-1]


def test_a_missing_fact_about_the_weights_leaves_the_cache() -> None:
    found, _ = weights({**LLAMA, "vocab_size": "many"})
    assert found["parameters"] is None
    assert "vocab_size" in found["reason"]
    found, warnings = weights({**LLAMA, "model_type": "generic"})
    assert found["parameters"] is None
    assert "generic" in found["reason"]
    assert warnings == []


def test_what_lies_beside_the_config_is_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    counted = 2 * (LINEAR + REST)
    write(tmp_path / "model.safetensors", counted, 100)
    found, warnings = weights(str(tmp_path))
    assert (found["bytes"], found["bytes_source"], found["parameters"]) == (counted + 100, "safetensors", LINEAR + REST)
    assert warnings == []
    # With another dtype or another attention, the weights are not those in the file.
    found, _ = weights(str(tmp_path), dtype="fp16")
    assert (found["bytes"], found["bytes_source"]) == (counted, "config")
    found, _ = weights(str(tmp_path), what_if=kvcalc.WhatIf("mqa"))
    assert found["bytes_source"] == "config"
    # The file gives the size even if the config's quantisation is not modelled.
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "hqq"}}))
    found, warnings = weights(str(tmp_path))
    assert (found["bytes"], warnings) == (counted + 100, [])


def test_files_are_held_against_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    counted = 2 * (LINEAR + REST)

    def ask(size: int) -> tuple[dict[str, Any], list[str]]:
        write(tmp_path / "model.safetensors", size)
        found, warnings = weights(str(tmp_path))
        assert found["active_bytes_per_token"] <= found["bytes"]
        return found, warnings

    least = -(-counted * 97 // 100)
    found, warnings = ask(least)
    assert (found["bytes"], warnings) == (least, [])
    found, warnings = ask(least - 1)
    assert (found["bytes"], found["bytes_source"]) == (counted, "config")
    assert warnings[0].startswith("weights: model.safetensors: has ")
    assert warnings[0].endswith(" that the config describes; the size is computed from the config")
    found, warnings = ask(2 * counted)
    assert (found["bytes"], found["bytes_source"]) == (2 * counted, "safetensors")
    assert f"has {format_size(counted)} more than the language model of the config" in warnings[0]


def test_a_partial_checkpoint_does_not_fit(kvcalc: Any, tmp_path: Path) -> None:
    """One shard of 17 of a model with 61 GiB of weights, as an interrupted download leaves it."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3-32b")))
    write(tmp_path / "model-00001-of-00017.safetensors", 3_900_000_000)
    result: Result = kvcalc("fit", tmp_path, "--gpu", "rtx-4090", "--json")
    assert result.status == 4
    assert result.json["weights"]["bytes"] == kvcalc("estimate", "qwen3-32b", "--json").json["weights"]["bytes"]
    warning = "model-00001-of-00017.safetensors: incomplete: 1 of 17 files are there; the size is computed from the"
    assert any(warning in text for text in texts(result.json))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adapter_model.safetensors", "adapter_model.safetensors: an adapter of 1.00 KiB"),
        (INDEX, f"{INDEX}: incomplete: model-1.safetensors and 1 more of 2 files are missing"),
    ],
)
def test_neither_do_an_adapter_or_an_index_without_its_files(kvcalc: Any, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3-32b")))
    if name == INDEX:
        # As large as the model, but its files are not there.
        places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 65_524_246_528}, "weight_map": places}))
    else:
        write(tmp_path / name, 1024)
    result: Result = kvcalc("fit", tmp_path, "--gpu", "rtx-4090", "--json")
    assert (result.status, result.json["weights"]["bytes_source"]) == (4, "config")
    assert any(said in text for text in texts(result.json))


def test_the_folder_of_an_adapter_names_the_model(kvcalc: Any, tmp_path: Path) -> None:
    write(tmp_path / "adapter_model.safetensors", 1024)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    for path in (tmp_path, tmp_path / "adapter_config.json"):
        result: Result = kvcalc("estimate", path)
        assert result.status == 3
        assert result.err.splitlines() == [
            f"kvcalc: {tmp_path}/adapter_config.json: an adapter, not a model",
            "  give the model that it adapts: meta-llama/Llama-3.1-8B",
        ]


def test_a_damaged_file_is_one_line_and_status_2(kvcalc: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"short")
    result: Result = kvcalc("estimate", tmp_path, "--json")
    assert (result.status, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert "model.safetensors: damaged" in result.err


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("llama-3-70b", "weights  70.6 B parameters, 131.42 GiB bf16"),
        ("deepseek-v3", "weights  671.0 B parameters, 36.6 B active, 626.93 GiB fp8"),
        ("gpt2", "weights  124.4 M parameters, 474.71 MiB fp32"),
    ],
)
def test_one_line_for_a_person(kvcalc: Any, model: str, line: str) -> None:
    assert line in kvcalc("estimate", model, "--format", "human").out.splitlines()


def test_no_line_where_nothing_is_known(kvcalc: Any) -> None:
    assert "weights" not in kvcalc("estimate", "gpt-3", "--format", "human").out


def test_a_folder_with_adapters_alone_lacks_nothing() -> None:
    """Only files that say what is missing are not believed."""
    adapters = StoredWeights(None, "adapter_model.safetensors", None, ("an adapter",))
    for counted in (None, 1000):
        size, notes = believed_bytes(adapters, counted, None)
        assert (size, [note.code for note in notes]) == (None, ["adapter"])
        size, notes = believed_bytes(adapters._replace(trouble="a shard is missing"), counted, None)
        assert size is None
        assert len(notes) == 2
        assert "incomplete: a shard is missing" in notes[1].text


HEADER: dict[str, Any] = {
    "bytes": 4001, "reason": None, "parameters": 8000, "active_parameters_per_token": 7000,
    "input_embedding_parameters": 1000,
}  # fmt: skip


def of_file(described: dict[str, Any] = HEADER, *, hidden: int | None = 10, ranks: int = 1, stages: int = 1,
            on_host: bool = False, parts: Any = None) -> DeviceWeights:  # fmt: skip
    gguf = SimpleNamespace(weights=SimpleNamespace(bytes=4001, parts=parts))
    spec: Any = SimpleNamespace(attention=SimpleNamespace(hidden_size=hidden), num_layers=6, gguf=gguf)
    return _file_on_device(spec, described, ranks, stages, on_host)


def test_a_device_holds_its_share_of_a_gguf_file() -> None:
    """A layer of (7,000 - 1,000) / 6 parameters is at most 100 wide, because one side of each matrix is 10."""
    whole, half = of_file(), of_file(ranks=2)
    assert (whole.bytes, half.bytes) == (4001, 2001)
    assert (whole.width, half.width) == (Width(100, 10, 100, 6, False), Width(50, 10, 100, 6, False))
    # More parameters than those of a token and of the table are experts'.
    assert of_file({**HEADER, "parameters": 8001}).width == Width(100, 10, 100, 6, True)
    parts: Any = SimpleNamespace(input=700, tied_head=200)
    assert [of_file(on_host=on_host, parts=parts).bytes for on_host in (True, False)] == [3501, 4001]
    assert of_file(on_host=True).bytes == 4001
    assert of_file({**HEADER, "bytes": 5000}, on_host=True, parts=parts).bytes == 5000, "another type than the file's"


def test_why_the_share_of_a_gguf_file_is_not_known() -> None:
    for found, reason in (
        (of_file({**HEADER, "bytes": None}), "the file's header does not have them"),
        (of_file({**HEADER, "bytes": None, "reason": "another attention"}), "another attention"),
        (of_file(hidden=0), "the file's header does not have them"),
        (of_file(stages=2), "a GGUF file is not split into pipeline stages"),
    ):
        assert found == DeviceWeights(None, 0, None, reason)


@pytest.mark.parametrize(("layers", "drafts"), [(1, 7), (0, 0)])
def test_layers_after_the_last_draft_if_the_config_says_so(tmp_path: Path, layers: int, drafts: int) -> None:
    """model.layers.61 of DeepSeek-V3 is for multi-token prediction (its README_WEIGHTS.md)."""
    sizes, end, header = {"model.layers.60.a": 30, "model.layers.61.a": 7}, 0, dict[str, Any]()
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    write(tmp_path / "model.safetensors", header=header, data=end)
    spec = kvcalc.load_model("deepseek-v3")._replace(checkpoint=str(tmp_path), num_draft_layers=layers)
    stored = files_of(spec)
    assert stored is not None
    assert (stored.bytes, stored.draft_bytes) == (37, drafts)
    assert files_of(spec._replace(checkpoint=None)) is None
