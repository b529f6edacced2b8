"""`--sweep context=1k..128k,batch=1..64`: the points of a curve. This module does not need torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple
from kvcalc.units import parse_count, parse_tokens

if TYPE_CHECKING:
    import kvcalc.documents as documents

_AXES = ("context", "batch")
_EXAMPLE = "for example context=1k..128k,batch=1..64 (doubling from first to last), or context=1k:4k:16k"
_MOST_POINTS = 256


class Sweep(NamedTuple):
    """The values of both axes, in ascending order."""

    contexts: tuple[int | None, ...]
    batches: tuple[int, ...]

    def points(self) -> list[tuple[int | None, int]]:
        """(context, batch) of every run, with the largest last."""
        return [(tokens, batch) for tokens in self.contexts for batch in self.batches]

    def describe(self) -> documents.MeasureSweep:
        """The `sweep` part of a document."""
        return {"context_tokens": [*self.contexts], "batch_size": [*self.batches]}


def curve(model: str, runs: list[documents.Run]) -> list[documents.CurveRow]:
    """The `curve` part of a document: one flat row per run, for a table or a plot."""
    rows: list[documents.CurveRow] = []
    for run in runs:
        step, core = run["decode_step_seconds"], run["attention_core_seconds"]
        binding = run["binding_roof"]["attention_core"]
        rows.append(
            {
                "model": model,
                "context_tokens": run["context_tokens"],
                "batch_size": run["batch_size"],
                "attention": run["attention"],
                "num_layers": run["num_layers"],
                "predicted_bytes": run["predicted_bytes"],
                "held_bytes": run["held_bytes"],
                "decode_step_seconds": step["p50"],
                "tokens_per_second": run["tokens_per_second"],
                "attention_core_seconds": core["p50"] if core else None,
                "kv_read_bytes_per_second": run["kv_read_bytes_per_second"],
                "fraction_of_roof": run["fraction_of_roof"]["attention_core"],
                "binding_roof": binding["roof"] if binding else None,
                "fraction_of_binding_roof": binding["fraction"] if binding else None,
                "spread": step["spread"],
                "backend": run["backend"],
            }
        )
    return rows


def parse_sweep(text: str, context_tokens: int | None, batch_size: int) -> Sweep:
    """Parse a sweep. An axis that `text` does not name has the single value `context_tokens` or `batch_size`.

    Raises UsageError (exit 2) for a text it cannot parse.
    """
    values: dict[str, tuple[int, ...]] = {}
    for piece in text.split(","):
        axis, equals, span = piece.strip().partition("=")
        if not equals or axis not in _AXES or axis in values:
            raise UsageError(f"--sweep {text[:60]!a}: {piece[:40]!a} is not an axis with values", _EXAMPLE)
        values[axis] = _values(span, f"--sweep {axis}", parse_tokens if axis == "context" else parse_count)
    contexts: tuple[int | None, ...] = values.get("context", (context_tokens,))
    sweep = Sweep(contexts, values.get("batch", (batch_size,)))
    if len(sweep.points()) > _MOST_POINTS:
        raise UsageError(f"--sweep: {len(sweep.points())} points, at most {_MOST_POINTS}")
    return sweep


def _values(span: str, option: str, parse: Callable[[str, str], int]) -> tuple[int, ...]:
    first, dots, last = span.partition("..")
    if not dots:
        return tuple(sorted({parse(value, option) for value in span.split(":")}))
    value, end = parse(first, option), parse(last, option)
    if value > end:
        raise UsageError(f"{option}: {first} is more than {last}", _EXAMPLE)
    values = []
    while value < end:
        values.append(value)
        value *= 2
    return (*values, end)
