"""Human output of `kvcalc score`: measured and predicted times side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.output.human.calibration import print_calibration, print_factors
from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import count, duration, percent, span, split
from kvcalc.output.human.tables import Table, Text, plain_table

if TYPE_CHECKING:
    from typing import Literal

    import kvcalc.documents as documents

    Others = Literal["uncalibrated_seconds", "left_out_seconds"]

_HEAD = (
    "model", "engine", "gpu", "num_devices", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "file",
)  # fmt: skip
_COLUMNS = (
    ">run", ">tokens", ">at once", "", ">measured", ">predicted", ">80% range", ">error", ">before", ">left out",
    "largest",
)  # fmt: skip
# The columns that only a calibration fills.
_CALIBRATED: tuple[tuple[str, Others], ...] = (("before", "uncalibrated_seconds"), ("left out", "left_out_seconds"))
# The columns that a narrow terminal does not show, the first one first.
_OPTIONAL = ("80% range", "largest", "at once", "run")
_NAMES = {"tpot": "TPOT", "ttft": "TTFT", "kv": "KV cache"}


def render(document: documents.Score, console: Console) -> None:
    """Print a table for each file and setup, what is off in each setup, and the errors of all of them."""
    groups: dict[tuple[Any, ...], list[documents.ScoreRow]] = {}
    for row in document["scores"]:
        groups.setdefault(tuple(value for key, value in row.items() if key in _HEAD), []).append(row)
    for rows in groups.values():
        _print_rows(rows, console)
    for setup in document["setups"]:
        _print_setup(setup, console, names_it=len(document["setups"]) > 1)
    for group in document["summary"]:
        _print_summary(group, console)


def _print_rows(rows: list[documents.ScoreRow], console: Console) -> None:
    first = rows[0]
    device = f"{first['gpu']} x {first['num_devices']}" if first["num_devices"] > 1 else first["gpu"]
    setup = [text for text in (first["engine"], device, split(first)) if text]
    console.print(Text.assemble((first["model"], "bold"), "  ", ", ".join(setup)))
    console.print(f"{first['file']}, a result of {first['tool']}", style="dim")
    console.print()
    console.print(_table(rows, [heading for heading, key in _CALIBRATED if all(row[key] is None for row in rows)]))
    console.print()


def _table(rows: list[documents.ScoreRow], left_out: list[str]) -> Table:
    headings = [heading for heading in _COLUMNS if heading.strip(">") not in left_out]
    table = plain_table(*headings, optional=_OPTIONAL)
    before = None
    for row in rows:
        is_new, before = row["run"] != before, row["run"]
        load = _load(row) if is_new else ("", "", "")
        cells: list[str | Text] = [
            *load,
            _name(row["metric"]),
            duration(row["measured_seconds"]),
            duration(row["predicted_seconds"]),
            span(row["predicted_seconds"], row["low_seconds"], row["high_seconds"]),
            Text(f"{row['error']:+.0%}", style={True: "green", False: "bold red", None: ""}[row["in_range"]]),
            *(_error(row, key) for _, key in _CALIBRATED),
            _name(row["largest_part"]),
        ]
        table.add_row(*(cell for cell, heading in zip(cells, _COLUMNS) if heading in headings))
    return table


def _error(row: documents.ScoreRow, key: Others) -> str:
    """The error of another prediction of the same time."""
    seconds = row[key]
    return "-" if seconds is None else f"{seconds / row['measured_seconds'] - 1:+.0%}"


def _load(row: documents.ScoreRow) -> tuple[str, str, str]:
    """The run, its tokens and its concurrency. A mean concurrency has a ~."""
    tokens = f"{count(row['input_tokens'])}+{count(row['output_tokens'])}"
    return count(row["run"]), tokens, f"{'~' if row['concurrency_is_average'] else ''}{count(row['concurrency'])}"


def _print_setup(setup: documents.ScoreSetup, console: Console, *, names_it: bool) -> None:
    """Print how the predictions were calibrated, or what the runs say is off."""
    name = f" in {setup['model']}, {setup['engine']}, {setup['gpu']} x {setup['num_devices']}" if names_it else ""
    if setup["calibration"] is not None:
        if names_it:
            console.print(name.removeprefix(" in "))
        print_calibration(setup["calibration"], console)
    elif setup["explained"] is not None:
        print_factors(f"what is off{name}", setup["explained"], console)
    else:
        return
    console.print()


def _print_summary(group: documents.ScoreSummaryItem, console: Console) -> None:
    words = [f"mean error {percent(group['mean_error'])}", f"{percent(group['within_a_quarter'])} within 25%"]
    if group["in_range"] is not None:
        words.append(f"{percent(group['in_range'])} in range")
    console.print(Text.assemble((_name(group["metric"]), "bold"), f" of {count(group['times'])}: ", ", ".join(words)))


def _name(key: str) -> str:
    return _NAMES.get(key, key)
