"""Many command lines in many environments: streams that are closed, full or not read, odd locales and terminals.

A pair of a command and an environment takes one process, so a run checks a sample: `--pairs N`, or `--pairs 1000` for
all of them.
"""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import ROOT, check_output

LOGS = ROOT / "tests" / "logs"
QUESTION = '{"model": "gpt2", "context": 100000}'
CONFIG = '{"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 8}'

# Every command, in every format, with warnings, refusals and verdicts.
COMMANDS = (
    "estimate llama-3-70b --json", "estimate llama-3-8b --context 1M --get kv_cache.total_bytes",
    "estimate llama-3-8b --context 1M --format human", "estimate gpt2", "estimate gpt2 --format csv", "estimate nope",
    "estimate - --get model.name", "fit llama-3-8b --gpu h100 --format human", "fit llama-3-70b --gpu h100",
    "compare gpt2 llama-3-8b", "compare gpt2 nope --format human", "sweep gpt2 --context 1k..4k --format csv",
    "sweep gpt2 --context 1k..4k --format jsonl",
    "plan llama-3-8b --gpu h100 --input-tokens 1k --output-tokens 100 --concurrency 4", "batch - --format csv",
    "batch - --get kv_cache.total_bytes", f"audit {LOGS}/vllm.log", f"audit {LOGS}/vllm.log --format human",
    f"score {LOGS}/vllm-bench.json --gpu h100", "models", "models show gpt2 --json", "gpus --format human",
    "gpus show h100", "completion bash", "--help", "estimate --engine vllm --help", "--version", "--bogus",
)  # fmt: skip


class Place(NamedTuple):
    """Where a command runs: redirections of the shell, variables, and commands that run before it.

    `reads` says what becomes of the answer: `same` as elsewhere, `other` text (but an answer), or `none`. `fails` is
    whether a missing stdout is an error, and `hears` whether messages arrive.
    """

    redirect: str = ""
    variables: str = ""
    before: str = ""
    reads: str = "same"
    fails: bool = False
    hears: bool = True


PLACES = {
    "plain": Place(),
    "no stderr": Place("2>&-", hears=False),
    "full stderr": Place("2>/dev/full", hears=False),
    "read-only stderr": Place("2</dev/null", hears=False),
    "no stdout": Place(">&-", reads="none", fails=True),
    "full stdout": Place(">/dev/full", reads="none", fails=True),
    "read-only stdout": Place("1</dev/null", reads="none", fails=True),
    "no streams": Place("<&- >&- 2>&-", reads="none", fails=True, hears=False),
    "no stdin": Place("<&-"),
    "no stdin and stderr": Place("<&- 2>&-", hears=False),
    "no stdin and stdout": Place("<&- >&-", reads="none", fails=True),
    "no stdout and stderr": Place(">&- 2>&-", reads="none", fails=True, hears=False),
    "one stream": Place("2>&1", reads="other", hears=False),
    "full streams": Place(">/dev/full 2>/dev/full", reads="none", fails=True, hears=False),
    "no buffers": Place(variables="PYTHONUNBUFFERED=1"),
    "no buffers and stderr": Place("2>&-", "PYTHONUNBUFFERED=1", hears=False),
    "no buffers and stdout": Place(">&-", "PYTHONUNBUFFERED=1", reads="none", fails=True),
    "ascii": Place(variables="PYTHONIOENCODING=ascii PYTHONUTF8=0 LC_ALL=C", reads="other"),
    "latin-1": Place(variables="PYTHONIOENCODING=latin-1", reads="other"),
    "posix": Place(variables="LC_ALL=POSIX PYTHONCOERCECLOCALE=0 PYTHONUTF8=0", reads="other"),
    "dumb": Place(variables="TERM=dumb NO_COLOR=1"),
    "colour": Place(variables="FORCE_COLOR=1 TERM=xterm-256color", reads="other"),
    "one column": Place(variables="COLUMNS=1 LINES=1", reads="other"),
    "no columns": Place(variables="COLUMNS=0", reads="other"),
    "odd columns": Place(variables="COLUMNS=many TERM=", reads="other"),
    "no home": Place(variables="HOME=/nonexistent XDG_CONFIG_HOME= XDG_CACHE_HOME="),
    "no folder": Place(before='mkdir -p "$T/gone" && cd "$T/gone" && rmdir "$T/gone"'),
    "few files": Place(before="ulimit -n 24"),
    "optimised": Place(variables="PYTHONOPTIMIZE=2", reads="other"),
    "warnings are errors": Place(variables="PYTHONWARNINGS=error"),
}  # fmt: skip


class Run(NamedTuple):
    status: int
    out: bytes
    err: str


def run(command: str, place: Place, folder: str) -> Run:
    """One command in a shell, in the place, with a config or a question on stdin."""
    typed = QUESTION if command.startswith("batch") else CONFIG
    words = f"env {place.variables} {shlex.quote(sys.executable)} -m kvcalc {command} {place.redirect}"
    script = f"{place.before or 'true'} && {words}"
    done = subprocess.run(
        ["bash", "-c", script], input=typed.encode(), capture_output=True, timeout=300, check=False,
        env={**os.environ, "T": folder, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return Run(done.returncode, done.stdout, done.stderr.decode(errors="replace"))


@cache
def plain(command: str) -> Run:
    found = run(command, PLACES["plain"], "/tmp")
    check_output(command.split()[0], found.out.decode())
    return found


def sample(config: Any) -> list[tuple[str, str]]:
    pairs = [(command, place) for command in COMMANDS for place in PLACES if place != "plain"]
    return random.Random(config.getoption("--pairs-seed")).sample(pairs, min(len(pairs), config.getoption("--pairs")))


def test_every_pair_ends_with_its_status_and_its_answer(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    wrong = []
    for command, name in sample(pytestconfig):
        place, expected = PLACES[name], plain(command)
        found = run(command, place, str(tmp_path))
        wrong += [f"{name}: kvcalc {command}: {trouble}" for trouble in troubles(command, place, expected, found)]
    assert not wrong, "\n".join(wrong)


def troubles(command: str, place: Place, expected: Run, found: Run) -> list[str]:
    """What is wrong with a run, compared with the same command in a plain place."""
    reads_stdin = command.startswith(("estimate - ", "batch"))
    said = []
    for word in ("Traceback", "internal error", "Exception ignored"):
        if word in found.err or word.encode() in found.out:
            said.append(f"{word}: {found.err[-300:]}")
    if "<&-" in place.redirect and reads_stdin:
        return said + ([] if found.status in (1, 2) else [f"status {found.status} without stdin"])
    status = expected.status
    if place.fails and expected.out and status == 0:
        status = 1
    if found.status != status and not (place.fails and found.status == 1 and expected.out):
        said.append(f"status {found.status}, not {status}: {found.err[-200:]}")
    if place.reads == "same" and found.out != expected.out:
        said.append(f"another answer: {found.out[:200]!r}")
    if place.reads == "other" and bool(found.out) != bool(expected.out or place.redirect == "2>&1"):
        said.append("no answer")
    if place.hears and not place.fails and place.reads == "same" and found.err != expected.err:
        said.append(f"other messages: {found.err[:300]}")
    return said
