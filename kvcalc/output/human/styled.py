"""Text with styles, and how many columns of a terminal it takes."""

from __future__ import annotations

from typing import Union
from unicodedata import combining, east_asian_width


class Text(str):
    """A text whose parts have styles: words such as `bold`, `dim` and `green`, or none."""

    parts: tuple[tuple[str, str], ...]

    def __new__(cls, text: str = "", style: str = "") -> Text:
        return cls.assemble((text, style))

    @classmethod
    def assemble(cls, *parts: Union[str, tuple[str, str]]) -> Text:
        """The text of all parts, one after the other."""
        pairs = tuple((part, "") if isinstance(part, str) else part for part in parts)
        found = str.__new__(cls, "".join(text for text, _ in pairs))
        found.parts = pairs
        return found


def cell_len(text: str) -> int:
    """The columns that a line takes: two for a wide character, none for an accent on the one before."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(one) else 2 if east_asian_width(one) in "WF" else 1 for one in text)
