"""Where the facts of an estimate or a fit come from: its sources, and the logs behind the estimated memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console, print_table
from kvcalc.output.human.figures import count, name_engine, size, text
from kvcalc.output.human.styled import Text
from kvcalc.output.human.tables import Column, plain_table

if TYPE_CHECKING:
    import kvcalc.documents as documents

_LOGS: tuple[Column, ...] = (
    ("log", "model", text), ("release", "release", text), ("device", "device", text),
    (">reserved", "reserved_bytes", size), (">estimate", "estimated_bytes", size),
    (">error", "error", lambda error: f"{100 * error:+.1f} %"), ("source", "source", text),
)  # fmt: skip


def print_sources(sources: documents.Sources, engine: Mapping[str, Any], console: Console) -> None:
    """Print the files and the publications that the facts are from."""
    console.print(Text("where the facts come from", "bold"))
    model, rules, device = sources["model"], sources["engine"], sources["device"]
    _print("model", _published(model), console)
    for heading, is_default in (("config", False), ("defaults of its class", True)):
        if keys := [f"{row['key']} {row['value']}" for row in model["config"] if row["is_default"] == is_default]:
            _print(heading, ", ".join(keys), console)
    if rules is not None:
        _print("engine", f"{name_engine(engine)}, counted by rules read in {rules['release']}", console)
        for name in ("cache", "reserve", "defaults"):
            if (files := rules[name]) is not None:
                _print(name, files, console)
    if device is not None:
        _print("device", _published(device), console)


def _print(name: str, value: str, console: Console) -> None:
    console.print(f"  {name}: {value}")


def _published(source: Any) -> str:
    date = f" ({source['date']})" if source["date"] else ""
    return ", from ".join(filter(None, (source["file"], f"{source['source']}{date}")))


def print_reserve(document: Mapping[str, Any], console: Console) -> None:
    """Print what is exact and estimated in a device's memory, and the logs that test the estimates."""
    console.print()
    table = plain_table("one device", ">bytes", "", ">80 % from", ">to")
    for line in document["fit"]["lines"] or ():
        # The engine's settings determine some parts of the reserve.
        is_exact = not line["estimated"] or line["low_bytes"] == line["high_bytes"] is not None
        ends = ["" if is_exact else size(line[f"{end}_bytes"]) for end in ("low", "high")]
        table.add_row(f"  {line['name']}", count(line["bytes"]), "exact" if is_exact else "estimated", *ends)
    console.print(table)
    found: documents.SourcesReserve | None = document["sources"]["reserve"]
    if found is None:
        return
    console.print(
        f"\n  the range is {found['low_factor']:g} to {found['high_factor']:g} times the estimate; "
        f"{found['within_range']} of {found['num_tested']} logs were in it with their model family left out"
    )
    median, most = (f"{100 * found[key]:.1f} %" for key in ("median_error", "largest_error"))
    console.print(f"  error, as a share of the device: median {median}, largest {most}\n")
    tested = [log for log in found["logs"] if not log["sets_constant"]]
    print_table(tested, _LOGS, console, ("estimated_bytes", "reserved_bytes", "source"))
    if others := len(found["logs"]) - len(tested):
        console.print(f"  {others} more logs set the constants: --json lists them")
