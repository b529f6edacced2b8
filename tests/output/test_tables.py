"""Tables fit the terminal: names are folded, and what is left out is said."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.output.human.console import Console, print_table
from kvcalc.output.human.figures import span, text
from kvcalc.output.human.tables import Text, cell_len, fold, plain_table
from kvcalc.output.wrapping import wrapped


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


def printed(width: int, optional: tuple[str, ...] = ("a",)) -> list[str]:
    rows = [{"name": "organization/long-model-name", "a": "1" * 10, "b": "2" * 10}]
    with redirect_stdout(io.StringIO()) as file:
        print_table(
            rows, [("model", "name", text), (">first", "a", text), (">second", "b", text)], Console(width), optional
        )
    return file.getvalue().splitlines()


def test_columns_are_left_out_before_a_name_is_cut() -> None:
    assert len(printed(80)) == 2
    # Names that are still easy to read make room first.
    folded = printed(48)
    assert (len(folded), folded[1].split()[0], folded[2].split()[0]) == (3, "organization/long-model-", "name")
    narrow = printed(40)
    assert "first" not in narrow[0]
    assert narrow[-1] == "not shown at 40 columns: first"
    assert printed(40, ())[-1] == "not shown at 40 columns: second"
    for width in range(27, 80):
        lines = printed(width)
        assert max(map(len, lines)) <= width
        assert (
            "".join(line.split()[0] for line in takewhile(lambda line: not line.startswith("not shown"), lines[1:]))
            == "organization/long-model-name"
        )


@given(st.text("abc 12.%GiB-(),", max_size=200), st.integers(20, 80))
def test_lines_break_between_words(line: str, width: int) -> None:
    lines = wrapped(line, width)
    assert " ".join(" ".join(lines).split()) == " ".join(line.split())
    assert all(len(each) <= width or " " not in each.strip() or "\xa0" not in each for each in lines)


def test_a_number_keeps_its_unit() -> None:
    line = "only 26.88 GiB is left of 16 x h100-sxm: 19.7 ms, 97 %"
    for width in range(16, 60):
        joined = "\n".join(wrapped(line, width))
        for kept in ("26.88 GiB", "16 x h100-sxm", "19.7 ms", "97 %"):
            assert kept in joined


@given(st.lists(st.text("abcd 表é\u0301", max_size=30), min_size=1, max_size=5), st.integers(40, 80))
def test_columns_are_aligned_by_what_a_terminal_shows(names: list[str], width: int) -> None:
    rows = [{"name": name.strip() or "x", "n": place} for place, name in enumerate(names)]
    with redirect_stdout(io.StringIO()) as file:
        print_table(rows, [("name", "name", text), (">n", "n", str)], Console(width))
    ends = {cell_len(line) for line in file.getvalue().splitlines() if line and line[-1].isdigit()}
    assert len(ends) == 1


def test_a_terminal_shows_styles_only_where_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console as Rich

    out = io.StringIO()
    console = Console(30, Rich(file=out, force_terminal=True, width=30, color_system="standard", highlight=False))
    console.print(Text.assemble(("fits", "bold green"), ": 35.32 GiB per device for the KV cache of it"))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("\x1b[1;32mfits\x1b[0m: 35.32 GiB")
    assert "\x1b" not in lines[1]
    table = plain_table("name", ">error")
    table.add_row("a", Text("+30%", "bold red"))
    table.add_row("b", "+1%", style="dim")
    console.print(table)
    heading, first, second = out.getvalue().splitlines()[2:]
    assert heading.startswith("\x1b[1mname")
    assert first == "a      \x1b[1;31m+30%\x1b[0m"
    assert second.startswith("\x1b[2mb")
