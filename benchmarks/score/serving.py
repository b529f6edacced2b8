"""Score `kvcalc simulate` on measured runs, with constants from a fit to all rows and without the family of each run.

    python benchmarks/score/serving.py --data FOLDER [--in-sample] [--show] [--write docs/concepts/throughput.md]

FOLDER is that of benchmarks/fit/throughput.py. The constants are fitted anew, so the scores are those of the code as it
is. Errors are |predicted / measured - 1| of means and percentiles. Each cell of the table is their mean in sample and
left out, and the medians in brackets; `--write` writes it between the markers in that file. Runs at random arrivals are
scored as they were asked, and with their prompts found in the prefix cache (`repeated`), because their client repeats a
few prompts (`rows.found_again`). `others` is what other simulators said of these. Runs of ShareGPT at 1 and
4 requests a second are on devices that no fit has seen. It takes 2 minutes of processor time.
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

from benchmarks.fit.document import describe
from benchmarks.fit.fitted import Fitted, fitted_to
from benchmarks.fit.rows import FAMILIES, Row, data_folder, found_again, read_rows
from benchmarks.score.throughput import write
from kvcalc.cli.simulate import answer, app
from kvcalc.errors import KvcalcError
from kvcalc.throughput import constants

_SHAREGPT = "speed_more/consumer_vllm.jsonl"
BEGIN = "<!-- serving: python benchmarks/score/serving.py --data FOLDER --write docs/concepts/throughput.md -->"
END = "<!-- end of serving -->"
# The rows of the table: name, group of runs, and the mean or percentile.
ROWS = (
    ("vLLM 0.15.1 on H100, requests at random, prompts in the prefix cache", "open loop, repeated", "mean"),
    ("the same without their prefix cache", "open loop", "mean"),
    ("InferenceX, DeepSeek-R1, one pool: p50", "inferencex-together", "p50"),
    ("the same: p99", "inferencex-together", "p99"),
    ("InferenceX, DeepSeek-R1, separate pools, SGLang: p50", "pools sglang", "p50"),
    ("the same, TensorRT-LLM", "pools tensorrt-llm", "p50"),
    ("300 requests of ShareGPT one by one, RTX 4090 and RTX PRO 6000", "trace", "mean"),
    ("vLLM 0.13, ShareGPT at 1 and 4 requests a second: RTX 3090, 4090, 5090, RTX 5000 Ada, A100", "ShareGPT", "mean"),
    ("the same on Radeon AI PRO R9700", "ShareGPT r9700", "mean"),
)

Errors = dict[str, float]
"""Predicted / measured - 1, by metric."""
Groups = dict[tuple[str, str], list[float]]
"""The errors of runs, by group and metric."""


def simulated(run: Mapping[str, Any], arguments: Sequence[str]) -> Errors | None:
    """The errors of a run. None if kvcalc does not answer it."""
    arguments = [*arguments, "--benchmark"]
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
    times: dict[str, Any] = {row["metric"]: row for row in document["times"]}
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
            {
                "id": f"{name} {rate} {device}",
                "kind": "ShareGPT r9700" if device == "r9700" else "ShareGPT",
                "arguments": arguments,
                "seconds": {},
            },
        )
        run["seconds"][line["metric"]] = line["value"]
    return list(runs.values())


def kind_of(run: Mapping[str, Any]) -> str:
    """The group of runs that a run is scored in."""
    if "kind" in run or "trace" in run:
        return str(run.get("kind", "trace"))
    kind = run["id"].rpartition("-")[0].partition("-20")[0]
    if kind == "inferencex-split":
        return f"pools {run['engine']}"
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


def simulate_all(tasks: Sequence[tuple[Any, list[Mapping[str, Any]]]]) -> list[tuple[str, str, Errors]]:
    """The results of `score` for all tasks."""
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        return [one for part in pool.imap(score, tasks) for one in part]


def in_parts(table: Any, runs: Sequence[Mapping[str, Any]]) -> list[tuple[Any, list[Mapping[str, Any]]]]:
    """Tasks of a few runs each, with the constants of `table`."""
    return [(table, [*runs[place::8]]) for place in range(8)]


def cell(errors: Sequence[float]) -> str:
    """The mean error, and the median in brackets."""
    off = [abs(error) for error in errors]
    return f"{statistics.mean(off):.0%} ({statistics.median(off):.0%})".replace("%", " %") if off else "-"


def within(errors: Sequence[float]) -> str:
    return f"{sum(abs(e) <= 0.4 for e in errors) / len(errors):.0%}".replace("%", " %") if errors else "-"


def table_of(here: Groups, left: Groups) -> str:
    """The table of the manual: the errors in sample and with the family left out."""
    lines = [
        "| runs | runs | TTFT in sample | TTFT left out | within 40 % | TPOT in sample | TPOT left out |"
        " whole request left out |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, kind, part in ROWS:
        ttft, tpot, whole = f"ttft_{part}", f"tpot_{'mean' if (kind, 'tpot_mean') in here else part}", f"e2e_{part}"
        inside, outside = here.get((kind, ttft), []), left.get((kind, ttft), [])
        cells = [
            cell(inside), cell(outside), within(outside or inside), cell(here.get((kind, tpot), [])),
            cell(left.get((kind, tpot), [])), cell(left.get((kind, whole), [])),
        ]  # fmt: skip
        lines.append(f"| {name} | {len(inside)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--in-sample", action="store_true", help="leave no family out")
    parser.add_argument("--show", action="store_true", help="print every run")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table between the markers in this file")
    options = parser.parse_args()
    folder = data_folder(options.data)
    runs = [json.loads(line) for line in (folder / "serving_runs.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = read_rows(folder)
    whole = fitted_to(rows)

    def document(fitted: Fitted, own: Sequence[Row]) -> Any:
        predicted = fitted.predict(own)
        return describe(own, fitted, predicted, predicted)

    unseen = sharegpt_runs(folder) if (folder / _SHAREGPT).is_file() else []
    answers = {"in sample": simulate_all(in_parts(document(whole, rows), [*runs, *unseen]))}
    if not options.in_sample:
        by_family = defaultdict(list)
        for run in runs:
            by_family[FAMILIES.get(run["family"], run["family"])].append(run)
        tasks: list[tuple[Any, list[Mapping[str, Any]]]] = []
        for family, own in by_family.items():
            places = [i for i, row in enumerate(rows) if row.family != family]
            kept = [rows[i] for i in places]
            tasks += in_parts(document(Fitted(kept, whole.correction.of(places), whole), kept), own)
        answers["left out"] = simulate_all(tasks)
    groups: dict[str, Groups] = {name: defaultdict(list) for name in ("in sample", "left out")}
    for how, found in answers.items():
        for kind, name, errors in found:
            if options.show:
                each = "  ".join(f"{metric} {error:+.0%}" for metric, error in errors.items())
                print(f"{how:10s} {kind:20s} {name:32s} {each}")
            for metric, error in errors.items():
                groups[how][kind, metric].append(error)
    for how, own_groups in groups.items():
        for (kind, metric), values in sorted(own_groups.items()):
            shares = f"within 40 % {within(values)}  bias {statistics.median(values):+.0%}"
            print(f"{how:10s} {kind:24s} {metric:10s} n {len(values):3d}  {cell(values):14s}  {shares}")
    table = table_of(groups["in sample"], groups["left out"])
    print(table)
    if options.write:
        write(options.write, BEGIN, END, table)
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
