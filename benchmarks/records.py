"""Take records of `kvcalc measure`, and print them as a table.

    python benchmarks/records.py take [--device cuda] [CASE ...]
    python benchmarks/records.py table [--write docs/guides/measure.md]

`take` runs the cases below on the local device and saves each record in benchmarks/results, named by device, day and
case. `table` prints all records there as Markdown tables, or writes them between the markers in a file. The figures of
a record are valid for its device and day. `kvcalc measure --compare` shows which figures of two records are comparable.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
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


# The cases of benchmarks/gpu.py are a model with a type of the cache: MODEL-TYPE. The layers are whole periods of each
# model's pattern, and at least two, so that a layer's cache is not in the GPU's own cache.
GPU_LAYERS = {"llama-7b": 2, "llama-3-70b": 2, "deepseek-v3": 2, "gpt-oss-120b": 2, "qwen3-next-80b-a3b": 4}
GPU_KV_DTYPES = ("bf16", "fp8")


def slug(text: str) -> str:
    """A file name: lower case, with words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.casefold()).strip("-")


def name_of(record: dict[str, Any], case: str) -> str:
    """The file name, DEVICE_DAY_CASE.json. For a CPU, it also has the number of threads."""
    device = record["device"]
    threads = f"-{device['threads']}-threads" if device["threads"] else ""
    ranks = record["workload"]["tensor_parallel_size"]
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
    """All records as Markdown tables, by device, day and name."""
    head = (
        "model",
        "attention",
        "layers",
        "tokens",
        "batch",
        "type",
        "cache",
        "step p50",
        "core p50",
        "KV read",
        "of roof",
    )
    blocks: dict[str, list[list[str]]] = {}
    for path in sorted(RESULTS.glob("*_*_*.json")):
        record = json.loads(path.read_text())
        blocks.setdefault(_heading(record), []).extend(_row(record, run) for run in record["runs"])
    parts = []
    for heading, rows in blocks.items():
        lines = [head, ["---", "---", *["---:"] * 3, "---", *["---:"] * 5], *rows]
        parts.append(f"{heading}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


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
    making = commands.add_parser("table", help="print the records as a Markdown table")
    making.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.command == "take":
        take(arguments.cases, arguments.device, arguments.option)
    elif arguments.write:
        write(arguments.write)
    else:
        print(table())


if __name__ == "__main__":
    main()
