"""Which row of a plan is the best: what rows are ranked by, and what the best one gives up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcalc.engines import SERVERS, command_key
from kvcalc.planning.plan.traffic import seconds_text

# The times that a cheaper row may give up, by name.
_TIMES = {"TTFT": "ttft_seconds", "TPOT": "tpot_seconds"}
# A time that is longer by less than this factor is not named.
_LONGER = 1.5


def ranked_by(rows: Sequence[Mapping[str, Any]], has_targets: bool) -> str:
    """What the best row has least of.

    Costs are compared if they are known for all rows that fit: per hour, because each of them meets the targets, or per
    token if there are none, because a slow device is cheap per hour. Else it is the number of devices.
    """
    if any(row["cost_per_hour"] is None for row in rows if row["fits"]):
        return "num_devices"
    return "cost_per_hour" if has_targets else "cost_per_million_output_tokens"


def best_of(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """The row that fits and has least of `key`. Of equal ones, it is the fastest per device. None if no row fits."""
    fitting = (row for row in rows if row["fits"])
    return min(fitting, key=lambda row: (row[key], -row["tokens_per_second_per_device"]), default=None)


def commands(rows: Sequence[dict[str, Any]], best: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The command of each engine's best row that fits, that of the `best` row first.

    Engines without a server have none, and separate instances have their own (`disaggregated`).
    """
    found = []
    for name in dict.fromkeys(row["engine"] for row in [best, *rows] if row is not None):
        own = [best] if best is not None and best["engine"] == name else [row for row in rows if row["engine"] == name]
        row = best_of(own, key)
        command = None if row is None or name.partition("@")[0] not in SERVERS else row[command_key(name)]
        if row is not None and command is not None:
            found.append({"engine": name, "gpu": row["gpu"], "replicas": row["replicas"], "command": command})
    return found


def given_up(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None, key: str) -> str | None:
    """What a row that is ranked by its cost per token gives up: the fastest other row, and what it costs.

    None if no other row is much faster, or if rows are ranked by something else.
    """
    if best is None or key != "cost_per_million_output_tokens":
        return None
    faster = [
        (row[name] / best[name], row, title)
        for row in rows
        for title, name in _TIMES.items()
        if row["fits"] and row[name] is not None and row[name] * _LONGER < best[name]
    ]
    if not faster:
        return None
    _, row, title = min(faster, key=lambda one: one[0])
    name = _TIMES[title]
    where = row["gpu"] if row["engine"] == best["engine"] else f"{row['gpu']} with {row['engine']}"
    times = f"{seconds_text(row[name])} instead of {seconds_text(best[name])}"
    return f"{where}: {title} {times}, for {row[key] / best[key]:.2g} times the cost per token"
