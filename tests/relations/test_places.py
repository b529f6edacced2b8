"""The same questions have the same answers in any locale, time zone and folder, and whatever the order of hashes.

Questions are random, about every command that does not measure. `pytest -m fuzz --cases 1000000 --fuzz-seed 7` is a
long run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.conftest import ROOT
from tests.relations.drawing import answers, declared

pytestmark = pytest.mark.fuzz

CASES_PER_QUESTION = 150
# Random questions seldom ask these.
ALSO = (
    "check vllm serve Qwen/Qwen3-235B-A22B-FP8 -tp 8 --gpu h100x8",
    "check sglang serve --model-path openai/gpt-oss-20b", "models --gpu l40s --engine vllm --context 8k",
    "models show deepseek-v4-flash --json", "gpus --json", "gpus show h100", "models check nope.json", "audit vllm.log",
    "audit sglang.log --json", "score vllm-bench.json --gpu h100", "prefix mooncake.jsonl llama-3-8b --gpu h100",
    "plan llama-3-8b --gpu h100 --trace trace.csv --emit k8s", "completion zsh", "estimate lama-3-8b",
    "estimate gpt2 --gup h100", "compare gpt2 mamba-2.8b --format csv",
)  # fmt: skip


class Place(NamedTuple):
    """Where a process answers: variables of its environment, and the name of its folder."""

    folder: str
    variables: dict[str, str]


PLACES = (
    Place("here", {"LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}),
    # Files are not UTF-8 by default, numbers have a decimal comma, and the zone is hours and a half away.
    Place(
        "far/dort drüben",
        {"LC_ALL": "de_DE", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "TZ": "Asia/Kolkata", "PYTHONHASHSEED": "1"},
    ),
)

# A program that asks in Python may have set its locale. The system's own messages are in its language, so not those.
_ANSWER = """
import contextlib, json, locale, sys
from pathlib import Path

for kind in (locale.LC_CTYPE, locale.LC_COLLATE, locale.LC_NUMERIC, locale.LC_MONETARY, locale.LC_TIME):
    with contextlib.suppress(locale.Error):
        locale.setlocale(kind, "")
from benchmarks.answers.asking import PAGE, run, workplace

questions = json.load(sys.stdin)
answered = []
with workplace(Path.cwd(), {}):
    for words, typed in questions:
        answered.append(run(words, typed))
        page = Path(PAGE)
        if page.exists():
            answered[-1] += (page.read_text(encoding="utf-8"),)
            page.unlink()
print(json.dumps(answered))
"""


def questions(pytestconfig: pytest.Config) -> list[tuple[list[str], str]]:
    """Words of command lines, and what is typed into each."""
    number = max(2, pytestconfig.getoption("--cases") // CASES_PER_QUESTION)
    drawn = answers("generator").questions(declared(), number, pytestconfig.getoption("--fuzz-seed"))
    found: list[tuple[list[str], str]] = [(text.split(), "") for text in ALSO]
    for question in islice(drawn, number):
        if question["kind"] == "command":
            typed = "".join(json.dumps(line) + "\n" for line in question.get("lines", ()))
            found.append((question["arguments"], typed))
    Random(1).shuffle(found)
    return found


def answered_in(place: Place, root: Path, asked: list[tuple[list[str], str]]) -> list[Any]:
    """The exit codes and the texts of both streams, from a new process in the place."""
    folder = root / place.folder
    folder.mkdir(parents=True)
    for name in answers("generator").FILES:
        shutil.copy(ROOT / "tests" / "logs" / name, folder)
    done = subprocess.run(
        [sys.executable, "-c", _ANSWER],
        input=json.dumps(asked).encode(), capture_output=True, cwd=folder, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LOCPATH": str(root / "locales"),
             **place.variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    found: list[Any] = json.loads(done.stdout)
    return found


def test_a_place_changes_no_answer(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    if shutil.which("localedef"):  # few machines have the locale
        (tmp_path / "locales").mkdir()
        made = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(tmp_path / "locales" / "de_DE")]
        subprocess.run(made, capture_output=True, check=False)
    asked = questions(pytestconfig)
    here, there = (answered_in(place, tmp_path, asked) for place in PLACES)
    assert len(here) == len(there) == len(asked)
    assert sum(status == 0 for status, *_ in here) > len(here) // 3
    assert [" ".join(words) for (words, _), one, other in zip(asked, here, there) if one != other] == []
