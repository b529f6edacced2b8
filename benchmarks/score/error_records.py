"""Keep the errors of each release of kvcalc against published measurements, and print them as a table.

    python benchmarks/score/error_records.py add RELEASE --data FOLDER [--program kvcalc]
    python benchmarks/score/error_records.py table [--write docs/reference/errors.md]

`add` asks `PROGRAM batch` once about each question of speed_points.jsonl (`rows`), of the release of the
engine that was measured, and puts the errors of each collection, engine and metric into error_records.tsv, in place of
older ones of that release of kvcalc. Points that the collection marks as suspect are left out. `table` prints all of
them, or writes them between the markers in a file.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.fit.rows import data_folder
from benchmarks.score.throughput import write

RECORDS = Path(__file__).resolve().parent / "error_records.tsv"
BEGIN = "<!-- errors: python benchmarks/score/error_records.py table --write docs/reference/errors.md -->"
END = "<!-- end of errors -->"
COLUMNS = (
    "release", "day", "collection", "engine", "metric", "points", "without_answer", "mean", "median", "within_quarter",
    "in_range",
)  # fmt: skip
_METRICS = {"tpot": "TPOT", "ttft": "TTFT", "decode_step": "decode step"}
Row = dict[str, str]


def predicted(answer: Mapping[str, Any], metric: str) -> tuple[float | None, float | None, float | None]:
    """The predicted seconds and the ends of their range. None where the document has none."""
    speed = answer.get("throughput") or {}
    if metric == "decode_step":
        return speed.get("decode_step_seconds"), speed.get("low_seconds"), speed.get("high_seconds")
    serving = speed.get("serving") or {}
    value, low, high = (serving.get(f"{metric}_{part}seconds") for part in ("", "low_", "high_"))
    return value, low, high


def summary(points: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> Row:
    """The errors of the points of one collection, engine and metric."""
    errors, inside = list[float](), list[bool]()
    for point, answer in zip(points, answers):
        value, low, high = predicted(answer, point["metric"])
        if value is None:
            continue
        errors.append(abs(value / point["seconds"] - 1))
        if low is not None and high is not None:
            inside.append(low <= point["seconds"] <= high)
    figures = {
        "mean": mean(errors) if errors else None, "median": median(errors) if errors else None,
        "within_quarter": mean(error <= 0.25 for error in errors) if errors else None,
        "in_range": mean(inside) if inside else None,
    }  # fmt: skip
    texts = {name: "" if figure is None else f"{figure:.4f}" for name, figure in figures.items()}
    return {"points": str(len(points)), "without_answer": str(len(points) - len(errors)), **texts}


def asked_of(point: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The question of a point, about the release of the engine that was measured."""
    question = {**point["question"], **more}
    if point["version"]:
        question["engine"] = f"{question['engine']}@{point['version']}"
    return question


def ask(program: str, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers of `kvcalc batch`, in the order of the questions."""
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    done = subprocess.run([program, "batch", "-"], input=lines, capture_output=True, text=True, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) != len(questions):
        sys.exit(f"{program}: {len(answers)} answers to {len(questions)} questions: {done.stderr[:200]}")
    return answers


def errors_of(release: str, program: str, points: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of a release of kvcalc."""
    # Since 0.3, times are those that a benchmark's client counts only if a question says so.
    benchmark = {"benchmark": True}
    more = {} if "error" in ask(program, [asked_of(points[0], benchmark)])[0] else benchmark
    answers = ask(program, [asked_of(point, more) for point in points])
    groups = defaultdict[tuple[str, str, str], list[int]](list)
    for place, point in enumerate(points):
        groups[point["set"], point["engine"], point["metric"]].append(place)
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return [
        {
            "release": release, "day": day, "collection": collection, "engine": engine, "metric": metric,
            **summary([points[place] for place in places], [answers[place] for place in places]),
        }
        for (collection, engine, metric), places in sorted(groups.items())
    ]  # fmt: skip


def read() -> list[Row]:
    """The rows of all releases."""
    with RECORDS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def table() -> str:
    """For each collection, engine, metric and release of kvcalc: the median error, the mean, the share in the range."""
    rows = read()
    releases = list(dict.fromkeys(row["release"] for row in rows))
    of_release = {(row["collection"], row["engine"], row["metric"], row["release"]): row for row in rows}
    lines = [
        f"| measured | points | {' | '.join(releases)} |",
        "|---|---|" + "---|" * len(releases),
    ]
    for collection, engine, metric in dict.fromkeys((row["collection"], row["engine"], row["metric"]) for row in rows):
        each = [of_release.get((collection, engine, metric, release)) for release in releases]
        points = max(int(row["points"]) for row in each if row is not None)
        name = f"{collection}, {engine}" if engine != collection else engine
        lines.append(f"| {name}, {_METRICS[metric]} | {points:,} | {' | '.join(map(cell, each))} |")
    return "\n".join(lines)


def cell(row: Row | None) -> str:
    """Such as `9 % (14 %), 87 % in`."""
    if row is None or not row["median"]:
        return "-"
    percent = {name: f"{100 * float(row[name]):.0f} %" for name in ("median", "mean", "in_range") if row[name]}
    inside = f", {percent['in_range']} in" if "in_range" in percent else ""
    return f"{percent['median']} ({percent['mean']}){inside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add")
    adding.add_argument("release")
    adding.add_argument("--data")
    adding.add_argument("--program", default="kvcalc")
    commands.add_parser("table").add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.command == "table":
        print(table())
        if options.write:
            write(options.write, BEGIN, END, table())
        return
    lines = (data_folder(options.data) / "speed_points.jsonl").read_text(encoding="utf-8").splitlines()
    points = [point for point in map(json.loads, lines) if not point["suspect"]]
    old = [row for row in read() if row["release"] != options.release] if RECORDS.exists() else []
    with RECORDS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*old, *errors_of(options.release, options.program, points)])


if __name__ == "__main__":
    main()
