"""`kvcalc models show` for a person."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.console import plain_table
from kvcalc.output.paths import bare, scalars


def render(document: dict[str, Any], console: Console) -> None:
    """Print one preset's facts and their source."""
    console.print(Text(document["name"], "bold"))
    if document["family"]:
        console.print(f"family {document['family']}")
    if document["aliases"]:
        console.print(f"also {', '.join(document['aliases'])}")
    # A link is for copying: never broken over lines.
    console.print(f"source {document['source']} ({document['date']})", soft_wrap=True)
    if document["file"]:
        console.print(f"your own, in {document['file']}", soft_wrap=True)
    if document["note"]:
        console.print(document["note"])
    console.print()
    table = plain_table(("", "left"), ("", "left"))
    table.show_header = False
    for key, value in scalars(document["config"]):
        table.add_row(key, bare(value))
    console.print(table)
