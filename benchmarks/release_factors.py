"""Does a factor for each release and kind of device predict other model families better? It does not.

    python benchmarks/release_factors.py --data FOLDER

FOLDER is that of benchmarks/fit_throughput.py. A factor is learned from measured / predicted of the other families that
were measured on the release, and shrunk to 1 if they are few. Printed are the mean errors of points, their medians and
the means of cells, before and after, with the points' family left out of the fit and of the factor.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from constants_document import cell_of
from fit_throughput import Fitted, Predicted, family_of, left_out, release_of
from throughput_data import ALL, Row, data_folder, read_rows

_ENGINES = ("vllm", "sglang", "tensorrt-llm")
Errors = list[tuple[tuple[str, ...], float]]
"""The cell and the error of each point."""


def measured(row: Row, metric: int) -> float:
    return row.ttft_seconds or 0.0 if metric else row.seconds


def log_factor(others: Sequence[tuple[Row, float]]) -> float:
    """The logarithm of the factor of a release, from measured / predicted of other families. Each cell counts once."""
    cells = defaultdict(list)
    for row, ratio in others:
        cells[cell_of(row)].append(math.log(ratio))
    families = len({row.family for row, _ in others})
    return statistics.mean(map(statistics.median, cells.values())) * families / (families + 1)


def compared(rows: Sequence[Row], here: Predicted, out: Predicted, engine: str, metric: int) -> tuple[Errors, Errors]:
    """The errors without and with the factors, of points whose release other families were measured on too."""
    chosen = [
        i for i, row in enumerate(rows)
        if row.engine == engine and not row.suspect and row.requests == ALL and measured(row, metric) and out[i][metric]
    ]  # fmt: skip
    of_release = defaultdict(list)
    for i in chosen:
        of_release[release_of(rows[i]), rows[i].kind].append(i)
    before: Errors = []
    after: Errors = []
    for i in chosen:
        same = of_release[release_of(rows[i]), rows[i].kind]
        others = [
            (rows[j], measured(rows[j], metric) / (here[j][metric] or 1.0))
            for j in same if rows[j].family != rows[i].family
        ]  # fmt: skip
        if others:
            ratio = (out[i][metric] or 0.0) / measured(rows[i], metric)
            before.append((cell_of(rows[i]), abs(ratio - 1)))
            after.append((cell_of(rows[i]), abs(ratio * math.exp(log_factor(others)) - 1)))
    return before, after


def text(errors: Errors) -> str:
    cells = defaultdict(list)
    for cell, error in errors:
        cells[cell].append(error)
    off = [error for _, error in errors]
    by_cell = statistics.mean(map(statistics.mean, cells.values()))
    return f"points {statistics.mean(off):.1%}, median {statistics.median(off):.1%}, cells {by_cell:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    rows = read_rows(data_folder(parser.parse_args().data))
    fitted = Fitted(rows)
    here, out = [fitted.predict(row) for row in rows], left_out(rows, family_of, fitted)
    for metric, name in enumerate(("TPOT", "TTFT")):
        for engine in _ENGINES:
            before, after = compared(rows, here, out, engine, metric)
            print(f"{name} {engine:12s} {len(before):4d}  {text(before)}  ->  {text(after)}")


if __name__ == "__main__":
    main()
