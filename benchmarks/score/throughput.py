"""Compare kvcalc's speeds with published measurements: in sample, and with a family, a device or a release left out.

    python benchmarks/score/throughput.py --data FOLDER [--detail] [--write docs/concepts/throughput.md]

Errors are relative errors of seconds, |predicted / measured - 1|, as means of cells: a cell has the points of an
engine, a device, a family and a type of weights, and counts once. All fits are repeated, which takes a minute or two.
Each point is asked of the release that it was measured on. `--detail` adds tables by family, device and release. The
tables of docs/concepts/throughput.md are printed too; `--write` writes them between the markers in that file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.fit.document import cell_of
from benchmarks.fit.fitted import Predicted, device_of, family_of, fitted_to, left_out, release_of
from benchmarks.fit.rows import Row, data_folder, read_rows

_SETS: tuple[tuple[str, str, str, str], ...] = (
    # source, engine, metric, title
    ("silicon", "", "tpot", "serving, TPOT, all"),
    ("silicon", "vllm", "tpot", "serving, TPOT, vLLM"),
    ("silicon", "sglang", "tpot", "serving, TPOT, SGLang"),
    ("silicon", "tensorrt-llm", "tpot", "serving, TPOT, TensorRT-LLM"),
    ("inferencex", "", "tpot", "InferenceX, DeepSeek-R1, TPOT"),
    ("ml-energy", "", "tpot", "ML.ENERGY, vLLM 0.11.1 on h100, decode step"),
    ("llama.cpp", "", "tpot", "llama.cpp, builds of 2025 and 2026"),
    ("llama.cpp 2024", "", "tpot", "llama.cpp, builds of 2024"),
    ("mlx", "", "tpot", "MLX"),
    ("gpt-fast", "", "tpot", "gpt-fast, batch 1"),
    ("silicon", "", "ttft", "serving, TTFT, all"),
    ("silicon", "vllm", "ttft", "serving, TTFT, vLLM"),
    ("silicon", "sglang", "ttft", "serving, TTFT, SGLang"),
    ("silicon", "tensorrt-llm", "ttft", "serving, TTFT, TensorRT-LLM"),
)
BEGIN = "<!-- scores: python benchmarks/score/throughput.py --data FOLDER --write docs/concepts/throughput.md -->"
END = "<!-- end of scores -->"


def collection_of(row: Row) -> str:
    """The collection of a row. InferenceX's means and percentiles are one."""
    return row.source.partition(" p")[0]


def mean_of_cells(rows: Sequence[Row], predicted: Predicted, metric: str) -> str:
    """The mean over cells of each cell's mean error, and the median of the points in brackets."""
    cells: dict[tuple[str, ...], list[float]] = {}
    for row, found in zip(rows, predicted):
        for error in errors_of([row], [found], metric):
            cells.setdefault(cell_of(row), []).append(abs(error))
    if not cells:
        return "-"
    means, points = [statistics.mean(errors) for errors in cells.values()], [e for own in cells.values() for e in own]
    return f"{statistics.mean(means):.0%} ({statistics.median(points):.0%})".replace("%", " %")


def errors_of(rows: Sequence[Row], predicted: Predicted, metric: str) -> list[float]:
    """Predicted / measured - 1 of the rows that have this metric."""
    if metric == "tpot":
        return [found[0] / row.seconds - 1 for row, found in zip(rows, predicted)]
    return [
        found[1] / row.ttft_seconds - 1 for row, found in zip(rows, predicted)
        if row.ttft_seconds is not None and found[1] is not None
    ]  # fmt: skip


def cell(errors: Sequence[float]) -> str:
    """Mean (median) error. Means of TTFT say little, because a few requests that queue are off by far."""
    if not errors:
        return "-"
    found = [abs(e) for e in errors]
    return f"{statistics.mean(found):.0%} ({statistics.median(found):.0%})".replace("%", " %")


def chosen(rows: Sequence[Row], source: str, engine: str) -> list[int]:
    return [i for i, row in enumerate(rows) if row.source == source and engine in ("", row.engine)]


def markdown(rows: Sequence[Row], answers: dict[str, Predicted]) -> str:
    """The tables of docs/concepts/throughput.md."""
    lines = [
        f"| measured | points | cells | {' | '.join(answers)} | within a quarter, family left out |",
        "|---|---|---" + "|---" * len(answers) + "|---|",
    ]
    for source, engine, metric, title in _SETS:
        places = chosen(rows, source, engine)
        some = [rows[i] for i in places]
        found = {name: errors_of(some, [each[i] for i in places], metric) for name, each in answers.items()}
        first, *_ = found.values()
        if not first:
            continue
        family = found["a family left out"]
        within = f"{sum(abs(e) <= 0.25 for e in family) / len(family):.0%}".replace("%", " %")
        cells = len({cell_of(row) for row in some if metric == "tpot" or row.ttft_seconds})
        # A collection that alone has an engine cannot be left out.
        alone = {row.engine for row in some} - {row.engine for row in rows if row.source != source and not row.suspect}
        means = [
            "-" if "collection" in name and alone else mean_of_cells(some, [each[i] for i in places], metric)
            for name, each in answers.items()
        ]
        lines.append(f"| {title} | {len(first):,} | {cells} | {' | '.join(means)} | {within} |")
    reasons = Counter(row.suspect for row in rows if row.suspect)
    lines += ["", "| points not used in the fit, but scored | points |", "|---|---|"]
    lines += [f"| {reason} | {number} |" for reason, number in reasons.most_common()]
    return "\n".join(lines)


def write(path: Path, begin: str, end: str, found: str) -> None:
    """Write the tables between the lines `begin` and `end` in the file at `path`."""
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, is_there, after = rest.partition(end)
    if not is_there:
        sys.exit(f"{path}: no lines {begin} and {end}")
    path.write_text(f"{before}{begin}\n\n{found}\n\n{end}{after}", encoding="utf-8")


def table(title: str, rows: Sequence[Row], predicted: Predicted, key: Callable[[Row], str]) -> None:
    """Print the errors of TPOT by a key."""
    print(f"\n{title}")
    groups: dict[str, list[float]] = {}
    for row, error in zip(rows, errors_of(rows, predicted, "tpot")):
        groups.setdefault(key(row), []).append(error)
    for name, errors in sorted(groups.items()):
        within = sum(abs(e) <= 0.25 for e in errors) / len(errors)
        print(f"{name:44s} {len(errors):5d} {cell(errors):16s} {within:4.0%} {statistics.median(errors):+6.1%}")


def _by_source(key: Callable[[Row], str], row: Row) -> str:
    return f"{row.source} {key(row)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--detail", action="store_true", help="also print tables by family, device and release")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables between the markers in this file")
    options = parser.parse_args()
    rows = read_rows(data_folder(options.data))
    fitted = fitted_to(rows)
    answers = {
        "in sample": fitted.predict(rows),
        "a family left out": left_out(rows, family_of, fitted),
        "a device left out": left_out(rows, device_of, fitted),
        "a release left out": left_out(rows, release_of, fitted),
        "a collection left out": left_out(rows, collection_of, fitted),
    }
    if options.detail:
        for title, predicted in answers.items():
            for name, key in (("family", family_of), ("device", device_of), ("release", release_of)):
                table(f"{title}, by {name}", rows, predicted, partial(_by_source, key))
    scores = markdown(rows, answers)
    print(f"\n{scores}")
    if options.write:
        write(options.write, BEGIN, END, scores)


if __name__ == "__main__":
    main()
