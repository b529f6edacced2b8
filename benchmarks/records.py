"""Take records of `kvcalc measure`, and print them as a table.

    python benchmarks/records.py take [--device cuda] [CASE ...]
    python benchmarks/records.py add PROFILE.json
    python benchmarks/records.py table [--write docs/guides/measure.md]

`take` runs the cases below on the local device and saves each record in benchmarks/results, named by device, day and
case. `add` appends the points of a document of `kvcalc measure --profile` to attention_points.tsv. `table` prints all
records and points as Markdown tables, or writes them between the markers in a file. The figures of a record are valid
for its device and day. `kvcalc measure --compare` shows which figures of two records are comparable.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, POINTS = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "attention_points.tsv"
BEGIN, END = (
    "<!-- records: python benchmarks/records.py table --write docs/guides/measure.md -->",
    "<!-- end of records -->",
)

COMMAND = (sys.executable, "-m", "kvcalc")

# One model for every kind of attention, with 10 to 100 MB of cache. A CPU takes minutes for the prompts.
CASES = {
    "llama-7b": ("llama-7b", "--layers", "2", "--context", "4k"),
    "llama-3-70b": ("llama-3-70b", "--layers", "1", "--context", "8k", "--batch", "2"),
    "palm-540b": ("palm-540b", "--layers", "1", "--context", "2k", "--batch", "8"),
    "deepseek-v3": ("deepseek-v3", "--layers", "1", "--context", "4k", "--batch", "2"),
}


# The loads of a profile that its table shows: tokens and batch.
LOADS = ((4096, 1), (16_384, 1), (65_536, 1), (4096, 32), (65_536, 8))


def slug(text: str) -> str:
    """A file name: lower case, with words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.casefold()).strip("-")


def name_of(record: dict[str, Any], case: str) -> str:
    """The file name, DEVICE_DAY_CASE.json. For a CPU, it also has the number of threads. A profile has no workload."""
    device = record["device"]
    threads = f"-{device['threads']}-threads" if device["threads"] else ""
    ranks = record.get("workload", {}).get("tensor_parallel_size", 1)
    several = f"-tp{ranks}" if ranks > 1 else ""
    return f"{slug(device['name'])}{threads}{several}_{record['environment']['taken_at'][:10]}_{slug(case)}.json"


def take(cases: list[str], device: str, options: list[str]) -> None:
    """Run the cases, each in a separate process."""
    RESULTS.mkdir(exist_ok=True)
    for case in cases or CASES:
        new = RESULTS / f".{case}.new"
        command = [*COMMAND, "measure", *CASES[case], "--device", device, *options]
        subprocess.run([*command, "--save", str(new), "--format", "human"], check=True, cwd=ROOT)
        name = name_of(json.loads(new.read_text()), case)
        new.replace(RESULTS / name)
        print(name, end="\n\n", flush=True)


def table() -> str:
    """All records as Markdown tables, by device, day and name, and a table of each profile."""
    head = ("model", "attention", "layers", "tokens", "batch", "type", "cache", "step p50", "core p50", "KV read",
            "of roof")  # fmt: skip
    blocks: dict[str, list[list[str]]] = {}
    for path in sorted(RESULTS.glob("*_*_*.json")):
        record = json.loads(path.read_text())
        if "points" in record:
            continue  # a profile, for `add`
        blocks.setdefault(_heading(record), []).extend(_row(record, run) for run in record["runs"])
    measured: dict[str, list[dict[str, str]]] = {}
    for point in points():
        measured.setdefault(f"{point['device']}, {point['measured_with']}:", []).append(point)
    profiles = (f"{title}\n\n{profile_table(rows)}" for title, rows in measured.items())
    columns = ["---", "---", *["---:"] * 3, "---", *["---:"] * 5]
    return "\n\n".join([*(f"{title}\n\n{_markdown(head, columns, rows)}" for title, rows in blocks.items()), *profiles])


def points() -> list[dict[str, str]]:
    """The measured times of a layer's attention, of all profiles."""
    lines = POINTS.read_text(encoding="utf-8").splitlines()
    return [*csv.DictReader((line for line in lines if not line.startswith("#")), delimiter="\t")]


