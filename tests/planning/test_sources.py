"""`--explain`: every source that is named is the one that was read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.fit.reserve import ENGINES as WITH_LOGS
from benchmarks.fit.reserve import evidence, path_of
from kvcalc.engines.declarations import ENGINES, table
from tests.conftest import ROOT

ON = ("--gpu", "h100x4", "--engine", "vllm", "--context", "8192")


def preset(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "presets" / "models" / f"{name}.yaml").read_text())
    return found


@pytest.mark.parametrize("name", ["llama-3-70b", "gpt2", "deepseek-v3", "gemma-3-27b", "mamba-2.8b"])
def test_the_keys_are_those_of_the_preset(kvcalc: Any, name: str) -> None:
    source = kvcalc("estimate", name, "--explain", "--json").json["sources"]["model"]
    stated = preset(name)
    assert (source["file"], source["source"]) == (f"presets/models/{name}.yaml", stated["source"])
    assert source["date"] == str(stated["date"])
    config = stated["config"]
    read = {row["key"]: row["value"] for row in source["config"] if not row["is_default"]}
    assert len(read) >= 5
    for key, value in read.items():
        assert str(config[key]).startswith(value.removesuffix("...")), key
    assert not {row["key"] for row in source["config"] if row["is_default"]} & config.keys()
    # What the formula multiplies is among them.
    assert {"num_hidden_layers", "n_layer"} & read.keys()


def test_the_keys_of_a_file_are_those_in_it(kvcalc: Any, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64,
              "num_key_value_heads": 2}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    source = kvcalc("estimate", path, "--explain", "--json").json["sources"]["model"]
    assert (source["file"], source["date"]) == (None, None)
    read = {row["key"]: row["value"] for row in source["config"] if not row["is_default"]}
    assert read == {key: str(value) for key, value in config.items()}


def test_a_default_of_the_class_is_named_as_one(kvcalc: Any) -> None:
    rows = kvcalc("estimate", "gemma-3-27b", "--explain", "--json").json["sources"]["model"]["config"]
    assert ("vocab_size", True) in {(row["key"], row["is_default"]) for row in rows}
    assert "defaults of its class: vocab_size" in kvcalc("estimate", "gemma-3-27b", "--explain").out
    # MPT states its width as d_model, and has no default for it.
    assert "d_model 4096" in (mpt := kvcalc("estimate", "mpt-7b", "--explain").out)
    assert "defaults of its class" not in mpt


def test_without_explain_no_document_has_sources(kvcalc: Any) -> None:
    assert "sources" not in kvcalc("estimate", "gpt2", "--json").json
    assert "sources" not in kvcalc("fit", "llama-3-70b", *ON, "--json").json


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "logical"])
def test_the_files_that_an_engine_names_are_those_its_rules_name(engine: str) -> None:
    folder = ROOT / "kvcalc" / "engines" / ENGINES[engine][0]
    rules = " ".join(path.read_text() for path in folder.rglob("*") if path.suffix in (".py", ".yaml")
                     and path.name != "sources.yaml")  # fmt: skip
    rows = table(engine, "sources")
    assert {"release", "cache"} <= rows.keys() <= {"release", "cache", "reserve", "defaults"}
    files = set(re.findall(r"[\w/.-]+\.(?:py|cpp|md)\b", " ".join(rows.values())))
    assert files
    for file in files:
        assert os.path.basename(file) in rules, file
    (release,) = re.findall(r"\d+\.\d+\.\d+", rows["release"])
    assert release in rules or release in (ROOT / "docs" / "reference" / "engines.md").read_text()


@pytest.mark.parametrize("engine", WITH_LOGS)
def test_the_logs_are_those_of_the_benchmark(engine: str) -> None:
    assert path_of(engine).read_text() == evidence(engine), "python benchmarks/fit/reserve.py --write"


@pytest.mark.parametrize("columns", ["50", "80", "160"])
def test_fit_lists_the_logs_that_test_its_reserve(kvcalc: Any, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    words = ("fit", "llama-3-70b", *ON, "--explain")
    reserve = kvcalc(*words, "--json").json["sources"]["reserve"]
    lines = kvcalc(*words).out.splitlines()
    # Only a URL is longer than a line.
    assert max(len(line) for line in lines if len(line.split()) > 1) <= int(columns)
    tested = [log for log in reserve["logs"] if not log["sets_constant"]]
    assert len(tested) == reserve["num_tested"] >= 10
    for log in tested:
        assert any(line.split()[:3] == [log["model"], log["release"], log["device"]] for line in lines), log
    assert any("presets/gpus/h100-sxm.yaml" in line for line in lines)
    errors = [abs(log["error"]) for log in tested]
    assert reserve["largest_error"] == max(errors)
    assert sum(error <= reserve["median_error"] for error in errors) >= len(errors) / 2


def test_an_engine_without_logs_and_the_formula_have_none(kvcalc: Any) -> None:
    found = kvcalc("fit", "llama-3.1-8b", "--gpu", "h100", "--engine", "transformers", "--explain", "--json").json
    assert found["sources"]["reserve"] is None
    assert found["sources"]["engine"]["release"].startswith("Transformers")
    formula = kvcalc("estimate", "gpt2", "--explain", "--json").json["sources"]
    assert (formula["engine"], formula["device"], formula["reserve"]) == (None, None, None)
