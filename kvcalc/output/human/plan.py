"""Human output of `kvcalc plan`: one row per kind of device, then the command to type."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console, print_table
from kvcalc.output.human.figures import count, duration, percent, rate, span, text
from kvcalc.output.human.layouts import (
    has_types,
    is_simulated,
    judged_text,
    layout_of,
    name_of_row,
    print_finalists,
    print_pools,
    question_of,
    replica_split,
    simulated_columns,
    targets_text,
)
from kvcalc.output.human.server import folded
from kvcalc.output.human.tables import Column, Text

if TYPE_CHECKING:
    import kvcalc.documents as documents

_WIDTH = 78


def render(document: documents.Plan, console: Console) -> None:
    """Print the layouts side by side, the reasons why devices have none, and the commands of the best layout."""
    rows = document["plans"]
    best: Any = document["best"]
    console.print(Text.assemble((document["model"]["name"], "bold"), f"  {question_of(document)}"))
    if wanted := targets_text(document["targets"]):
        console.print(f"{wanted}, {judged_text(document)}")
    console.print()
    if best is not None:
        _layouts(document, console)
    reasons = _reasons(rows)
    # If one reason applies to all rows, the error message states it.
    for reason, devices in reasons.items() if best is not None or len(reasons) > 1 else ():
        console.print(f"{', '.join(devices)}: {reason}", style="dim")
    for row in rows:
        name = name_of_row(document, row)
        for other in (row["next_layout"], row.get("next_mode")):
            if other is not None:
                console.print(f"{name}, not {other}", style="dim")
    print_finalists(document, console)
    if document["pareto"]:
        _front(document, console)
    if best is not None and best.get("disaggregated") is not None:
        print_pools(best, console)
        for role, command in best["disaggregated"]["commands"].items():
            on = "" if role == "router" else f", on {best['disaggregated'][role]['gpu']}"
            _print_command(f"{role}{on}:", command, console)
    elif best is not None:
        for place, one in enumerate(document["commands"]):
            each = f", each of {one['replicas']} replicas" if one["replicas"] > 1 else ""
            where = f"or {one['gpu']} with {one['engine']}" if place else one["gpu"]
            if one["nodes"] is None:
                _print_command(f"{where}{each}:", one["command"], console)
            for number, command in enumerate(one["nodes"] or ()):
                _print_command(f"{where}{each}, machine node-{number}:", command, console)
            if one["router"] is not None:
                router = _MANY_REPLICAS.sub(_one_range, one["router"])
                _print_command("router, in front of replica-0, replica-1, ...:", router, console)


def _layouts(document: documents.Plan, console: Console) -> None:
    rows, best = document["plans"], document["best"]
    fitting = [row for row in rows if row["fits"]]
    has_choice = len(rows) > 1
    shown = [
        {
            **row,
            "gpu": f"{row['gpu']} *" if has_choice and row == best else row["gpu"],
            "fit": "tight" if row["verdict"] == "tight" else "",
            "layout": layout_of(row),
            "range": span(row["tpot_seconds"], row["tpot_low_seconds"], row["tpot_high_seconds"]),
        }
        for row in rows
    ]
    columns: list[Column] = [("", "gpu", text)]
    if len(document["engines"]) > 1:
        columns.append(("engine", "engine", text))
    if has_types(document):
        columns.append(("weights", "weights_dtype", text))
    columns += [
        (">GPUs", "num_devices", count), ("layout", "layout", text), (">TTFT", "ttft_seconds", duration),
        (">TPOT", "tpot_seconds", duration), (">80% range", "range", text), (">tok/s", "tokens_per_second", rate),
    ]  # fmt: skip
    if is_simulated(document):
        # What is judged replaces the means of the short form.
        columns[-4:-1] = simulated_columns(document["targets"])
    if any(row["utilization"] is not None for row in rows):
        columns.insert(-1, (">busy", "utilization", percent))
    if any(row["verdict"] == "tight" for row in rows):
        columns.insert(-1, ("fit", "fit", text))
    if any(row["cost_per_hour"] is not None for row in rows):
        columns += [
            (">per hour", "cost_per_hour", _money),
            (">1M tokens out", "cost_per_million_output_tokens", _money),
        ]
    else:
        columns.append((">tok/s each", "tokens_per_second_per_device", rate))
    optional = ["tokens_per_second_per_device", "utilization", "tokens_per_second"]
    if document["targets"]["max_ttft_seconds"] is None:
        optional.append("ttft_seconds")
    by_token = document["ranked_by"] == "cost_per_million_output_tokens"
    print_table(shown, columns, console, [*optional, "cost_per_hour" if by_token else "cost_per_million_output_tokens"])
    if any(row.get("disaggregated") for row in rows):
        console.print("P: prefill instances, D: decode instances", style="dim")
    if has_choice:
        kinds = len({row["gpu"] for row in fitting})
        fewest = "fewest devices" + ("; --price ranks kinds of device by cost" if kinds > 1 else "")
        names = {"cost_per_hour": "cheapest", "cost_per_million_output_tokens": "cheapest per token"}
        console.print(f"* {names.get(document['ranked_by'], fewest)}", style="dim")
        if document["gives_up"] is not None:
            console.print(f"{document['gives_up']}; --max-ttft and --max-tpot set limits", style="dim")


def _front(document: documents.Plan, console: Console) -> None:
    """Print the Pareto front, the fastest for one user first."""
    rows = [{**row, "layout": replica_split(row)} for row in document["pareto"] or ()]
    columns: list[Column] = [("", "gpu", text)]
    if len(document["engines"]) > 1:
        columns.append(("engine", "engine", text))
    columns += [
        ("layout", "layout", text), (">requests", "requests_per_replica", count), (">TTFT", "ttft_seconds", duration),
        (">tok/s per user", "tokens_per_second_per_user", rate),
        (">tok/s per GPU", "tokens_per_second_per_device", rate),
    ]  # fmt: skip
    if all(row["cost_per_million_output_tokens"] is not None for row in rows):
        columns.append((">1M tokens out", "cost_per_million_output_tokens", _money))
    console.print("\nLayouts that are cheaper, or faster for one user, than every other:\n")
    print_table(rows, columns, console, ["ttft_seconds"])


def _reasons(rows: list[documents.PlanRow]) -> dict[str, list[str]]:
    """Each reason why a row does not fit, with the devices it applies to."""
    several = len({row["engine"] for row in rows}) > 1
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["reason"]:
            name = f"{row['gpu']} with {row['engine']}" if several else row["gpu"]
            reasons.setdefault(row["reason"], []).append(name)
    return reasons


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


# The hosts of more than eight replicas, which bash can write as one word.
_MANY_REPLICAS = re.compile(r"(\S*\breplica-)0(\S*)((?: \1\d+\2){8,})")


# Folding quotes the braces, which bash then does not expand.
_QUOTED_RANGE = re.compile(r"'([^\s']*\{0\.\.\d+\}[^\s']*)'")


def _one_range(hosts: re.Match[str]) -> str:
    """The hosts as `replica-{0..8}`."""
    return f"{hosts[1]}{{0..{len(hosts[3].split())}}}{hosts[2]}"


def _print_command(heading: str, command: str, console: Console) -> None:
    console.print()
    console.print(heading)
    for line in folded(command, min(_WIDTH, console.width - 2)):
        console.print(f"  {_QUOTED_RANGE.sub(lambda host: host[1], line)}", soft_wrap=True)
