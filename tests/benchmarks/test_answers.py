"""The random questions of compare_answers.py: the same for a seed, about every option, and differences are found."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT

DRAWN = 9000


@pytest.fixture
def modules() -> Any:
    """A function that imports a module of benchmarks/answers."""

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"benchmarks.answers.{name}")

    return load


def draw(number: int, seed: int, hash_seed: int) -> str:
    """The questions as a process of its own draws them."""
    script = f"import json; from benchmarks.answers.recording import draw; print(json.dumps(draw({number}, {seed})))"
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_a_seed_gives_the_same_questions_in_every_process_and_another_seed_gives_others() -> None:
    first = draw(200, 5, hash_seed=1)
    assert first == draw(200, 5, hash_seed=2)
    assert first != draw(200, 6, hash_seed=1)


def test_every_command_engine_and_option_of_an_engine_is_asked_about(modules: Any) -> None:
    declared = modules("declared").read_declared()
    found = list(modules("generator").questions(declared, DRAWN, 1))
    text = json.dumps(found)
    for command in ("estimate", "fit", "compare", "sweep", "plan", "simulate", "prefix", "audit", "score", "batch",
                    "models", "gpus"):  # fmt: skip
        assert f'"arguments": ["{command}"' in text
    functions = {question["function"] for question in found if question["kind"] == "python"}
    assert functions == {"estimate", "fit", "compare", "sweep", "plan", "simulate", "prefix_curve"}
    assert len(declared.engines) > 6
    for engine, options in declared.engines.items():
        own = " ".join(words for words in map(json.dumps, found) if engine in words)
        for option in options:
            assert f'"--{option.name}"' in own, (engine, option)
    for option in (
        "prefix-tokens", "prefix-hit-rate", "turns", "offload", "speculative", "draft-model", "images", "attention",
        "kv-memory", "disaggregate", "prefill-replicas", "transfer-bandwidth", "dp", "ep", "emit", "trace", "report",
    ):  # fmt: skip
        assert f'"--{option}"' in text, option


def test_an_option_that_an_engine_newly_declares_is_asked_about_by_itself(modules: Any) -> None:
    declared = modules("declared").read_declared()
    new = modules("declared").Option("a-new-option", "N")
    engines = {**declared.engines, "sglang": [*declared.engines["sglang"], new]}
    found = list(modules("generator").questions(declared._replace(engines=engines), 1000, 1))
    assert "--a-new-option" in json.dumps(found)


def test_most_questions_are_answered_and_python_gives_the_document_of_the_command_line(
    modules: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = modules("recording")
    recording.record(tmp_path / "answers.jsonl.gz", 120, seed=3)
    rows = [row for row in recording.rows_of(tmp_path / "answers.jsonl.gz") if row["question"]["kind"] == "python"]
    answered = [row for row in rows if "document" in row["answer"]]
    assert len(answered) > len(rows) / 2 > 5
    assert all(row["answer"]["is_printed"] for row in answered)
    # A question that the command line answers is answered in Python too, and with the same exit code if not.
    rows = [row["answer"] for row in recording.rows_of(tmp_path / "answers.jsonl.gz")]
    commands = [row for row in rows if "status" in row and "stderr" in row]
    assert sum(row["status"] in (0, 4) for row in commands) > 0.6 * len(commands)


@pytest.fixture
def recorded(modules: Any, tmp_path: Path) -> Path:
    """Answers to a few questions, recorded through stored ones."""
    recording = modules("recording")
    questions = [
        {"kind": "command", "arguments": ["estimate", "llama-3.1-8b", "--engine", "vllm", "--gpu", "h100", "--json"]},
        {"kind": "command", "arguments": ["gpus", "h100", "--format", "human"]},
        {"kind": "command", "arguments": ["batch", "-"], "lines": [{"model": "gpt2"}, {"model": "gpt2", "batch": 2}]},
        {"kind": "command", "arguments": ["prefix", "mooncake.jsonl", "--json"]},
        {"kind": "public", "module": "kvcalc", "name": "Speculation"},
    ]
    stored = tmp_path / "stored.jsonl.gz"
    texts = {"mooncake.jsonl": (ROOT / "tests/logs/mooncake.jsonl").read_text()}
    with gzip.open(stored, "wt") as stream:
        for name, text in texts.items():
            stream.write(json.dumps({"file": name, "text": text}) + "\n")
        for question in questions:
            stream.write(json.dumps({"question": question, "answer": None}) + "\n")
    recording.record(tmp_path / "before.jsonl.gz", 0, 0, stored)
    return tmp_path / "before.jsonl.gz"


def rewrite(source: Path, target: Path, old: str, new: str) -> Path:
    """A copy of a recording with a piece of its text replaced."""
    text = gzip.decompress(source.read_bytes()).decode()
    assert old in text
    target.write_bytes(gzip.compress(text.replace(old, new).encode()))
    return target


def test_the_same_questions_asked_again_show_no_difference(
    modules: Any, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = modules("recording")
    recording.record(tmp_path / "after.jsonl.gz", 0, 0, recorded)
    capsys.readouterr()
    assert recording.compare(recorded, tmp_path / "after.jsonl.gz", 1) == 0
    assert capsys.readouterr().out == "0 of 5 answers differ\n"


@pytest.mark.parametrize(
    ("old", "new", "heading"),
    [
        ('"block_size": 16', '"block_size": 17', "estimate     vllm          document.engine.block_size: 1 answers"),
        ('"batch_size": 2', '"batch_size": 3', "batch        -             lines[].workload.batch_size: 1 answers"),
        ("num_tokens", "tokens_drafted", "kvcalc       -             signature: 1 answers"),
        ("HBM3,", "HBM4,", "gpus         -             stdout: 1 answers"),
    ],
)
def test_diff_finds_a_planted_difference_by_command_engine_and_path(
    modules: Any, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, heading: str
) -> None:
    planted = rewrite(recorded, tmp_path / "planted.jsonl.gz", old, new)
    capsys.readouterr()
    assert modules("recording").compare(recorded, planted, 1) == 1
    assert heading in capsys.readouterr().out.splitlines()


def test_diff_finds_an_unanswered_question(modules: Any, recorded: Path, tmp_path: Path) -> None:
    text = gzip.decompress(recorded.read_bytes()).decode().splitlines(keepends=True)
    (tmp_path / "short.jsonl.gz").write_bytes(gzip.compress("".join(text[:-1]).encode()))
    assert modules("recording").compare(recorded, tmp_path / "short.jsonl.gz", 1) == 1
