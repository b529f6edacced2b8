"""Human output of `kvcalc models`, `kvcalc models show` and `kvcalc models check`."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from kvcalc.output.human.console import Console, print_table
from kvcalc.output.human.figures import attention, count, name_engine, rate, size, text
from kvcalc.output.human.tables import Column, Text, plain_table
from kvcalc.output.paths import scalars
from kvcalc.units import format_parameters
from kvcalc.writing.cells import bare

if TYPE_CHECKING:
    import kvcalc.documents as documents

_CAPTION = "per token, fixed: the bytes of the cache that kvcalc estimate MODEL shows"

# Names are there to be copied, so columns are left out before a shorter one is folded.
_LONGEST_NAME = 40


def render(document: documents.Models, console: Console) -> None:
    """Print the list of presets, with a heading for each family. It is one table, so that all columns are aligned."""
    table = plain_table(
        "model",
        "kind",
        ">layers",
        ">weights",
        ">per token",
        ">fixed",
        ">context",
        optional=("kind", "layers", "context", "fixed", "weights"),
    )
    table.comfortable = _LONGEST_NAME
    for family, rows in groupby(document["models"], lambda row: row["family"] or "other"):
        table.add_row(Text(family, "bold"))
        for row in rows:
            name = f" {row['name']}{' *' if row['file'] else ''}"
            sizes = size(row["bytes_per_token"]), size(row["fixed_bytes_per_sequence"])
            kind, longest = attention(row["attention"]), count(row["max_position_embeddings"])
            table.add_row(name, kind, count(row["num_layers"]), size(row["weights_bytes"]), *sizes, longest)
    console.print(table)
    console.print(_CAPTION)
    if any(row["file"] for row in document["models"]):
        console.print("* your own; kvcalc models show NAME shows its file")


def render_fit(document: documents.ModelsFit, console: Console) -> None:
    """Print what all rows have in common, then the models that fit."""
    hardware, engine, tokens = document["hardware"], document["engine"], document["context_tokens"]
    if hardware is None:
        console.print("no model fits")
        return
    common = [f"{hardware['num_devices']} x {hardware['name']}"]
    if engine is not None and engine["version"]:  # not the formula
        common.append(name_engine(engine))
    common += [*([] if tokens is None else [f"{count(tokens)} tokens"]), f"batch {count(document['batch_size'])}"]
    console.print(", ".join(common))
    console.print()
    columns: list[Column] = [
        ("", "name", text),
        (">parameters", "parameters", format_parameters),
        *([("engine", "engine", text)] if engine is None else []),
        ("type", "dtype", text),
        (">weights", "weights_bytes", size),
        (">free", "free_bytes", size),
        (">max context", "max_context_tokens", count),
        (">tok/s", "decode_tokens_per_second", rate),
    ]
    print_table(document["models"], columns, console, ["free_bytes", "parameters"])
    if document["left_out"]:
        console.print(f"{document['left_out']:,} smaller models may fit too: --most N lists more")


def render_show(document: documents.ModelsShow, console: Console) -> None:
    """Print one preset's facts and their source."""
    console.print(Text(document["name"], "bold"))
    if document["family"]:
        console.print(f"family {document['family']}")
    if document["aliases"]:
        console.print(f"also {', '.join(document['aliases'])}")
    # A link must stay on one line, so that it can be copied.
    console.print(f"source {document['source']} ({document['date']})", soft_wrap=True)
    if document["file"]:
        console.print(f"your own, in {document['file']}", soft_wrap=True)
    if document["note"]:
        console.print(document["note"])
    console.print()
    table = plain_table("", "")
    for key, value in scalars(document["config"]):
        table.add_row(key, bare(value))
    console.print(table)


def render_check(document: documents.ModelsCheck, console: Console) -> None:
    """Print one line for each file: ok or its error."""
    for row in document["files"]:
        console.print(f"{row['file']}: {'ok' if row['ok'] else row['error']}", soft_wrap=True)
