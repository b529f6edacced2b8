"""Plans and checks that simulate for long show on a terminal how far they are."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from typing import Any

import pytest

from kvcalc.cli import counting_bar

SIZES = ("--input-tokens", "500", "--output-tokens", "50", "--max-ttft", "1s@p99", "--requests", "300")


def test_runs_are_counted_together() -> None:
    seen: list[int] = []
    count = counting_bar.of_all_runs(lambda done, of=0: seen.append(done))
    assert count is not None
    for done in (1, 5, 2, 4, 4, 1):
        count(done, 10)
    assert seen == [1, 5, 7, 9, 9, 10]
    assert counting_bar.of_all_runs(None) is None


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "llama-3.1-8b", "--gpu", "h100", "--requests-per-second", "20", *SIZES),
        ("check", "vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100", *SIZES[:-2]),
    ],
)
def test_a_long_simulation_shows_its_progress_on_a_terminal(command: tuple[str, ...]) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", "from kvcalc.cli import counting_bar; counting_bar._AFTER_SECONDS = 0.0\n"
             "import sys; from kvcalc.cli.app import run; sys.exit(run(sys.argv[1:]))", *command, "--json"]  # fmt: skip
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 1 << 16):
                said += piece
        except OSError:  # the other end is closed
            pass
        assert process.stdout is not None
        document = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    assert b"simulated requests" in said
    assert document.startswith(b"{")


def test_off_a_terminal_nothing_is_shown(kvcalc: Any) -> None:
    found = kvcalc("plan", "llama-3.1-8b", "--gpu", "h100", "--requests-per-second", "5", *SIZES, "--json")
    assert "simulated requests" not in found.err
