"""The rows of a plan with prefill and decode instances on different kinds of device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcalc.errors import KvcalcError
from kvcalc.planning.disaggregated.judge import SplitJudge
from kvcalc.planning.disaggregated.mixed import find_mixed, joined_kinds
from kvcalc.planning.disaggregated.rows import Asked, SplitRows, describe_split
from kvcalc.planning.disaggregated.search import Split
from kvcalc.planning.grouped_notes import RowNote, group_notes
from kvcalc.planning.traffic import Kind, Trouble


def with_mixed(asked: Asked, kinds: Sequence[Kind], rows: SplitRows) -> SplitRows:
    """The rows of a plan and, for each engine, one with the best pools on two kinds of device, if there are any."""
    added, finalists = list[dict[str, Any]](), list[dict[str, Any]]()
    about_rows: list[RowNote] = []
    for engine in dict.fromkeys(kind.engine for kind in kinds):
        judge = asked.judge()
        found = _find(asked, [kind for kind in kinds if kind.engine == engine], judge)
        finalists += judge.describe() if judge is not None else []
        if not isinstance(found, Split):
            continue
        name = found.kinds.text
        beside = next(row for row in rows.rows if row["engine"] == engine)
        row, notes = describe_split(asked, {**beside, "gpu": name, "price_per_hour": None}, found, judge)
        added.append(row)
        # What is said about rows of one kind need not be said again. Notes are those of the decode instances' kind.
        new = [note for note in notes if not any(note.text in one.text for one in rows.notes)]
        about_rows += [RowNote((engine, name), note, found.kinds.decode.gpu) for note in new]
    names = dict.fromkeys((row["engine"], row["gpu"]) for row in [*rows.rows, *added])
    notes = [*rows.notes, *group_notes(about_rows, list(names))]
    return SplitRows([*rows.rows, *added], notes, [*rows.finalists, *finalists])


def _find(asked: Asked, own: Sequence[Kind], judge: SplitJudge | None) -> Split | Trouble | None:
    joined = joined_kinds(own, asked.transfer, asked.most)
    if judge is None:
        return find_mixed(asked.known, joined)
    from kvcalc.planning.disaggregated.finalists import find_simulated_mixed

    try:
        return find_simulated_mixed(judge, joined, asked.num_simulated)
    except KvcalcError:  # the rows of one kind say why
        return None
