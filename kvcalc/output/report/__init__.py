"""A report: one HTML page without scripts, made from a document alone. It needs no network and no other file.

`kvcalc.output.report.answers` says what each kind of document shows, `charts` draws, and `page` makes the HTML.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.output.report.answers import answer_of
from kvcalc.output.report.page import make_page

__all__ = ["make_report"]


def make_report(document: Mapping[str, Any], kind: str, command: str) -> str:
    """The HTML page of a document. `kind` is its name in the schema, and `command` the line that repeats it.

    Equal documents give equal pages: a page has no date.
    """
    return make_page(answer_of(document, kind), kind, command)
