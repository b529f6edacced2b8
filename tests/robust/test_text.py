"""Names from outside reach a terminal, a table or a spreadsheet only as text."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvcalc.writing.cells import cell
from kvcalc.writing.terminal import printable
from tests.conftest import spawn

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
HOSTILE = ("\x1b]0;title\x07\x1b[31mred", "a\u202eb", "tab\tand\nline", "bell\x07", "\x9b31m", "del\x7f")
FORMATS = ("human", "tsv", "csv", "json")


def folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_printable() -> None:
    assert printable("héllo — 模型 😀") == "héllo — 模型 😀"
    assert printable("\x1b[31m\x00\u202e\udcff\x9b") == "\\x1b[31m\\x00\\u202e\\udcff\\x9b"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_folder_cannot_control_a_terminal(kvcalc: Any, tmp_path: Path, name: str) -> None:
    model = folder(tmp_path, name)
    commands = [
        ("estimate", model), ("fit", model, "--gpu", "h100"), ("compare", model, "gpt2"), ("sweep", model),
        ("estimate", model, "--attention", "mla", "--context", "1M"), ("estimate", model, "--engine", "vlm"),
    ]  # fmt: skip
    for command in commands:
        for format in FORMATS:
            result = kvcalc(*command, "--format", format)
            for line in (result.out + result.err).replace("\t", " ").split("\n"):
                assert line.isprintable(), (command, format, line)
    value = kvcalc("estimate", model, "--get", "model.name").out
    assert value.replace("\t", "").replace("\n", "").isprintable()


def test_names_that_are_not_text(tmp_path: Path) -> None:
    model = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.mkdir(model)
    with open(model + b"/config.json", "w") as file:
        json.dump(CONFIG, file)
    for format in FORMATS:
        result = spawn("estimate", os.fsdecode(model), "--format", format)
        assert result.status == 0, result.err


def test_a_users_preset_cannot_control_a_terminal(kvcalc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'name: "mine\\e[31m"\naliases: ["a\\e]0;x\\a"]\nfamily: "f\\e[2J"\nsource: "s\\e[0m"\n'
    text += "date: 2026-01-01\nconfig: "
    (tmp_path / "mine.yaml").write_text(text + json.dumps(CONFIG))
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path))
    for command in (("models",), ("models", "check", tmp_path / "mine.yaml"), ("estimate", tmp_path / "mine.yaml")):
        for format in ("human", "tsv", "csv"):
            result = kvcalc(*command, "--format", format)
            for line in (result.out + result.err).replace("\t", " ").split("\n"):
                assert line.isprintable(), (command, format, line)


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(1)"])
def test_a_folder_is_no_formula_of_a_spreadsheet(kvcalc: Any, tmp_path: Path, name: str) -> None:
    folder(tmp_path, name.replace("/", "_"))
    shown = name.replace("/", "_")
    for command in ("estimate", "compare", "sweep"):
        out = kvcalc(command, f"{tmp_path}/{shown}", "--format", "csv").out
        cells = [cell for row in csv.reader(io.StringIO(out)) for cell in row]
        assert f"'{shown}" in cells or command == "sweep", (command, out)
        assert not any(cell.startswith(("=", "+", "@")) for cell in cells)
        assert shown not in cells


def test_numbers_are_no_formulas(kvcalc: Any) -> None:
    assert cell("llama", "csv") == "llama"
    out = kvcalc("fit", "llama-3-70b", "--gpu", "t4", "--format", "csv").out
    row = next(line for line in out.splitlines() if line.startswith("fit.free_bytes,"))
    assert row.split(",")[1].startswith("-")


@pytest.mark.parametrize("value", ["010", "1:30", "+07_0", "190:20:30", "-1:05.5", "1_000", "0b1", "6_4.5", "0x1_0"])
def test_numbers_of_yaml_1_1_are_refused(kvcalc: Any, tmp_path: Path, value: str) -> None:
    preset = tmp_path / "mine.yaml"
    text = "name: mine\nsource: my notes\ndate: 2026-01-01\nconfig: " + json.dumps(CONFIG).replace("64}", f"{value}}}")
    preset.write_text(text)
    result = kvcalc("estimate", preset)
    assert result.status == 2
    assert f"line 4: {value} is a different number in YAML 1.1" in result.err
    preset.write_text(text.replace(value, "64").replace("my notes", f"'{value}'"))
    assert kvcalc("estimate", preset).status == 0
