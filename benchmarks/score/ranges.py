"""How many measurements are in the ranges of kvcalc's answers? By cell, with ranges that have not seen the family.

    python benchmarks/score/ranges.py --data FOLDER [--write docs/concepts/throughput.md]

For each model family, the constants and the ranges are made without it, and its measurements are held against them. A
range that is too wide to be shown holds nothing, and its cells are left out. Prints the cells (the points of an engine,
a device, a family and a type of weights) with ten points or more of which fewer than 75 % or more than 90 % are in the
range, and the table of the manual, in which every cell counts once. Its last columns say why that is rare: how many of
these cells one range would suit that is chosen with all errors known, and the share of the variance between cells.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.fit.document import LEFT_OUT, LEFT_OUT_OF_TTFT, cell_of, ranges_of
from benchmarks.fit.fitted import Predicted, family_of, fitted_to, left_out
from benchmarks.fit.rows import FIRST, Row, data_folder, read_rows
from benchmarks.score.throughput import write
from kvcalc.throughput.speed import known_range, range_factors

BEGIN = "<!-- ranges: python benchmarks/score/ranges.py --data FOLDER --write docs/concepts/throughput.md -->"
END = "<!-- end of ranges -->"
# Points of a cell from which its share says something, and the shares of an honest range of 80 %.
_MANY, _LEAST, _MOST = 10, 0.75, 0.9
_ENDS = 200  # the ends of ranges that are tried
_TITLES = (
    ("TPOT or step, vLLM", "vllm", "tpot"), ("TPOT, SGLang", "sglang", "tpot"),
    ("TPOT, TensorRT-LLM", "tensorrt-llm", "tpot"), ("step, llama.cpp", "llama.cpp", "tpot"),
    ("step, MLX", "mlx", "tpot"), ("TTFT, vLLM", "vllm", "ttft"), ("TTFT, SGLang", "sglang", "ttft"),
    ("TTFT, TensorRT-LLM", "tensorrt-llm", "ttft"),
)  # fmt: skip


class Cell(NamedTuple):
    """The shares, 0 to 1, of a cell's points that are in their ranges, below and above."""

    name: tuple[str, ...]
    points: int
    inside: float
    below: float
    above: float


def ratios(rows: Sequence[Row], out: Predicted, engine: str, metric: str) -> list[tuple[Row, float]]:
    """Measured / predicted of an engine's rows."""
    found = []
    for row, (tpot, ttft) in zip(rows, out):
        if row.engine != engine or row.requests == FIRST or row.suspect is not None:
            continue
        if metric == "tpot":
            found.append((row, row.seconds / tpot))
        elif row.ttft_seconds and ttft and not row.is_cold:
            found.append((row, row.ttft_seconds / ttft))
    return found


def cells(found: Sequence[tuple[Row, float]], left_out: float) -> Iterator[Cell]:
    """The cells of an engine whose ranges are shown. `left_out` is the share that ranges leave out at both ends."""
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for family in sorted({row.family for row, _ in found}):
        ranges = ranges_of([one for one in found if one[0].family != family], left_out)
        for row, ratio in found:
            if row.family != family:
                continue
            low, high = known_range(*range_factors(row.model, ranges, row.weight_dtype, row.running, ()))
            if low is not None and high is not None:
                places[cell_of(row)].append(-1 if ratio < low else 1 if ratio > high else 0)
    for name, own in sorted(places.items()):
        below, inside, above = (own.count(place) / len(own) for place in (-1, 0, 1))
        yield Cell(name, len(own), inside, below, above)


def log_errors(found: Sequence[tuple[Row, float]], names: Sequence[tuple[str, ...]]) -> list[np.ndarray]:
    """The logarithms of measured / predicted of the cells `names`."""
    own: dict[tuple[str, ...], list[float]] = {name: [] for name in names}
    for row, ratio in found:
        if cell_of(row) in own:
            own[cell_of(row)].append(math.log(ratio))
    return [np.array(errors) for errors in own.values()]


def best_range(errors: Sequence[np.ndarray]) -> int:
    """In how many cells a range has 75 to 90 % of the points, if it is the one that suits most of them."""
    ends = np.quantile(np.concatenate(errors), np.linspace(0, 1, _ENDS))
    below = np.array([np.searchsorted(np.sort(cell), ends) / len(cell) for cell in errors])
    inside = below[:, None, :] - below[:, :, None]
    return int(((inside >= _LEAST) & (inside <= _MOST)).sum(axis=0).max())


def variance_between(errors: Sequence[np.ndarray]) -> float:
    """The share of the variance of errors, 0 to 1, that is between cells and not within them."""
    within = float(np.mean([cell.var(ddof=1) for cell in errors]))
    chance = float(np.mean([cell.var(ddof=1) / len(cell) for cell in errors]))
    between = max(0.0, float(np.var([cell.mean() for cell in errors], ddof=1)) - chance)
    return between / (between + within)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table between the markers in this file")
    options = parser.parse_args()
    rows = read_rows(data_folder(options.data))
    table = table_of(rows, left_out(rows, family_of, fitted_to(rows)))
    print(f"\n{table}")
    if options.write:
        write(options.write, BEGIN, END, table)


def table_of(rows: Sequence[Row], out: Predicted) -> str:
    """The table of the manual. Prints the cells of which too few or too many points are in the range."""
    lines = [
        f"| measured | cells | in the range | below | above | with {_MANY} points | {_LEAST:.0%} to {_MOST:.0%} in |"
        " with the best range | variance between cells |".replace("%", " %"),
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for title, engine, metric in _TITLES:
        found = ratios(rows, out, engine, metric)
        own = list(cells(found, LEFT_OUT if metric == "tpot" else LEFT_OUT_OF_TTFT))
        many = [cell for cell in own if cell.points >= _MANY]
        honest = [cell for cell in many if _LEAST <= cell.inside <= _MOST]
        print(f"{title}: {len(honest)} of {len(many)} cells with {_MANY} points have {_LEAST:.0%} to {_MOST:.0%} in")
        for cell in many:
            if cell not in honest:
                shares = f"{cell.inside:4.0%} in  {cell.below:4.0%} below  {cell.above:4.0%} above"
                print(f"  {' '.join(cell.name):60s} {cell.points:4d} points  {shares}")
        if own:
            means = (statistics.mean(getattr(cell, name) for cell in own) for name in Cell._fields[2:])
            shares = " | ".join(f"{mean:.0%}".replace("%", " %") for mean in means)
            errors = log_errors(found, [cell.name for cell in many])
            between = f"{variance_between(errors):.0%}".replace("%", " %")
            lines.append(
                f"| {title} | {len(own)} | {shares} | {len(many)} | {len(honest)} | {best_range(errors)} | {between} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
