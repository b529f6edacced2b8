"""`kvcalc models` for a person."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kvcalc.output.human.console import count, plain_table, size


def render(document: dict[str, Any], console: Console) -> None:
    """Print the list of presets."""
    table = plain_table(
        ("model", "left"),
        ("attention", "left"),
        ("layers", "right"),
        ("KV heads", "right"),
        ("KV/token, 16 bit", "right"),
        ("max context", "right"),
    )
    for row in document["models"]:
        window = f", window {count(row['sliding_window'])}" if row["sliding_window"] else ""
        table.add_row(
            row["name"],
            row["attention"].upper() + window,
            count(row["num_layers"]),
            count(row["num_kv_heads"]),
            size(row["bytes_per_token_16_bit"]),
            count(row["max_position_embeddings"]),
        )
    console.print(table)