def add(profile: dict[str, Any]) -> None:
    """Append the points of a profile to the table of all."""
    device, environment = profile["device"], profile["environment"]
    measured_with = _heading(profile).removeprefix(f"{device['name']}, ").removesuffix(":")
    with POINTS.open("a", encoding="utf-8") as table:
        for point in profile["points"]:
            if point["layer_seconds"] is not None:
                figures = f"{point['layer_seconds'] * 1e6:.2f}", f"{point['fraction_of_binding_roof']:.5f}"
                given = (point[key] for key in ("model", "attention", "kv_dtype", "context_tokens", "batch_size"))
                row = (device["name"], measured_with, *given, point["backend"], *figures, point["binding_roof"])
                print(*row, sep="\t", file=table)
    print(f"{device['name']}, {environment['taken_at'][:10]}: {len(profile['points'])} points")


def profile_table(rows: list[dict[str, str]]) -> str:
    """One row for each model and type of cache: a layer's time and its share of the roof, at the loads of LOADS."""
    points = {
        (
            row["model"],
            row["attention"].upper(),
            row["kv_dtype"],
            int(row["context_tokens"]),
            int(row["batch_size"]),
        ): row
        for row in rows
    }

    def cell(key: tuple[Any, ...]) -> str:
        row = points.get(key)
        if row is None:
            return ""
        return f"{float(row['layer_microseconds']):,.0f} us, {float(row['share_of_roof']):.0%} {row['roof']}"

    kinds = dict.fromkeys(key[:3] for key in points)
    lines = [[*kind, *(cell((*kind, *load)) for load in LOADS)] for kind in kinds]
    loads = [f"{tokens // 1024}k x {batch}" for tokens, batch in LOADS]
    return _markdown(("model", "attention", "type", *loads), ["---"] * 3 + ["---:"] * len(LOADS), lines)


def _markdown(head: Sequence[str], columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, columns, *rows))


def _heading(record: dict[str, Any]) -> str:
    device, environment = record["device"], record["environment"]
    threads = f", {device['threads']} threads" if device["threads"] else ""
    driver = f", driver {environment['driver_version']}" if environment["driver_version"] else ""
    day = environment["taken_at"][:10]
    return f"{device['name']}{threads}{driver}, torch {device['torch_version']}, {day}:"


def _row(record: dict[str, Any], run: dict[str, Any]) -> list[str]:
    workload = record["workload"]
    ranks = workload["tensor_parallel_size"]
    return [
        record["model"]["name"] + (f", {ranks} ranks" if ranks > 1 else ""),
        run["attention"].upper(),
        str(run["num_layers"]),
        f"{run['context_tokens']:,}",
        str(run["batch_size"]),
        workload["kv_dtype"],
        f"{run['held_bytes']:,}",
        _milliseconds(run["decode_step_seconds"]["p50"]),
        _milliseconds(run["attention_core_seconds"]["p50"]),
        f"{run['kv_read_bytes_per_second'] / 2**30:,.1f} GiB/s",
        _share_of_roof(run),
    ]


def _share_of_roof(run: dict[str, Any]) -> str:
    """The larger of attention's shares of the two roofs, which is that of the roof that limits it, by name."""
    shares = {"read": run["fraction_of_roof"], "matmul": run["fraction_of_matmul_roof"]}
    roof = max(shares, key=lambda name: shares[name]["attention_core"])
    return f"{shares[roof]['attention_core']:.0%} {roof}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def with_table(text: str, path: Path) -> str:
    """`text`, the content of `path`, with the table between the markers."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        sys.exit(f"{path}: the lines {BEGIN} and {END} are missing")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def write(path: Path) -> None:
    """Write the table between the markers in the file at `path`."""
    path.write_text(with_table(path.read_text(), path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("take", help="run the cases and save their records")
    taking.add_argument("cases", nargs="*", metavar="CASE", choices=[[], *CASES], help=", ".join(CASES))
    taking.add_argument("--device", default="auto")
    taking.add_argument("--option", action="append", default=[], help="an additional option for kvcalc measure")
    adding = commands.add_parser("add", help="append the points of a profile to attention_points.tsv")
    adding.add_argument("profile", type=Path)
    making = commands.add_parser("table", help="print the records as a Markdown table")
    making.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.command == "take":
        take(arguments.cases, arguments.device, arguments.option)
    elif arguments.command == "add":
        add(json.loads(arguments.profile.read_text()))
    elif arguments.write:
        write(arguments.write)
    else:
        print(table())


if __name__ == "__main__":
    main()
