"""Notes: the remarks an answer gives along with its figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    import kvcalc.documents as documents

BAD_ROWS = "bad-rows"
"""The code of the warning about rows of a trace that cannot be read. The exit code is then 1."""

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


def sentence(warning: documents.Warning) -> str:
    """Return a warning of a document as stderr prints it."""
    return str(Note(**warning))
