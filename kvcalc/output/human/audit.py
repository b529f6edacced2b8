"""`kvcalc audit` for a person: every number of a log with its verdict."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.console import count, plain_table

_STYLES = {"equal": "green", "unexplained": "bold red", "input": "dim"}


def render(document: dict[str, Any], console: Console) -> None:
    """Print what the log is of, a row for each number, and the sum."""
    engine, workload = document["engine"], document["workload"]
    console.print(Text.assemble((document["model"]["name"], "bold"), "  ", _run(engine, workload)))
    for rule in engine["rules"]:
        console.print(f"  {rule}", style="dim")
    console.print()
    table = plain_table(
        ("line", "right"), ("number", "left"), ("printed", "right"), ("computed", "right"), ("", "left"), ("by", "left")
    )
    for column in table.columns[1:5]:
        column.no_wrap = True
    for row in document["figures"]:
        computed, difference = _value(row["computed"], row["unit"]), row["difference"]
        by = f", by {_value(difference, row['unit'])}" if difference else ""
        verdict = Text(row["verdict"] + by, style=_STYLES[row["verdict"]])
        table.add_row(count(row["line"]), row["name"], row["printed"], computed, verdict, row["rule"])
    console.print(table)
    console.print()
    words = f"{document['equal']} equal, {document['unexplained']} unexplained, {document['inputs']} taken as inputs"
    console.print(words, style="bold red" if document["unexplained"] else "")


def _run(engine: dict[str, Any], workload: dict[str, Any]) -> str:
    version = f" {engine['version']}" if engine["version"] else ""
    parts = [f"{engine['name']}{version}", f"{count(workload['context_tokens'])} tokens", workload["kv_dtype"]]
    if workload["tensor_parallel_size"] > 1:
        parts.append(f"tp {workload['tensor_parallel_size']}")
    return ", ".join(parts)


def _value(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}x" if unit == "x" else count(value)
