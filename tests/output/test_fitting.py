"""Tables fit the terminal: names are folded, and what is left out is said."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvcalc.output.human.console import text
from kvcalc.output.human.fitting import fold, print_table, span


@given(st.text("abc/-_.", min_size=1, max_size=60), st.integers(4, 20))
def test_folding_loses_nothing(name: str, width: int) -> None:
    lines = fold(name, width).split("\n")
    assert "".join(lines) == name
    assert all(0 < len(line) <= width for line in lines)


def test_a_name_is_broken_after_a_separator() -> None:
    assert fold("Qwen/Qwen2.5-72B-Instruct", 14) == "Qwen/Qwen2.5-\n72B-Instruct"
    assert fold("short", 14) == "short"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0391, 0.0547, "39.1-54.7 ms"), (0.9, 1.2, "900 ms-1.2 s"), (None, None, "-"), (1.5, 2.0, "1.5-2 s")],
)
def test_a_range_has_its_unit_once(low: float | None, high: float | None, expected: str) -> None:
    assert span(low, low, high) == expected
    assert span(1.0, None, None) == "unknown"


def printed(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    rows = [{"name": "organization/model-name", "a": "1" * 10, "b": "2" * 10}]
    print_table(rows, [("model", "name", text), (">first", "a", text), (">second", "b", text)], console, ["a"])
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def test_columns_are_left_out_after_names_are_folded() -> None:
    assert len(printed(80)) == 2
    folded = printed(40)
    assert (len(folded), folded[1].split()[0], folded[2].split()[0]) == (3, "organization/", "model-name")
    narrow = printed(30)
    assert "first" not in narrow[0]
    assert narrow[-1] == "not shown at 30 columns: first"
    assert max(map(len, narrow)) <= 30
