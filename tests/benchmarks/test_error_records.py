"""The errors of each release: how they are counted, kept and printed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT


@pytest.fixture
def records() -> ModuleType:
    return importlib.import_module("benchmarks.score.error_records")


def answer_of(seconds: float, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"throughput": {"serving": {"tpot_seconds": seconds, "tpot_low_seconds": low, "tpot_high_seconds": high}}}


POINT: dict[str, Any] = {
    "set": "a", "engine": "vllm", "metric": "tpot", "version": "0.19.0", "seconds": 0.01,
    "question": {"model": "llama-3.1-8b", "engine": "vllm"},
}  # fmt: skip


def test_errors_are_those_of_the_points_with_an_answer(records: ModuleType) -> None:
    answers = [answer_of(0.012, 0.01, 0.015), answer_of(0.015, 0.014, 0.016), answer_of(0.01), {"error": {}}]
    assert records.summary([POINT] * 4, answers) == {
        "points": "4", "without_answer": "1", "mean": "0.2333", "median": "0.2000", "within_quarter": "0.6667",
        "in_range": "0.5000",
    }  # fmt: skip


def test_each_question_is_about_the_release_of_the_engine(records: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def ask(_: str, questions: list[Any]) -> list[Any]:
        asked.append(questions)
        return [{"error": {}} if "benchmark" in question else answer_of(0.011) for question in questions]

    monkeypatch.setattr(records, "ask", ask)
    (row,) = records.errors_of("0.2.0", "kvcalc", [POINT, POINT])
    assert asked[-1] == [{"model": "llama-3.1-8b", "engine": "vllm@0.19.0"}] * 2, "an old release has no `benchmark`"
    assert (row["release"], row["collection"], row["points"], row["median"]) == ("0.2.0", "a", "2", "0.1000")


def test_the_page_has_the_records(records: ModuleType) -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    assert f"{records.BEGIN}\n\n{records.table()}\n\n{records.END}" in page


def test_a_release_is_kept_once(records: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "speed_points.jsonl").write_text(json.dumps({**POINT, "suspect": None}) + "\n")
    (tmp_path / "throughput.jsonl").touch()
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records.tsv")
    for release, seconds in (("1", 0.011), ("2", 0.012), ("1", 0.013)):
        monkeypatch.setattr(records, "ask", lambda _, asked, seconds=seconds: [answer_of(seconds)] * len(asked))
        monkeypatch.setattr("sys.argv", ["error_records.py", "add", release, "--data", str(tmp_path)])
        records.main()
    assert [(row["release"], row["median"]) for row in records.read()] == [("2", "0.2000"), ("1", "0.3000")]
    assert records.table().splitlines()[-1] == "| a, vllm, TPOT | 1 | 20 % (20 %) | 30 % (30 %) |"
