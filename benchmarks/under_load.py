"""All scores of times under load in one table: in sample, with the model family left out, and what is wanted.

    python benchmarks/under_load.py --data FOLDER [--in-sample]

FOLDER is that of benchmarks/fit_throughput.py. The constants are fitted anew, so the table is that of the code as it
is, whatever constants.json says. Every figure is the median of |predicted / measured - 1|, if it is not called a mean.
Points of `silicon` are asked as the newest release, as most users ask. It takes 2.5 minutes of processor time, and
1 minute with --in-sample.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from constants_document import describe
from fit_throughput import Fitted, model_of
from score_serving import score
from throughput_data import FAMILIES, Row, data_folder, read_rows

from kvcalc.throughput.constants import Constants
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.serving import serve


class Line(NamedTuple):
    """A line of the table: whose errors, of which metric, and the figure that is wanted."""

    name: str
    kind: str
    metric: str
    wanted: str
    is_mean: bool = False


_RUNS = (
    Line("open loop: TTFT", "open loop", "ttft_mean", "25"),
    Line("open loop: TPOT, mean", "open loop", "tpot_mean", "12", True),
    Line("open loop: whole request, mean", "open loop", "e2e_mean", "12", True),
    Line("the same, repeated prompts known: TTFT", "open loop, repeated", "ttft_mean", ""),
    Line("the same, repeated prompts known: TPOT, mean", "open loop, repeated", "tpot_mean", "", True),
    Line("InferenceX, one pool: TTFT p50", "inferencex-together", "ttft_p50", "25"),
    Line("InferenceX, one pool: TTFT p99", "inferencex-together", "ttft_p99", "30"),
    Line("InferenceX, one pool: TPOT, mean", "inferencex-together", "tpot_mean", "15", True),
    Line("separate pools, SGLang: TTFT p50", "sglang pools", "ttft_p50", "30"),
    Line("separate pools, TensorRT-LLM: TTFT p50", "tensorrt-llm pools", "ttft_p50", ""),
    Line("separate pools: TPOT p50", "pools", "tpot_p50", ""),
    Line("RTX 4090, ShareGPT: TPOT", "rtx-4090", "tpot_mean", "10"),
    Line("2 RTX PRO 6000, ShareGPT: TPOT", "rtx-pro-6000", "tpot_mean", "10"),
    Line("RTX 4090, ShareGPT: whole request", "rtx-4090", "e2e_mean", "15"),
    Line("2 RTX PRO 6000, ShareGPT: whole request", "rtx-pro-6000", "e2e_mean", "15"),
)
_ENGINES = ("vllm", "sglang", "tensorrt-llm")
# A cell with fewer points says little of a range.
_LEAST_POINTS = 10

Groups = dict[tuple[str, str], list[float]]


def predict_newest(fitted: Fitted, row: Row) -> tuple[float, float | None]:
    """TPOT and TTFT of a row as the newest release."""
    labels = [label for label in model_of(row.engine).labels_of(row) if "<" not in label]
    model = SpeedModel(row.model.counts, row.model.gpu, Constants(**fitted.values(row.engine, labels)))
    found = serve(
        model, row.input_tokens, row.output_tokens, row.concurrency, row.running, row.cached_tokens, row.rules
    )
    return found.tpot_seconds, found.ttft_seconds


def points(rows: Sequence[Row], fitted_of: Callable[[Row], Fitted]) -> Groups:
    """The errors of the silicon points by engine and metric."""
    found: Groups = defaultdict(list)
    for row in rows:
        if row.source == "silicon":
            tpot, first = predict_newest(fitted_of(row), row)
            found[row.engine, "tpot"].append(tpot / row.seconds - 1)
            if row.ttft_seconds and first:
                found[row.engine, "ttft"].append(first / row.ttft_seconds - 1)
    return found


def simulated(tasks: Sequence[tuple[Any, list[dict[str, Any]]]], engines: dict[str, str]) -> Groups:
    """The errors of the simulated runs by kind and metric."""
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        scored = [one for part in pool.imap(score, tasks) for one in part]
    found: Groups = defaultdict(list)
    for kind, name, errors in scored:
        for key in _kinds(kind, name, engines[name]):
            for metric, error in errors.items():
                found[key, metric].append(error)
    return found


def _kinds(kind: str, name: str, engine: str) -> list[str]:
    if kind == "trace":
        return ["rtx-4090" if "4090" in name else "rtx-pro-6000"]
    return ["pools", f"{engine} pools"] if kind == "inferencex-split" else [kind]


def figure(errors: Sequence[float], is_mean: bool) -> str:
    """The mean or median error, its bias and the share within 40 %."""
    off = [abs(error) for error in errors]
    middle = statistics.mean(off) if is_mean else statistics.median(off)
    within = sum(e <= 0.4 for e in off) / len(off)
    return f"{100 * middle:4.0f} % ({100 * statistics.median(errors):+4.0f}, {within:4.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--in-sample", action="store_true", help="leave no family out")
    options = parser.parse_args()
    folder = data_folder(options.data)
    runs = [json.loads(line) for line in (folder / "serving_runs.jsonl").read_text(encoding="utf-8").splitlines()]
    engines = {run["id"]: run["engine"] for run in runs}
    rows = read_rows(folder)
    whole = Fitted(rows)

    def document(fitted: Fitted, own: Sequence[Row]) -> Any:
        predicted = [fitted.predict(row) for row in own]
        return describe(own, fitted, predicted, predicted)

    table = document(whole, rows)
    answers = [{**simulated([(table, runs[i::8]) for i in range(8)], engines), **points(rows, lambda row: whole)}]
    if not options.in_sample:
        tasks, without = [], {}
        asked = {FAMILIES.get(run["family"], run["family"]) for run in runs}
        for family in sorted({row.family for row in rows if row.source == "silicon"} | asked):
            kept = [row for row in rows if row.family != family]
            without[family] = Fitted(kept, whole)
            own = [run for run in runs if FAMILIES.get(run["family"], run["family"]) == family]
            if own:
                left = document(without[family], kept)
                tasks += [(left, own[i::4]) for i in range(4)]
        answers.append({**simulated(tasks, engines), **points(rows, lambda row: without[row.family])})
    lines = [
        *_RUNS,
        *(Line(f"silicon, {engine}: TTFT", engine, "ttft", "20") for engine in _ENGINES),
        *(Line(f"silicon, {engine}: TPOT, mean", engine, "tpot", "", True) for engine in _ENGINES),
    ]
    print(f"{'error (bias, within 40 %)':46s} {'points':>6s}  {'in sample':20s}  {'family left out':20s}  wanted")
    for name, kind, metric, wanted, is_mean in lines:
        cells = [figure(found[kind, metric], is_mean) for found in answers]
        print(f"{name:46s} {len(answers[0][kind, metric]):6d}  {'  '.join(f'{c:20s}' for c in cells)}  {wanted}")


if __name__ == "__main__":
    main()
