"""The seconds of a step, from the speed model: for decoding, straight lines over the summed context.

`SpeedModel.decode(batch, context)` is asked only at the ends of pieces of the context. Between them the time is a
straight line, which is exact if every layer keeps all tokens. With windows or recurrent states the line differs from
the model by less than 0.1 %, because the ends include the windows and are at most a factor of 2 apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from typing import Protocol

from kvcalc.records import NamedTuple
from kvcalc.simulation.replicas.pace import Pace
from kvcalc.throughput.roofline import Part, SpeedModel

# The most times of each kind that are kept: few enough that the memory does not grow with the requests.
_MOST_KEPT = 2_000

Chunk = tuple[int, int]
"""A part of a prompt that one step computes: its first token and the token after its last one."""


Run = tuple[int, float, float, float, float]
"""Decode steps on one straight line: their number, and the seconds of the first, the last, all, and all but the last.

There are several of them in each event, and a plain tuple is the fastest.
"""


class Line(NamedTuple):
    """The seconds of a decode step of one batch: base + slope x summed context, up to `end` tokens."""

    base: float
    slope: float
    end: int


class StepTimes(Protocol):
    """How long steps take. `context` is the sum of the cached tokens of all decoding requests."""

    def line(self, batch: int, context: int) -> Line:
        """The seconds of a decode step as a function of the context, from `context` on."""

    def prompts(self, chunks: Sequence[Chunk], batch: int) -> float:
        """The seconds that chunks of prompts add to a decode step of `batch` requests, or take alone if it is 0."""


class RankTimes(Protocol):
    """How long steps of DP ranks take, each with its own requests."""

    def rank_line(self, batch: int, context: int, total: int) -> Line:
        """The seconds of a decode step of a replica that has `batch` of all `total` sequences, over their context."""

    def rank_prompts(self, own: Sequence[Chunk], tokens: int, batch: int, total: int) -> float:
        """The seconds that a replica's own chunks, and its experts' share of the others', add to its decode step.

        All replicas' chunks have `tokens` tokens. It has `batch` of all `total` sequences. If no replica decodes, the
        step takes so long alone.
        """


class ModelTimes:
    """The times of a `SpeedModel`, each multiplied by `factor`.

    They are `StepTimes`, and `RankTimes` if it has DP ranks.
    """

    def __init__(self, model: SpeedModel, factor: float = 1.0) -> None:
        self._model, self._factor = model, factor
        self._ends = _piece_ends(model)
        self._starts = self._ends[:-1]
        # Many steps are equal.
        self._lines = lru_cache(_MOST_KEPT)(self._new_line)
        self._prompts = lru_cache(_MOST_KEPT)(self._new_prompts)
        self._rank_prompts = lru_cache(_MOST_KEPT)(self._new_rank_prompts)

    def line(self, batch: int, context: int) -> Line:
        return self._lines(batch, bisect_right(self._starts, context / batch))

    def rank_line(self, batch: int, context: int, total: int) -> Line:
        return self._lines(batch, bisect_right(self._starts, context / batch), total)

    def prompts(self, chunks: Sequence[Chunk], batch: int) -> float:
        return self._prompts((*chunks,), batch)

    def rank_prompts(self, own: Sequence[Chunk], tokens: int, batch: int, total: int) -> float:
        return self._rank_prompts((*own,), tokens, batch, total)

    def _new_prompts(self, chunks: Sequence[Chunk], batch: int) -> float:
        model = self._model
        if batch:
            own = 1 / model.layout.prompt_ranks
            return self._factor * model.beside([Part(start, end, own) for start, end in chunks], batch).seconds
        share = model.share_of_prompts(len(chunks))
        return self._factor * model.alone([Part(start, end, share) for start, end in chunks]).seconds

    def _new_rank_prompts(self, own: Sequence[Chunk], tokens: int, batch: int, total: int) -> float:
        share = 1 / self._model.layout.prompt_ranks
        parts = [
            *(Part(start, end, share) for start, end in own),
            Part(0, tokens - sum([end - start for start, end in own]), 0.0),
        ]
        step = self._model.beside(parts, total, busiest=batch) if total else self._model.alone(parts)
        return self._factor * step.seconds

    def _new_line(self, batch: int, place: int, total: int | None = None) -> Line:
        low, high = self._ends[place - 1], self._ends[place]
        all_of_them, busiest = (batch, None) if total is None else (total, batch)
        steps = (self._model.decode(all_of_them, tokens, busiest=busiest) for tokens in (low, high))
        first, last = (self._factor * step.seconds for step in steps)
        slope = (last - first) / (high - low)
        return Line(first - slope * low, slope / batch, high * batch)


def _piece_ends(model: SpeedModel) -> list[int]:
    """The contexts at which pieces end, ascending: the windows, and every power of two. The first is 1."""
    ends = {2**power for power in range(31)}
    ends.update(row.most_tokens for row in model.counts.work if row.most_tokens)
    return sorted(ends)


def run_seconds(line: Line, batch: int, context: int, steps: int, pace: Pace) -> float:
    """The seconds of `steps` decode steps on one line. The summed context is `context` in the first, and grows."""
    base, slope, _ = line
    return steps * base + slope * (steps * context + batch * pace.summed(steps))


def decode_run(line: Line, batch: int, context: int, steps: int, pace: Pace) -> Run:
    """`steps` decode steps on one line. The summed context is `context` in the first."""
    base, slope, _ = line
    first, before = base + slope * context, steps - 1
    grown, summed = pace.tokens(before), pace.summed(before)
    return (
        steps,
        first,
        first + slope * batch * grown,
        steps * base + slope * (steps * context + batch * (summed + grown)),
        before * base + slope * (before * context + batch * summed),
    )


def steps_until(line: Line, batch: int, context: int, now: float, until: float, most: int, pace: Pace) -> int:
    """The fewest steps, at least 1 and at most `most`, that begin at `now` and end at `until` or later."""
    a = line.slope * batch * pace.mean_tokens / 2
    b = line.base + line.slope * context - a
    span = until - now
    guess = (sqrt(b * b + 4 * a * span) - b) / (2 * a) if a > 0 and span > 0 else span / b if b > 0 else most
    steps = min(max(int(guess) + 1, 1), most)
    while steps > 1 and now + run_seconds(line, batch, context, steps - 1, pace) >= until:
        steps -= 1
    while steps < most and now + run_seconds(line, batch, context, steps, pace) < until:
        steps += 1
    return steps
