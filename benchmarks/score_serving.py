"""Score `kvcalc simulate` on measured runs, with constants from a fit without the family of each run.

    python benchmarks/score_serving.py --data FOLDER [--in-sample] [--show]

FOLDER is that of benchmarks/fit_throughput.py. Errors are |predicted / measured - 1| of means and percentiles. Runs at
random arrivals are scored as they were asked, and with their prompts found in the prefix cache (`repeated`), because
their client repeats a few prompts (`throughput_data.found_again`). `others` is what other simulators said of these.
Runs of ShareGPT at 1 and 4 requests a second are on devices that no fit has seen.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from constants_document import describe
from fit_throughput import Fitted
from throughput_data import FAMILIES, data_folder, found_again, read_rows

from kvcalc.cli.simulate import answer, app
from kvcalc.errors import KvcalcError
from kvcalc.throughput import constants

_SHAREGPT = "speed_more/consumer_vllm.jsonl"
Errors = dict[str, float]
"""Predicted / measured - 1, by metric."""


def simulated(run: Mapping[str, Any], arguments: Sequence[str]) -> Errors | None:
    """The errors of a run. None if kvcalc does not answer it."""
    arguments = list(arguments)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as trace:
        if "trace" in run:
            trace.write("arrival_seconds,prompt_tokens,answer_tokens\n")
            trace.writelines(f"{seconds},{prompt},{answer}\n" for seconds, prompt, answer in run["trace"])
            trace.flush()
            arguments += ["--trace", trace.name]
        try:
            document = answer(typer.main.get_command(app).make_context("simulate", arguments).params)
        except KvcalcError as error:
            print(run["id"], error)
            return None
    times = {row["metric"]: row for row in document["times"]}
    found = {}
    for name, measured in run["seconds"].items():
        metric, _, part = name.partition("_")
        if measured:
            found[name] = times[metric][f"{part}_seconds"] / measured - 1
    return found


def sharegpt_runs(folder: Path) -> list[dict[str, Any]]:
    """Runs of vLLM at random arrivals, by device: each line of the file is a figure of one of them."""
    runs: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in (folder / _SHAREGPT).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        _, _, rate = line["protocol"].partition("ShareGPT; rate ")
        if not rate or not line["metric"].endswith("_mean"):
            continue
        name, device, tp = line["model"], line["device"], line["tp"]
        arguments = [
            name, "--gpu", f"{device}x{tp}", "--tp", str(tp), "--engine", "vllm@0.13", "--requests", "400",
            "--requests-per-second", rate.removesuffix("/s"), "--input-tokens", str(round(line["isl"])),
            "--output-tokens", str(round(line["osl"])),
        ]  # fmt: skip
        run = runs.setdefault(
            (line["source"], *arguments),
            {"id": f"{name} {rate} {device}", "kind": f"ShareGPT {device}", "arguments": arguments, "seconds": {}},
        )
        run["seconds"][line["metric"]] = line["value"]
    return list(runs.values())


def kind_of(run: Mapping[str, Any]) -> str:
    """The group of runs that a run is scored in."""
    if "kind" in run or "trace" in run:
        return str(run.get("kind", "trace"))
    kind = run["id"].rpartition("-")[0].partition("-20")[0]
    return "open loop" if kind.startswith("blis") else kind


def score(task: tuple[Any, list[Mapping[str, Any]]]) -> list[tuple[str, str, Errors]]:
    """The group, the name and the errors of each run, with the constants of `task`."""
    table, runs = task
    if table is not None:
        constants._table = lambda: table  # type: ignore[assignment]
    found = []
    for run in runs:
        arguments, kind = run["arguments"], kind_of(run)
        errors = simulated(run, arguments)
        if errors:
            found.append((kind, run["id"], errors))
        if kind == "open loop":
            place, tokens = arguments.index("--prefix-tokens"), int(arguments[arguments.index("--input-tokens") + 1])
            rate = str(found_again(tokens) / tokens)
            again = [*arguments[:place], "--prefix-hit-rate", rate, *arguments[place + 2 :]]
            errors = simulated(run, again)
            if errors:
                found.append(("open loop, repeated", run["id"], errors))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--in-sample", action="store_true", help="use the shipped constants")
    parser.add_argument("--show", action="store_true", help="print every run")
    options = parser.parse_args()
    folder = data_folder(options.data)
    runs = [json.loads(line) for line in (folder / "serving_runs.jsonl").read_text(encoding="utf-8").splitlines()]
    tasks: list[tuple[Any, list[Mapping[str, Any]]]] = []
    if options.in_sample:
        tasks = [(None, runs[place::8]) for place in range(8)]
    else:
        rows = read_rows(folder)
        fitted = Fitted(rows)
        by_family = defaultdict(list)
        for run in runs:
            by_family[FAMILIES.get(run["family"], run["family"])].append(run)
        for family, own in by_family.items():
            kept = [row for row in rows if row.family != family]
            without = Fitted(kept, fitted)
            predicted = [without.predict(row) for row in kept]
            tasks.append((describe(kept, without, predicted, predicted), own))
            print(f"  without {family}", flush=True)
    if (folder / _SHAREGPT).is_file():
        tasks.append((None, sharegpt_runs(folder)))
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        found = [one for part in pool.imap(score, tasks) for one in part]
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kind, name, errors in found:
        if options.show:
            print(f"{kind:20s} {name:32s}", "  ".join(f"{metric} {error:+.0%}" for metric, error in errors.items()))
        for metric, error in errors.items():
            groups[kind, metric].append(error)
    for (kind, metric), values in sorted(groups.items()):
        off = [abs(error) for error in values]
        print(
            f"{kind:20s} {metric:10s} n {len(off):3d}  mean {statistics.mean(off):4.0%}  median"
            f" {statistics.median(off):4.0%}  within 40 % {sum(e <= 0.4 for e in off) / len(off):4.0%}"
            f"  bias {statistics.median(values):+.0%}"
        )
    others: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        for name, said in run["others"].items():
            for metric in ("ttft_mean", "tpot_mean", "e2e_mean"):
                if metric in said:
                    others[metric, name].append(abs(said[metric] / run["seconds"][metric] - 1))
    for (metric, name), off in sorted(others.items()):
        print(f"others {name:24s} {metric:10s} n {len(off):3d}  mean {statistics.mean(off):4.0%}"
              f"  median {statistics.median(off):4.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
