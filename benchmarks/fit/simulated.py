"""Simulate the measured runs, and correct the short form of the fit by the result.

The fit asks for the times of thousands of rows again and again, and simulating them all takes a minute. So it uses
arrays of the short form (`arrays`). Each row is corrected by its simulation with the constants of the round before:
by the ratio of the two times per output token, and by the difference of the two times to first token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from benchmarks.fit.arrays import Values, seconds_of, stacked_constants, ttft_seconds_of
from benchmarks.fit.rows import ALL, FIRST, Row
from kvcalc.errors import KvcalcError
from kvcalc.question.lengths import lengths_of
from kvcalc.simulation.loads.load import MEANS, Load
from kvcalc.simulation.results import mean_of, percentile, times_of
from kvcalc.simulation.served import outcome_of
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.roofline import SpeedModel

Simulated = tuple[float, float]
"""A time per output token and a time to first token, in seconds."""


class Corrections(NamedTuple):
    """How to correct the short form of each row.

    Its time per output token is multiplied by `ratios`, and `seconds` are added to its time to first token.
    """

    ratios: Values
    seconds: Values
    simulated: list[Simulated | None]

    def of(self, places: Sequence[int]) -> Corrections:
        """Those of the rows at these places."""
        return Corrections(self.ratios[places], self.seconds[places], [self.simulated[i] for i in places])


def simulated(row: Row, constants: Constants) -> Simulated | None:
    """Simulate the load of a row. None for a row without a load, and for one that kvcalc cannot simulate."""
    if not row.output_tokens:
        return None
    prompt, answer = (lengths_of(tokens, "tokens") for tokens in (row.input_tokens, row.output_tokens))
    clients = None if row.rate else int(row.concurrency)
    load = Load(
        prompt, answer, requests_per_second=row.rate or None, concurrency=clients, is_benchmark=clients is not None,
        num_requests=max(20, 10 * clients) if clients and row.requests != ALL else None, settling=MEANS, is_brief=True,
    )  # fmt: skip
    model = SpeedModel(row.model.counts, row.model.gpu, constants)
    try:
        outcome = outcome_of(row.case, model, load, [])
    except KvcalcError:
        return None
    tpot, first = mean_of("tpot", outcome), mean_of("ttft", outcome)
    if row.requests != ALL and not row.rate:
        first = percentile(sorted(times_of("ttft", outcome.counted)), 0.99 if row.requests == FIRST else 0.5)
    return (tpot, first) if tpot else None


def corrections(rows: Sequence[Row], each: Sequence[Constants]) -> Corrections:
    """The corrections of all rows with the constants of each: 1 and 0 for rows that are not simulated."""
    # Workers are copies of this process, so that they have the rows without being sent them.
    global _ROWS
    _ROWS = rows
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as workers:
        times = list(workers.map(_simulated_at, range(len(rows)), each, chunksize=8))
    stacked = stacked_constants(each)
    short, first = seconds_of(rows)(stacked), np.zeros(len(rows))
    served = [i for i, row in enumerate(rows) if row.ttft_seconds]
    own = [each[i] for i in served]
    first[served] = ttft_seconds_of([rows[i] for i in served], own)(stacked_constants(own))
    ratios = [1.0 if t is None else t[0] / s for t, s in zip(times, short)]
    seconds = [t[1] - s if t is not None and row.ttft_seconds else 0.0 for t, s, row in zip(times, first, rows)]
    return Corrections(np.array(ratios), np.array(seconds), times)


_ROWS: Sequence[Row] = ()


def _simulated_at(place: int, constants: Constants) -> Simulated | None:
    return simulated(_ROWS[place], constants)
