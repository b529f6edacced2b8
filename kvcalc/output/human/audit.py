"""Human output of `kvcalc audit`: each number of a log with its verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import count, name_engine
from kvcalc.output.human.tables import Text, plain_table

if TYPE_CHECKING:
    import kvcalc.documents as documents

_STYLES = {"equal": "green", "unexplained": "bold red", "input": "dim"}


def render(document: documents.Audit, console: Console) -> None:
    """Print the model and settings of the log, a row for each number, and the totals."""
    engine, workload = document["engine"], document["workload"]
    run = [name_engine(engine), f"{count(workload['context_tokens'])} tokens", workload["kv_dtype"]]
    if workload["tensor_parallel_size"] > 1:
        run.append(f"tp {workload['tensor_parallel_size']}")
    console.print(Text.assemble((document["model"]["name"], "bold"), "  ", ", ".join(run)))
    for rule in engine["rules"]:
        console.print(f"  {rule}", style="dim")
    console.print()
    table = plain_table(">line", "number", ">printed", ">computed", "", "rule", optional=("rule", "line"))
    for row in document["figures"]:
        computed, difference = _value(row["computed"], row["unit"]), row["difference"]
        by = f", off by {_value(difference, row['unit'])}" if difference else ""
        verdict = Text(row["verdict"] + by, style=_STYLES[row["verdict"]])
        table.add_row(count(row["line"]), row["name"], row["printed"], computed, verdict, row["rule"])
    console.print(table)
    console.print()
    for part in document["parts"]:
        console.print(part["sentence"], style="" if part["sentence"].endswith("as predicted") else "yellow")
    if document["parts"]:
        console.print()
    words = f"{document['equal']} equal, {document['unexplained']} unexplained, {document['inputs']} taken as inputs"
    console.print(words, style="bold red" if document["unexplained"] else "")


def _value(value: Any, unit: str) -> str:
    return f"{value:.2f}x" if unit == "x" and value is not None else count(value)
