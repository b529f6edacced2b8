"""A remark is said once, by the fewest words that tell its rows from the others."""

from __future__ import annotations

from collections.abc import Sequence

from kvcalc.notes import Note
from kvcalc.planning.answers.grouped_notes import RowNote, group_notes, name_rows
from kvcalc.throughput.hardware import find_gpu

ROWS = [(engine, gpu) for engine in ("vllm", "sglang") for gpu in ("l40s", "h100-sxm", "mi300x")]


def said(rows: Sequence[tuple[str, ...]], text: str, *, by_device: bool = False) -> list[str]:
    notes = [
        RowNote(row, Note("fit", "x", text.replace("GPU", row[1])), find_gpu(row[1]) if by_device else None)
        for row in rows
    ]
    return [note.text for note in group_notes(notes, ROWS)]


def test_a_remark_about_all_rows_names_none() -> None:
    assert said(ROWS, "true") == ["true"]


def test_the_fewest_words_that_tell_rows_apart() -> None:
    assert said(ROWS[:3], "true") == ["vllm: true"]
    assert said([ROWS[0], ROWS[3]], "true") == ["l40s: true"]
    assert said([ROWS[0], ROWS[1], ROWS[3], ROWS[4]], "true") == ["l40s, h100-sxm: true"]
    assert said([ROWS[1]], "true") == ["vllm h100-sxm: true"]
    assert name_rows([("a", "")], [("a", ""), ("b", "")]) == ["a"]


def test_remarks_that_differ_in_the_device_are_one() -> None:
    assert said(ROWS, "not for GPU", by_device=True) == ["not for l40s, h100-sxm, mi300x"]
    assert said(ROWS[:2], "not for GPU", by_device=True) == ["vllm: not for l40s, h100-sxm"]
    assert said([*ROWS[:2], *ROWS[3:5]], "not for GPU", by_device=True) == ["not for l40s, h100-sxm"]
    assert said([ROWS[0], ROWS[4]], "not for GPU", by_device=True) == ["vllm: not for l40s", "sglang: not for h100-sxm"]


def test_a_line_names_a_few_rows_and_counts_the_others() -> None:
    rows = [(str(number), "a") for number in range(20)]
    notes = [RowNote(row, Note("fit", "x", "true")) for row in rows[:10]]
    (note,) = group_notes(notes, rows)
    assert note.text == "0, 1, 2, 3, 4, 5 and 4 more: true"
