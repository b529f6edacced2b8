"""Compare simulated and closed-form times with published runs of a closed loop.

    python benchmarks/score_simulation.py --data FOLDER [--every N] [--spread S]

FOLDER is that of benchmarks/score_throughput.py. Every run has 15 requests per client, whose lengths vary by S around
those of the run (0.1: 0.9 to 1.1 times), because real lengths do, and equal ones keep requests in step. Errors are
|predicted / measured - 1| of the mean TTFT and TPOT. `gap` is how far the two predictions are apart.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from throughput_data import Row, data_folder, read_rows

from kvcalc.cli.batch import Questions
from kvcalc.cli.question import question_of
from kvcalc.errors import KvcalcError
from kvcalc.planning.answers.load import at_load
from kvcalc.releases import parse_release
from kvcalc.server.case import Case, make_case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.times import ModelTimes
from kvcalc.simulation.results import tpot_of, ttft_of
from kvcalc.simulation.scheduler import scheduler_of
from kvcalc.throughput.serving import REQUESTS_PER_CLIENT, serve


class Times(NamedTuple):
    """TTFT and TPOT in seconds."""

    ttft: float
    tpot: float


class Scored(NamedTuple):
    """One run: measured, by the closed form, and simulated."""

    engine: str
    measured: Times
    closed: Times
    simulated: Times


def score(asks: Questions, row: Row, spread: float) -> Scored | None:
    """The times of a run. None if kvcalc does not simulate it."""
    try:
        case = _case(asks, row)
        speed = speed_of(case, [])
        if not isinstance(speed, Speed) or row.ttft_seconds is None:
            return None
        longest = int((1 + spread) * (row.input_tokens + row.output_tokens)) + 2
        scheduler = scheduler_of(case, speed.model, longest)
    except KvcalcError:
        return None
    closed = serve(speed.model, row.input_tokens, row.output_tokens, row.concurrency, row.running, 0.0, row.rules)
    draw = Random(1)

    def about(tokens: int) -> int:
        return max(2, round(tokens * draw.uniform(1 - spread, 1 + spread)))

    number = max(REQUESTS_PER_CLIENT * row.concurrency, 60)
    requests = [Request(i, 0.0, about(row.input_tokens), about(row.output_tokens)) for i in range(number)]
    if not all(map(scheduler.fits, requests)):
        return None
    scheduler.server(ModelTimes(speed.model), Arrivals(requests, row.concurrency)).run()
    found = Times(statistics.mean(map(ttft_of, requests)), statistics.mean(tpot_of(r) or 0.0 for r in requests))
    measured = Times(row.ttft_seconds, row.seconds)
    return Scored(row.engine, measured, Times(closed.ttft_seconds, closed.tpot_seconds), found)


def _case(asks: Questions, row: Row) -> Case:
    """The case of a run, with the release that was measured."""
    fields: dict[str, Any] = dict(row.question)
    for text in filter(None, (row.version, row.date)):
        try:
            if parse_release(row.engine, text).release is not None:
                fields["engine"] = f"{row.engine}@{text}"
                break
        except KvcalcError:
            continue
    question = question_of(asks.given("estimate", fields), asks.models.model_of)
    return at_load(make_case(question))


def line(name: str, scored: Sequence[Scored]) -> str:
    """Median errors and the share that is off by more than 3 times, by the closed form and simulated."""
    cells = [f"{name:14s} {len(scored):6,d}"]
    for metric in Times._fields:
        for way in ("closed", "simulated"):
            ratios = [getattr(getattr(s, way), metric) / getattr(s.measured, metric) for s in scored]
            wrong = sum(max(r, 1 / r) > 3 for r in ratios) / len(ratios)
            cells.append(f"{statistics.median(abs(r - 1) for r in ratios):10.1%} {wrong:6.1%}")
        gaps = [abs(getattr(s.simulated, metric) / getattr(s.closed, metric) - 1) for s in scored]
        cells.append(f"{statistics.median(gaps):7.1%}")
    return " ".join(cells)


def main() -> None:
    """Print one line per engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--every", type=int, default=1, help="take every Nth run")
    parser.add_argument("--spread", type=float, default=0.1)
    options = parser.parse_args()
    rows = [row for row in read_rows(data_folder(options.data)) if row.ttft_seconds is not None and not row.suspect]
    asks = Questions()
    found = [one for row in rows[:: options.every] if (one := score(asks, row, options.spread)) is not None]
    print("median error and share off by more than 3 times: TTFT closed form, simulated, gap; TPOT likewise")
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        print(line(engine, [one for one in found if one.engine == engine]))
    print(line("all", found))


if __name__ == "__main__":
    main()
