"""The error for an unknown option says what to type, also for the options of other tools."""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc.cli.other_names import choices as choices_of
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("command", "option", "hint"),
    [
        ("plan", "--isl", "use --input-tokens"),
        ("plan", "--osl", "use --output-tokens"),
        ("plan", "--request-rate", "use --requests-per-second"),
        ("plan", "--batch-size", "use --concurrency"),
        ("estimate", "--batch-size", "use --batch"),
        ("estimate", "--seq_len", "use --context"),
        ("plan", "--seq-len", "use --input-tokens"),
        ("fit", "--nodes", "use --gpu h100x16 (two machines)"),
        ("estimate", "--model", "use MODEL without an option"),
        ("plan", "--max-tft", "did you mean --max-ttft"),
    ],
)
def test_an_option_of_another_tool(kvcalc: Any, command: str, option: str, hint: str) -> None:
    found = kvcalc(command, "llama-3-8b", option, "8")
    assert (found.status, found.out) == (2, "")
    first, second = found.err.splitlines()
    assert first == f"kvcalc: No such option: {option}"
    assert second.startswith(f"  {hint}")
    assert second.endswith(f"(kvcalc {command} --help lists all)")


def test_an_option_that_is_like_no_other(kvcalc: Any) -> None:
    found = kvcalc("estimate", "llama-3-8b", "--zzzzzz")
    assert found.err == "kvcalc: No such option: --zzzzzz\n  see: kvcalc estimate --help\n"
    assert kvcalc("--vrsion").err.splitlines()[1] == "  did you mean --version? (kvcalc --help lists all)"


def test_each_name_leads_to_an_option_that_exists(kvcalc: Any) -> None:
    """Each first choice is an option of some command, and no name is itself one of `estimate`."""
    declared = (ROOT / "kvcalc" / "question" / "fields.yaml").read_text() + kvcalc("estimate", "--help").out
    for name, choices in choices_of().items():
        for choice in choices:
            option = choice.split()[0]
            assert option == "MODEL" or f"{option} " in declared or f"{option}," in declared, choice
        assert f"--{name} " not in kvcalc("estimate", "--help").out
