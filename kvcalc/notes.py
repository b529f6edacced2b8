"""Notes: the remarks an answer gives along with its figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    import kvcalc.documents as documents

BAD_ROWS = "bad-rows"
"""The code of the warning about rows of a trace that cannot be read. The exit code is then 1."""

# Notes that say that figures are missing, doubtful or of something else than was asked. Every other note says what was
# assumed, or explains a figure.
_WARNINGS = frozenset(
    "unknown refused left-out bad-rows without-answer does-not-fit does-not-fit-host tight host-not-checked "
    "tower-not-counted modules-not-counted not-fitted disaggregated-not-fitted nearly-full preemptions "
    "other-attention type-not-modelled start-limit incomplete-files contradiction other-device other-engine "
    "other-model records-differ not-shared command separate-instance".split()
)

# The text of a note about one of these parts does not name the part, so it is printed in front.
_NAMED_PARTS = ("weights", "throughput")


class Note(NamedTuple):
    """A remark: the part of the document it is about, a short code that programs can test, and a sentence.

    `code` is `unknown` if the part is null because a fact is missing.
    """

    part: str
    code: str
    text: str

    def __str__(self) -> str:
        """Return the remark as stderr prints it."""
        if self.part in _NAMED_PARTS or self.code == "unknown":
            return f"{self.part}: {self.text}"
        return self.text


def describe_notes(notes: Iterable[Note]) -> list[documents.Warning]:
    """Return the `warnings` of a document, with each note once."""
    return [{"part": part, "code": code, "text": text} for part, code, text in dict.fromkeys(notes)]


def is_warning(note: documents.Warning) -> bool:
    """Whether an item of a document's `warnings` is a warning. The others are notes."""
    return note["code"] in _WARNINGS or (note["part"], note["code"]) == ("workload", "beyond-model")


def sentence(warning: documents.Warning) -> str:
    """Return a warning of a document as stderr prints it."""
    return str(Note(**warning))
