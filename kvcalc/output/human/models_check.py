"""`kvcalc models check` for a person."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def render(document: dict[str, Any], console: Console) -> None:
    """Print one line for each file: ok, or what is wrong with it."""
    for row in document["files"]:
        console.print(f"{row['file']}: {'ok' if row['ok'] else row['error']}", soft_wrap=True)
