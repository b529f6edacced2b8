"""`kvcalc models NAME` and `kvcalc gpus NAME`: the same as with `show`."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(("group", "name"), [("models", "llama-3-70b"), ("models", "GPT2"), ("gpus", "h100")])
def test_a_name_is_shown(kvcalc: Any, group: str, name: str) -> None:
    for words in ((), ("--json",), ("--get", "name"), ("--format", "csv")):
        shown = kvcalc(group, "show", name, *words)
        assert shown.status == 0
        assert kvcalc(group, name, *words) == shown
        # Options may also come before the name. They apply to the subcommand that runs.
        assert kvcalc(group, *words, name) == shown
        assert kvcalc(group, *words, "show", name) == shown


def test_without_a_name_all_are_listed(kvcalc: Any) -> None:
    assert len(kvcalc("models", "--json").json["models"]) > 50
    assert len(kvcalc("gpus", "--json").json["gpus"]) > 50
    assert {row["family"] for row in kvcalc("models", "--family", "gemma", "--json").json["models"]} == {"Gemma"}


@pytest.mark.parametrize(
    ("words", "status", "hint"),
    [
        (("models", "llama-3-70x"), 3, "did you mean llama-3-70b"),
        (("models", "show", "llama-3-70"), 3, "did you mean llama-3-70b"),
        (("gpus", "h10"), 3, "did you mean h100"),
        (("gpus", "h100", "h200"), 2, "kvcalc gpus --help"),
        (("models", "gemma-2b", "--get", "num_hidden_layers"), 2, "config.num_hidden_layers"),
    ],
)
def test_what_is_wrong_is_said(kvcalc: Any, words: tuple[str, ...], status: int, hint: str) -> None:
    result = kvcalc(*words)
    assert (result.status, result.out) == (status, "")
    assert hint in result.err
    assert len(result.err.splitlines()) == 2
