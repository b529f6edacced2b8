"""`kvcalc models` for a person."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.console import count, plain_table, size

_CAPTION = "KV/token: what a token adds at 16 bit, windows not full; compressed: the mean"


def render(document: dict[str, Any], console: Console) -> None:
    """Print the list of presets, a heading for each family. One table, so that columns stand under each other."""
    table = plain_table(
        ("model", "left"),
        ("attention", "left"),
        ("layers", "right"),
        ("KV/token", "right"),
        ("window", "right"),
        ("context", "right"),
    )
    for family, rows in groupby(document["models"], lambda row: row["family"] or "other"):
        table.add_row(Text(family, "bold"))
        for row in rows:
            table.add_row(
                f"  {row['name']}{' *' if row['file'] else ''}",
                row["attention"] if row["attention"] in ("hybrid", "none") else row["attention"].upper(),
                count(row["num_layers"]),
                size(row["bytes_per_token_16_bit"]),
                count(row["sliding_window"]),
                count(row["max_position_embeddings"]),
            )
    console.print(table)
    console.print(_CAPTION)
    if any(row["file"] for row in document["models"]):
        console.print("* your own; kvcalc models show NAME says where it lies")
