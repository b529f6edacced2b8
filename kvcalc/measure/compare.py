"""Compare two records: the ratios of figures that mean the same in both. This module does not need torch.

There are three kinds of values, which the units in their names distinguish:
- Bytes per second, FLOP per second and shares of a roof are rates of the device. They are always comparable.
- Seconds, bytes and tokens per second depend on the work. They are comparable if both records did the same work.
- Everything else (counts, errors, settings) is not a figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcalc.errors import UsageError
from kvcalc.measure.record import Record
from kvcalc.notes import Note, describe_notes
from kvcalc.schema import SCHEMA_VERSION

# Keys of the model and the workload that do not change the work: names and requests.
_NO_WORK = {
    "model": ("name", "source", "model_type", "max_position_embeddings"),
    "workload": ("steps", "seed", "backend"),
}

# Parts that describe the machine and the software. Differences in them may explain a ratio.
_SETTING = ("device", "environment")
_NO_SETTING = ("taken_at", "free_bytes", "power_watts")

_RATES = ("bytes_per_second", "flop_per_second")
_WORK = ("_seconds", "_bytes", "tokens_per_second")


def compare(a: Record, b: Record, names: tuple[str, str] = ("A", "B")) -> Record:
    """The document of `kvcalc measure --compare A B`: `figures` with the ratios B / A, differences, and omitted runs.

    `a` and `b` are records from `kvcalc.measure.record.load`. Raises UsageError (exit 2) if they have no figures in
    common, because no kind of attention is in both.
    """
    work = _differences(a, b, _NO_WORK)
    figures = [_row("", path, x, y) for path, x, y in _pairs(a["roof"], b["roof"], "roof") if _is_rate(path)]
    left_out: list[dict[str, str]] = []
    others = _by_kind(b)
    for kind, mine in _by_kind(a).items():
        theirs = others.pop(kind, None)
        if theirs is None:
            left_out.append({"attention": kind, "reason": f"not in {names[1]}"})
            continue
        reason = _untrusted(mine, names[0]) or _untrusted(theirs, names[1])
        if reason:
            left_out.append({"attention": kind, "reason": reason})
            continue
        same_work = not work and mine.get("num_layers") == theirs.get("num_layers")
        pairs = list(_pairs(mine, theirs))
        figures += [_row(kind, path, x, y) for path, x, y in pairs if _is_rate(path) or (same_work and _is_work(path))]
        if not same_work and any(_is_work(path) for path, _, _ in pairs):
            left_out.append({"attention": kind, "reason": "times and bytes are from different work"})
    left_out += [{"attention": kind, "reason": f"not in {names[0]}"} for kind in others]
    if not any(row["attention"] for row in figures):
        reasons = "; ".join(f"{row['attention']}: {row['reason']}" for row in left_out)
        raise UsageError(f"{names[0]} and {names[1]} have no figure in common", reasons or None)
    return {
        "schema_version": SCHEMA_VERSION,
        "a": _identity(a, names[0]),
        "b": _identity(b, names[1]),
        "differences": work + _of_runs(a, b) + _differences(a, b, dict.fromkeys(_SETTING, _NO_SETTING)),
        "figures": figures,
        "left_out": left_out,
        "warnings": describe_notes(
            Note("environment", "missing", f"{name} has no environment: driver and versions are unknown")
            for record, name in zip((a, b), names)
            if not _part(record, "environment")
        ),
    }


def _identity(record: Record, name: str) -> Record:
    return {
        "file": name,
        "model": record["model"].get("name"),
        "device": record["device"].get("name"),
        "taken_at": _part(record, "environment").get("taken_at"),
    }


def _by_kind(record: Record) -> dict[str, Record]:
    """The runs, keyed by attention. If a record has several runs of a kind, the later keys also have a number."""
    records: dict[str, Record] = {}
    for run in record["runs"]:
        kind = run["attention"]
        number = sum(1 for known in records if known.partition("#")[0] == kind)
        records[kind if not number else f"{kind}#{number + 1}"] = run
    return records


def _untrusted(run: Record, name: str) -> str | None:
    """The reason why a run's figures cannot be used, or None."""
    if run.get("held_bytes") != run.get("predicted_bytes"):
        return f"in {name} the held bytes differ from the predicted bytes"
    if not _part(run, "verified").get("ok"):
        return f"in {name} the self-check failed"
    return None


def _pairs(a: Record, b: Record, prefix: str = "") -> Iterator[tuple[str, float, float]]:
    """(path, a, b) of every number that is at the same path in both, in a's order. Lists are skipped."""
    theirs = dict(_leaves(b, prefix))
    for path, mine in _leaves(a, prefix):
        if all(isinstance(number, (int, float)) and type(number) is not bool for number in (mine, theirs.get(path))):
            yield path, mine, theirs[path]


def _is_rate(path: str) -> bool:
    return any(part.endswith(_RATES) or part.startswith("fraction_of_") for part in path.split("."))


def _is_work(path: str) -> bool:
    *_, last = path.split(".")
    return not _is_rate(path) and last not in ("n", "spread") and any(part.endswith(_WORK) for part in path.split("."))


def _row(attention: str, figure: str, a: float, b: float) -> Record:
    return {"attention": attention or None, "figure": figure, "a": a, "b": b, "ratio": b / a if a else None}


def _differences(a: Record, b: Record, parts: dict[str, tuple[str, ...]]) -> list[Record]:
    """The keys at which `parts` of the records differ. `parts` maps each part to the keys to ignore."""
    differences = []
    for part, left_out in parts.items():
        mine, theirs = (dict(_leaves(_part(record, part), part)) for record in (a, b))
        paths = [*mine, *(path for path in theirs if path not in mine)]
        differences += [
            {"path": path, "a": mine.get(path), "b": theirs.get(path)}
            for path in paths
            if mine.get(path) != theirs.get(path) and path.removeprefix(f"{part}.") not in left_out
        ]
    return differences


def _leaves(value: Record, prefix: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of every value in a nested mapping that is not a mapping itself."""
    for key, item in value.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(item, dict):
            yield from _leaves(item, path)
        else:
            yield path, item


def _of_runs(a: Record, b: Record) -> list[Record]:
    """Differences in layers and backends between runs of the same kind."""
    others = _by_kind(b)
    return [
        {"path": f"runs.{kind}.{key}", "a": mine.get(key), "b": others[kind].get(key)}
        for kind, mine in _by_kind(a).items()
        if kind in others
        for key in ("num_layers", "backend")
        if mine.get(key) != others[kind].get(key)
    ]


def _part(record: Record, key: str) -> Record:
    part = record.get(key)
    return part if isinstance(part, dict) else {}
