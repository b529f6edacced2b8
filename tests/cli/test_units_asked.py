"""Numbers without a unit are refused in every command that takes a size, a rate or a time."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import typer

PLAN = ("plan", "llama-3-8b", "--input-tokens", "1k", "--output-tokens", "100", "--concurrency", "8")
ASKED = {
    "estimate": ("estimate", "llama-3-8b"), "fit": ("fit", "llama-3-8b"), "compare": ("compare", "llama-3-8b"),
    "sweep": ("sweep", "llama-3-8b"), "plan": PLAN,
    "measure": ("measure", "gpt2", "--until-full", "context"),
}  # fmt: skip
# Option -> the other words of the command, a value, and its likely spelling.
VALUES = {
    "--kv-memory": ((), "80", "80GiB"),
    "--weights-memory": ((), "80", "80GiB"),
    "--gpu-memory": ((), "80", "80GiB"),
    "--memory": ((), "80", "80GiB"),
    "--gpu-bandwidth": (("--gpu", "h100"), "3350", "3.35TB/s"),
    "--flops": (("--gpu", "h100"), "989", "989T"),
    "--host-memory": (("--gpu", "h100", "--engine", "llama.cpp"), "80", "80GiB"),
    "--host-bandwidth": (("--gpu", "h100", "--engine", "llama.cpp"), "80", "80GB/s"),
    "--max-tpot": ((), "30", "30ms or 30s"),
    "--max-ttft": ((), "1", "1ms or 1s"),
    "--deadline": ((), "8", "8ms or 8s"),
    "--think-time": ((), "30", "30ms or 30s"),
}


def options_with_units() -> list[tuple[str, str]]:
    """Every pair of a command and one of its options that take a size, a rate or a time."""
    found = []
    for command in ASKED:
        app = import_module(f"kvcalc.cli.{command}").app
        for parameter in typer.main.get_command(app).params:
            if parameter.metavar in ("SIZE", "RATE", "TIME"):
                found.append((command, parameter.opts[0]))
    return found


@pytest.mark.parametrize(("command", "option"), options_with_units())
def test_a_number_without_its_unit_is_refused(kvcalc: Any, command: str, option: str) -> None:
    beside, value, likely = VALUES[option]
    result = kvcalc(*ASKED[command], *beside, option, value)
    assert (result.status, result.out) == (2, "")
    first, hint = result.err.splitlines()
    assert first.startswith(f"kvcalc: {option} {value}: ")
    assert first.endswith(" needs a unit")
    assert hint == f"  did you mean {likely}?"


def test_a_large_number_is_bytes_and_0_is_0(kvcalc: Any) -> None:
    path = ("--get", "fit.kv_cache_memory_bytes")
    assert kvcalc("estimate", "llama-3-8b", "--kv-memory", "85899345920", *path).out == "85899345920\n"
    nothing = kvcalc("estimate", "llama-3-8b", "--kv-memory", "0", "--check", "--json")
    assert nothing.status == 4
    assert nothing.json["fit"]["max_batch_size"] == 0
    assert kvcalc("fit", "llama-3-8b", "--gpu", "h100", "--gpu-bandwidth", "3350000000000").status == 0
