"""`kvcalc plan` for a person: a row a kind of device, then what to type."""

from __future__ import annotations

import shlex
from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.console import Column, count, duration, rate, table_of, text

_WIDTH = 78


def render(document: dict[str, Any], console: Console) -> None:
    """Print the layouts side by side, why a device has none, and the commands of the best."""
    rows = document["plans"]
    console.print(Text.assemble((document["model"]["name"], "bold"), f"  {_question(document)}"))
    console.print()
    best = [row for row in rows if row["gpu"] == document["best"]]
    has_choice = best and len(rows) > 1
    columns: list[Column] = [
        ("", "gpu", lambda name: f"{name} *" if has_choice and name == document["best"] else text(name)),
        (">devices", "num_devices", count), ("layout", "layout", text), (">TTFT", "ttft_seconds", duration),
        (">TPOT", "tpot_seconds", duration), (">tok/s", "tokens_per_second", rate),
    ]  # fmt: skip
    if any(row["cost_per_hour"] is not None for row in rows):
        columns += [(">an hour", "cost_per_hour", _money), (">1M tokens out", "cost_per_million_output_tokens", _money)]
    else:
        columns.append((">tok/s each", "tokens_per_second_per_device", rate))
    console.print(table_of([{**row, "layout": _layout(row)} for row in rows], columns))
    if has_choice:
        has_prices = all(row["cost_per_hour"] is not None for row in rows if row["feasible"])
        console.print(f"* {'cheapest' if has_prices else 'fewest devices'}", style="dim")
    for row in rows:
        if row["reason"]:
            console.print(f"{row['gpu']}: {row['reason']}", style="dim", soft_wrap=True)
    for row in best:
        low, high = duration(row["tpot_low_seconds"]), duration(row["tpot_high_seconds"])
        console.print(f"{row['gpu']}: TPOT {low} to {high} by the error of the fit", style="dim")
        _commands(row, console)


def _question(document: dict[str, Any]) -> str:
    lengths, targets = document["lengths"], document["targets"]
    parts = [f"{count(lengths['input_tokens'])} tokens in, {count(lengths['output_tokens'])} out"]
    if lengths["file"]:
        parts[0] += f" (means of {count(lengths['num_requests'])}; the longest {count(lengths['longest_tokens'])})"
    if targets["concurrency"]:
        parts.append(f"{count(targets['concurrency'])} in flight")
    else:
        parts.append(f"{rate(targets['requests_per_second'])} requests a second")
    parts.append(document["engine"]["name"])
    return ", ".join(parts)


def _layout(row: dict[str, Any]) -> str:
    """As `2 x tp 4 x pp 2`: replicas, and what each is split over."""
    if not row["feasible"]:
        return "-"
    text = f"tp {row['tensor_parallel_size']}"
    if row["pipeline_parallel_size"] > 1:
        text += f" x pp {row['pipeline_parallel_size']}"
    return f"{row['replicas']} x {text}" if row["replicas"] > 1 else text


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _commands(row: dict[str, Any], console: Console) -> None:
    """What starts one replica, in lines a shell joins again."""
    each = f", each of {row['replicas']} replicas" if row["replicas"] > 1 else ""
    for engine in ("vllm", "sglang"):
        console.print()
        console.print(f"{row['gpu']}{each}:" if engine == "vllm" else "or")
        for line in _folded(row[engine]):
            console.print(f"  {line}", soft_wrap=True)


def _folded(command: str) -> list[str]:
    """A command in lines of at most `_WIDTH`, where words allow, an option beside its value."""
    words = [shlex.quote(word) for word in shlex.split(command)]
    groups: list[str] = []
    for word in words:
        if groups and not word.startswith("--") and groups[-1].startswith("--") and " " not in groups[-1]:
            groups[-1] += f" {word}"
        else:
            groups.append(word)
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) + 3 > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"  {group}")
        else:
            lines[-1] += f" {group}"
    return lines
