"""The rows of a plan with prefill and decode instances on different kinds of device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcalc.planning.checkpoint import Checkpoint
from kvcalc.planning.disaggregated.mixed import Mixed, devices_of, find_mixed
from kvcalc.planning.disaggregated.rows import SplitRows, describe_split
from kvcalc.planning.disaggregated.search import Instances
from kvcalc.planning.grouped_notes import RowNote, group_notes
from kvcalc.planning.traffic import Kind, Traffic


def with_mixed(
    traffic: Traffic, kinds: Sequence[Kind], rows: SplitRows, checkpoint: Checkpoint, transfer: int | str,
    instances: Instances, most: int,
) -> SplitRows:  # fmt: skip
    """The rows of a plan and, for each engine, one with the best pools on different kinds of device, if there are any.

    `most` is the most devices of all kinds together.
    """
    added: list[dict[str, Any]] = []
    about_rows: list[RowNote] = []
    for engine in dict.fromkeys(kind.engine for kind in kinds):
        own = [kind for kind in kinds if kind.engine == engine]
        found = find_mixed(instances, own, transfer, most) if len(own) > 1 else None
        if not isinstance(found, Mixed):
            continue
        name = f"{found.prefill_kind.gpu.name} + {found.decode_kind.gpu.name}"
        beside = next(row for row in rows.rows if row["engine"] == engine)
        # Notes and limits are those of the decode instances' kind, and the price of a device is the mean of both.
        cost = found.cost_per_hour
        price = None if cost is None else cost / sum(devices_of(found.split))
        kind = found.decode_kind._replace(price=price)
        row, notes = describe_split(traffic, kind, {**beside, "gpu": name}, found.split, checkpoint)
        added.append({**row, "price_per_hour": None, "cost_per_hour": cost})
        # What is said about rows of one kind need not be said again.
        new = [note for note in notes if not any(note.text in one.text for one in rows.notes)]
        about_rows += [RowNote((engine, name), note, kind.gpu) for note in new]
    names = dict.fromkeys((row["engine"], row["gpu"]) for row in [*rows.rows, *added])
    notes = [*rows.notes, *group_notes(about_rows, list(names))]
    return SplitRows([*rows.rows, *added], notes, rows.finalists)
