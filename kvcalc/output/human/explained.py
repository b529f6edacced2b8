"""The lines of `--explain`: the sources of each figure, its numbers, and the logs behind estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console, print_table
from kvcalc.output.human.figures import count, duration, name_engine, percent, size, text
from kvcalc.output.human.tables import Column, Text, plain_table
from kvcalc.units import format_parameters

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
    reserve: documents.SourcesReserve | None = document["sources"]["reserve"]
    if reserve is None:
        return
    console.print(
        f"\n  the range is {reserve['low_factor']:g} to {reserve['high_factor']:g} times the estimate; "
        f"{reserve['within_range']} of {reserve['num_tested']} logs were in it with their model family left out"
    )
    median, most = (f"{100 * reserve[key]:.1f} %" for key in ("median_error", "largest_error"))
    console.print(f"  error, as a share of the device: median {median}, largest {most}\n")
    tested = [log for log in reserve["logs"] if not log["sets_constant"]]
    print_table(tested, _LOGS, console, ("estimated_bytes", "reserved_bytes", "source"))
    if others := len(reserve["logs"]) - len(tested):
        console.print(f"  {others} more logs set the constants: --json lists them")


def print_explained(document: Mapping[str, Any], console: Console) -> None:
    """Print the formulas of the cache and the weights, what is exact and estimated, and the evidence of the speed."""
    cache, weights = document["kv_cache"], document["weights"]
    print_sources(document["sources"], document["engine"], console)
    console.print()
    for row in cache["formulas"]:
        console.print(f"  cache of {count(row['num_layers'])} layers = {row['symbols']}")
        console.print(f"    = {row['numbers']} = {count(row['bytes'])} bytes, exact")
    if cache["total_bytes"] != cache["stored_bytes"]:
        more = cache["total_bytes"] - cache["stored_bytes"]
        console.print(f"  {document['engine']['name']} allocates {size(cache['total_bytes'])}: {size(abs(more))} "
                      f"{'more' if more > 0 else 'less'} than is stored, exact")  # fmt: skip
    if weights["bytes"] is not None and weights["parameters"]:
        bits = f"{8 * weights['bytes'] / weights['parameters']:.2f} bits each with scales"
        parameters = format_parameters(weights["parameters"])
        console.print(f"  weights = {parameters} parameters, {bits} = {count(weights['bytes'])} bytes, exact")
    if document["fit"] is not None and document["fit"]["lines"]:
        print_reserve(document, console)
    if document["throughput"] is not None:
        _speed(document, console)
    console.print()


def _speed(document: Mapping[str, Any], console: Console) -> None:
    speed, evidence = document["throughput"], document["throughput"]["evidence"]
    console.print()
    parts = [
        f"{name.removesuffix('_seconds').replace('kv', 'cache')} {duration(seconds)}"
        for name, seconds in speed["parts"].items() if seconds
    ]  # fmt: skip
    console.print(f"  step = {' + '.join(parts)} = {duration(speed['decode_step_seconds'])}, estimated")
    reads = size(document["kv_cache"]["decode_read_bytes"])
    console.print(f"    it reads {reads} of cache; at full bandwidth {duration(speed['roofline_decode_step_seconds'])}")
    serving = speed["serving"]
    if serving is not None:
        tokens = f"{count(serving['running_requests'])} running requests / TPOT {duration(serving['tpot_seconds'])}"
        console.print(
            f"  serving = {tokens}, with the prompts of the others = {serving['tokens_per_second']:,.0f} tokens/s"
        )
    console.print(f"  fitted to {count(evidence['measured_times'])} measured times:")
    for source in evidence["sources"]:
        console.print(f"    {source}")
    if evidence["median_error"] is not None:
        error = f"median error {percent(evidence['median_error'])}, mean {percent(evidence['mean_error'])}"
        console.print(
            f"  {error}, {percent(evidence['within_a_quarter'])} within 25 %, with the model's family left out"
        )
    where = evidence["region"] or "all devices and types"
    ends = f"{evidence['low_factor']:.2f} to {evidence['high_factor']:.2f}"
    console.print(f"  range: measured / predicted was {ends} in 8 of 10 ({where})")
    if evidence["outside"]:
        console.print(f"  no measurement covers {', '.join(evidence['outside'])}")
