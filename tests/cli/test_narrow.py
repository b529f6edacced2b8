"""Screens in narrow terminals, filters of lists, and the progress of long runs."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import Any

import pytest

from tests.cli.test_process import run_on_terminal

ON = ("--gpu", "h100x4", "--engine", "vllm")
SCREENS = (
    ("estimate", "llama-3-70b", "--context", "8k"),
    ("estimate", "gemma-3-27b", *ON, "--input-tokens", "2k", "--output-tokens", "500"),
    ("estimate", "gpt-oss-120b", "--engine", "all"),
    ("estimate", "llama-3.1-8b", *ON, "--context", "32k", "--prefix-tokens", "8000", "--offload", "cpu=200GiB"),
    ("estimate", "deepseek-v3", "--gpu", "h200x8", "--speculative", "mtp:3", "--acceptance-length", "2.4"),
    ("fit", "llama-3-70b", *ON), ("fit", "llama-3-70b", "--gpu", "h100"),
    ("check", "vllm", "serve", "Qwen/Qwen3-8B", "--gpu", "l40s"),
    ("compare", "llama-3-70b", "deepseek-v3", "nemotron-3-super-120b-a12b"),
    ("compare", "llama-3.3-70b", "qwen3-32b", "--gpu", "h100x4,h200x2", "--context", "32k"),
    ("sweep", "llama-3.1-8b", "--context", "8k..128k", "--batch", "1,8", "--gpu", "l40s,h100"),
    ("plan", "llama-3-70b", "--input-tokens", "7k", "--output-tokens", "1k", "--concurrency", "64", "--gpu",
     "h100,h200,l40s"),
    ("plan", "gpt-oss-120b", "--input-tokens", "2k", "--output-tokens", "500", "--concurrency", "100", "--price",
     "h100=2.5", "--price", "l40s=0.9"),
    ("simulate", "llama-3.1-8b", "--gpu", "h100", "--concurrency", "4", "--requests", "20", "--input-tokens", "1000",
     "--output-tokens", "50", "--max-ttft", "1s"),
    ("prefix", "docs/start/agents.jsonl"), ("audit", "tests/logs/vllm.log"),
    ("score", "tests/logs/vllm-bench.json", "--gpu", "h100"), ("models",), ("gpus",), ("gpus", "h100"),
)  # fmt: skip
# What cannot be broken: commands to copy.
_WHOLE = re.compile(r"^(?:start)? +(?:vllm|--)|^source https")


@pytest.mark.parametrize("words", SCREENS, ids=" ".join)
@pytest.mark.parametrize("columns", [50, 80])
def test_a_screen_fits_and_keeps_its_names(
    kvcalc: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    wide = kvcalc(*words, "--format", "human")
    shown = wide.out
    lines = [line for line in shown.splitlines() if not _WHOLE.match(line)]
    assert max(map(len, lines)) <= columns
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    # Numbers stay beside their units.
    assert not re.search(r"\d$\n\s*(?:[KMGT]i?B|ms|us|s|%)\b", shown, re.MULTILINE)


def test_names_are_whole_in_narrow_lists(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    for command in ("models", "gpus"):
        names = [row["name"] for row in kvcalc(command, "--json").json[command]]
        assert set(names) <= set(kvcalc(command, "--format", "human").out.split())


def test_a_narrow_screen_keeps_what_was_asked_for(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a log and the factors stay, and what explains them goes first."""
    monkeypatch.setenv("COLUMNS", "50")
    log = kvcalc("audit", "tests/logs/vllm.log", "--format", "human").out
    assert re.search(r"number +printed +computed\n", log)
    assert re.search(r"kv_cache_tokens +432,512 +432,512 +equal\n", log)
    assert "not shown at 50 columns: rule" in log
    score = kvcalc("score", "tests/logs/vllm-bench.json", "--gpu", "h100", "--format", "human").out
    assert re.search(r"  reading +x\d\.\d\d  reading weights", score)


def test_warnings_wrap_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = run_on_terminal("estimate", "llama-3-70b", "--context", "9000", env={"TERM": "dumb", "COLUMNS": "60"})
    lines = text.replace("\r", "").splitlines()
    warning = next(place for place, line in enumerate(lines) if line.startswith("warning: "))
    assert max(map(len, lines)) <= 60
    assert lines[warning + 1].startswith("  ")


def test_gpus_has_filters(kvcalc: Any) -> None:
    rows = kvcalc("gpus", "--vendor", "amd", "--min-memory", "100GiB", "--json").json["gpus"]
    assert rows
    assert all(row["vendor"] == "AMD" and row["memory_bytes"] >= 100 * 2**30 for row in rows)
    wrong = kvcalc("gpus", "--vendor", "NVIDA")
    assert (wrong.status, wrong.err) == (2, "kvcalc: --vendor 'NVIDA': no such vendor\n  did you mean NVIDIA?\n")
    assert kvcalc("gpus", "--min-memory", "9TiB").status == 2


SLOW = {
    "plan": ("plan", "llama-3.1-8b", "--gpu", "h100", "--input-tokens", "500", "--output-tokens", "20",
             "--requests-per-second", "2", "--max-ttft", "5s@p99"),
    "simulate": ("simulate", "llama-3.1-8b", "--gpu", "h100", "--input-tokens", "500", "--output-tokens", "20",
                 "--concurrency", "4", "--requests", "2000"),
    "check": ("check", "vllm", "serve", "Qwen/Qwen3-8B", "--gpu", "l40s", "--input-tokens", "500", "--output-tokens",
              "20", "--max-ttft", "5s@p99"),
    "prefix": ("prefix", "docs/start/agents.jsonl"),
    "score": ("score", "tests/logs/vllm-bench.json", "--gpu", "h100"),
}  # fmt: skip


@pytest.mark.parametrize("command", SLOW)
def test_long_runs_show_their_progress(kvcalc: Any, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr("kvcalc.planning.prefix.rows._REPORT", 1)
    monkeypatch.setattr("kvcalc.cli.counting_bar._AFTER_SECONDS", 0)
    monkeypatch.setattr("kvcalc.cli.counting_bar._EVERY_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", shown)
    assert kvcalc(*SLOW[command], "--json").status == 0
    assert re.search(r"\r\[?.*\d (?:simulated )?(?:requests|runs)", shown.getvalue())
    if command != "score":
        assert re.search(r"\d/s", shown.getvalue()), "its rate"
        assert "requests" in shown.getvalue()
    if command == "simulate":
        assert " s left" in shown.getvalue()
    # At the end the line is blank.
    assert not shown.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() or os.name == "nt"


@pytest.mark.parametrize("columns", [50, 80, 160])
def test_the_screens_of_a_newcomer_are_the_golden_ones(columns: int) -> None:
    from tests import newcomer

    assert newcomer.path_of(columns).read_text() == newcomer.golden(columns), "python -m tests.newcomer --write"


def test_the_first_screens_of_a_newcomer_are_the_golden_ones() -> None:
    from tests import newcomer

    assert len(newcomer.FIRST) == 40
    assert (newcomer.FOLDER / "first.txt").read_text() == newcomer.first(), "python -m tests.newcomer --write"
