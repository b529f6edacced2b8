"""Ask another calculator for the measured points that kvcalc is scored on, and compare the errors.

    python benchmarks/score/peers.py --data FOLDER --peer PYTHON [--peer PYTHON] [--answers FOLDER] [--write]
        [--docs docs/concepts/throughput.md]

PYTHON is the interpreter of an environment with aiconfigurator. Its newest release has tables for the newest releases
of the engines only. Older releases have older tables, so give two environments to compare with both. `--write` writes
benchmarks/results/peers.json, and `--docs` the table between the markers in that file. Asking takes minutes, so
`--answers` keeps the answers in a folder, and the next run asks only for those that are not there.

The questions go to `cli_estimate` in its `agg` mode, which models continuous batching: the requests in flight are its
batch, and the rest is its default. It uses the newest tables that are not newer than the engine's measured release, or
the oldest ones. kvcalc answers for the measured release, with the constants in the package, and again with constants
fitted without the point's model family.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import kvcalc
from benchmarks.fit.document import errors
from benchmarks.fit.fitted import family_of, fitted_to, left_out
from benchmarks.fit.rows import Row, data_folder, read_rows
from kvcalc.cli.batch import Questions
from kvcalc.cli.question import question_of
from kvcalc.errors import KvcalcError
from kvcalc.planning.answers.load import at_load
from kvcalc.planning.answers.throughput import describe_throughput
from kvcalc.releases import Release, parse_release
from kvcalc.server.case import make_case

TARGET = Path(__file__).resolve().parents[1] / "results" / "peers.json"
BEGIN = (
    "<!-- peers: python benchmarks/score/peers.py --data FOLDER --peer PYTHON --docs docs/concepts/throughput.md -->"
)
END = "<!-- end of peers -->"
_ASK = Path(__file__).resolve().parent / "ask_aiconfigurator.py"
_SETS = ("silicon", "inferencex")
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm"}
_SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "gb200": "gb200"}


class Checkpoint(NamedTuple):
    """The checkpoints that have a model's architecture and weights, the best first, and what to say beside one."""

    paths: tuple[str, ...]
    arguments: Mapping[str, str] = MappingProxyType({})


# The checkpoints by model and dtype. The package has no checkpoint of some dense models in fp8 and nvfp4: fp8 is then
# one scale per tensor, and nvfp4 has an fp8 cache, as in NVIDIA's checkpoints (hf_quant_config.json).
_FP8 = {"gemm_quant_mode": "fp8"}
_NVFP4 = {"gemm_quant_mode": "nvfp4", "kvcache_quant_mode": "fp8"}
_DEEPSEEK = ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3")
# aiconfigurator's planner asks this for gpt-oss with TensorRT-LLM on Blackwell, and `cli_estimate` does not
# (_resolve_quant_modes in sdk/task_v2.py of 0.12.0).
_BLACKWELL_GPT_OSS = {"moe_quant_mode": "w4a8_mxfp4_mxfp8"}
_BLACKWELL = ("b200", "b300", "gb200")
_CHECKPOINTS = {
    ("deepseek-r1", "fp8"): Checkpoint(_DEEPSEEK),
    ("deepseek-r1", "nvfp4"): Checkpoint(("nvidia/DeepSeek-V3.1-NVFP4",)),
    ("deepseek-v3", "nvfp4"): Checkpoint(("nvidia/DeepSeek-V3.1-NVFP4",)),
    ("gpt-oss-120b", None): Checkpoint(("openai/gpt-oss-120b",)),
    ("llama-3.1-70b", "fp8"): Checkpoint(("nvidia/Llama-3.1-70B-Instruct-FP8",)),
    ("llama-3.1-70b", "nvfp4"): Checkpoint(("meta-llama/Meta-Llama-3.1-70B",), _NVFP4),
    ("llama-3.1-8b", "bf16"): Checkpoint(("meta-llama/Meta-Llama-3.1-8B",)),
    ("llama-3.1-8b", "fp8"): Checkpoint(("meta-llama/Meta-Llama-3.1-8B",), _FP8),
    ("minimax-m2.5", "fp8"): Checkpoint(("MiniMaxAI/MiniMax-M2.5",)),
    ("minimax-m2.5", "nvfp4"): Checkpoint(("nvidia/MiniMax-M2.5-NVFP4",)),
    ("qwen3-235b-a22b", "fp8"): Checkpoint(("Qwen/Qwen3-235B-A22B-FP8",)),
    ("qwen3-32b", "bf16"): Checkpoint(("Qwen/Qwen3-32B",)),
    ("qwen3-32b", "fp8"): Checkpoint(("Qwen/Qwen3-32B-FP8",)),
    ("qwen3-32b", "nvfp4"): Checkpoint(("Qwen/Qwen3-32B",), _NVFP4),
}  # fmt: skip

Seconds = tuple[float, float | None]


class Compared(NamedTuple):
    """One measured time beside the predicted ones."""

    set: str
    family: str
    engine: str
    metric: str
    measured: float
    peer: float
    shipped: float
    family_left_out: float


class Peer:
    """Another calculator in an environment of its own. `python` is that environment's interpreter."""

    def __init__(self, python: str) -> None:
        self.python = python
        self.about = self._run("about", [])[0]

    def ask(self, questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers, in the order of the questions."""
        return self._run("estimate", questions)

    def _run(self, task: str, questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        text = "".join(f"{json.dumps(question)}\n" for question in questions)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [self.python, str(_ASK), task]
        done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return [json.loads(line) for line in done.stdout.splitlines()]


def peer_question(row: Row, about: dict[str, Any]) -> dict[str, Any] | str:
    """The question for aiconfigurator, or the reason if it cannot be asked."""
    fields = row.question
    system, engine = _SYSTEMS.get(fields["gpu"]), _ENGINES[row.engine]
    versions = about["databases"].get(system, {}).get(engine)
    if system is None or not versions:
        return f"no tables for {fields['gpu']} with {row.engine}"
    checkpoint = _CHECKPOINTS.get((fields["model"], fields.get("dtype")), Checkpoint(()))
    path = next((path for path in checkpoint.paths if path in about["models"]), None)
    if path is None:
        return f"no checkpoint for {fields['model']} in {fields.get('dtype') or 'its own dtype'}"
    more = checkpoint.arguments
    if path == "openai/gpt-oss-120b" and engine == "trtllm" and fields["gpu"] in _BLACKWELL:
        more = _BLACKWELL_GPT_OSS
    ranks, whole = fields.get("tp", 1), fields.get("ep", 1)
    return {
        "versions": nearest(row.engine, versions, row.release),
        "arguments": {
            "model_path": path, "system_name": system, "backend_name": engine, "mode": "agg",
            "isl": fields["input_tokens"], "osl": fields["output_tokens"], "batch_size": fields["concurrency"],
            "tp_size": ranks, "moe_tp_size": ranks // whole, "moe_ep_size": whole, **more,
        },
    }  # fmt: skip


def nearest(engine: str, versions: Iterable[str], measured: Release | None) -> list[str]:
    """The releases in the order to try them: those not newer than `measured`, the newest first, then newer ones.

    `measured` is None if the release is not known. Then the newest comes first.
    """
    ages = {version: parse_release(engine, version).release for version in versions}
    known = sorted((age, version) for version, age in ages.items() if age is not None)
    older = [version for age, version in known if measured is None or age <= measured]
    return older[::-1] + [version for _, version in known if version not in older]


def ask_all(peer: Peer, rows: Sequence[Row], folder: Path | None) -> list[dict[str, Any]]:
    """The peer's answer to each row. Answers in `folder` are not asked for again."""
    path = folder / f"aiconfigurator-{peer.about['release']}.json" if folder else None
    known: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8")) if path and path.exists() else {}
    found = [peer_question(row, peer.about) for row in rows]
    # Its tables take memory, so each system and engine has a process of its own.
    groups: dict[tuple[str, str], set[str]] = defaultdict(set)
    for question in found:
        if not isinstance(question, str) and json.dumps(question) not in known:
            asked = question["arguments"]
            groups[asked["system_name"], asked["backend_name"]].add(json.dumps(question))
    for key, group in sorted(groups.items()):
        print(f"  aiconfigurator {peer.about['release']}: {len(group)} questions for {' '.join(key)}", flush=True)
        texts = sorted(group)
        known |= zip(texts, peer.ask([json.loads(text) for text in texts]), strict=True)
        if path:
            path.write_text(json.dumps(known), encoding="utf-8")
    return [{"error": question} if isinstance(question, str) else known[json.dumps(question)] for question in found]


def shipped(rows: Sequence[Row]) -> list[Seconds]:
    """What kvcalc answers for the measured release, with the constants in the package."""
    asks = Questions()
    return [_serving(asks, row) for row in rows]


def _serving(asks: Questions, row: Row) -> Seconds:
    named = [f"{row.engine}@{release}" for release in (row.version, row.date) if release]
    for engine in (*named, row.engine):
        try:
            question = question_of(asks.given("estimate", {**row.question, "engine": engine}), asks.models.model_of)
            document = describe_throughput(at_load(make_case(question)), [])
        except KvcalcError:
            continue  # not a release
        if document is not None and document["serving"]:
            return document["serving"]["tpot_seconds"], document["serving"]["ttft_seconds"]
    raise ValueError(f"no answer to {row.question}")


def compare(
    rows: Sequence[Row], answers: Sequence[dict[str, Any]], own: Sequence[Seconds], without: Sequence[Seconds]
) -> list[Compared]:
    """The measured times for which both calculators have a prediction."""
    found = []
    for row, answer, mine, kept in zip(rows, answers, own, without, strict=True):
        if "error" in answer:
            continue
        group = row.source, row.family, row.engine
        found.append(Compared(*group, "tpot", row.seconds, answer["tpot_seconds"], mine[0], kept[0]))
        if row.ttft_seconds and mine[1] is not None and kept[1] is not None:
            found.append(Compared(*group, "ttft", row.ttft_seconds, answer["ttft_seconds"], mine[1], kept[1]))
    return found


def tables(points: Sequence[Compared], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The errors of both calculators, by the fields named in `keys`."""
    groups: dict[tuple[str, ...], list[Compared]] = defaultdict(list)
    for point in points:
        groups[tuple(getattr(point, key) for key in keys)].append(point)
    return [
        {
            **dict(zip(keys, group)),
            "points": len(found),
            "peer": errors([point.peer / point.measured for point in found]),
            "kvcalc": errors([point.shipped / point.measured for point in found]),
            "kvcalc_family_left_out": errors([point.family_left_out / point.measured for point in found]),
        }
        for group, found in sorted(groups.items())
    ]


def reason(error: str) -> str:
    """The error without the details of the question, which follow the kind of error."""
    return re.split(r" for | \(| \{|: the |'", error)[0] if ": " in error else error


def describe(
    peer: Peer, rows: Sequence[Row], answers: Sequence[dict[str, Any]], points: Sequence[Compared]
) -> dict[str, Any]:
    """The part of the document about one peer."""
    answered = [(row, answer) for row, answer in zip(rows, answers) if "error" not in answer]
    releases = Counter(f"{row.engine} {row.version or row.date} -> {answer['version']}" for row, answer in answered)
    return {
        "name": "aiconfigurator",
        "release": peer.about["release"],
        "runs_asked": len(rows),
        "runs_answered": len(answered),
        "runs_beyond_cache": sum(answer["beyond_cache"] for _, answer in answered),
        "not_answered": dict(Counter(reason(answer["error"]) for answer in answers if "error" in answer).most_common()),
        # Measured release -> the release whose tables answered, with the number of runs.
        "releases": dict(sorted(releases.items())),
        "all": tables(points, ["metric"]),
        "by_engine": tables(points, ["metric", "engine"]),
        "by_family": tables(points, ["set", "metric", "family", "engine"]),
    }


_ALL_ENGINES = "all engines"


def markdown(document: dict[str, Any]) -> str:
    """The table of docs/concepts/throughput.md: the mean of the cells' mean errors, and of points the median in
    brackets and the share within 25 %.

    A cell has the points of one family and engine in one collection, and counts once, as many points are alike.
    """
    columns = ("peer", "measured", "points", "cells", "peer's error", "kvcalc's error", "kvcalc's, family left out")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for peer in document["peers"]:
        for part in (*peer["by_engine"], *({**part, "engine": _ALL_ENGINES} for part in peer["all"])):
            cells = [
                cell for cell in peer["by_family"]
                if cell["metric"] == part["metric"] and part["engine"] in (cell["engine"], _ALL_ENGINES)
            ]  # fmt: skip
            texts = [
                f"{statistics.mean(cell[who]['mean'] for cell in cells):.0%} ({part[who]['median']:.0%}), "
                f"{part[who]['within_25_percent']:.0%}"
                for who in ("peer", "kvcalc", "kvcalc_family_left_out")
            ]
            head = f"{peer['name']} {peer['release']} | {part['metric'].upper()}, {part['engine']} | {part['points']:,}"
            lines.append(f"| {head} | {len(cells)} | {' | '.join(texts).replace('%', ' %')} |")
    return "\n".join(lines)


def write_docs(path: Path, table: str) -> None:
    """Write the table between the markers in the file at `path`."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{path}: no lines {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--peer", action="append", required=True, metavar="PYTHON", help="may be given several times")
    parser.add_argument("--answers", type=Path, metavar="FOLDER", help="keep the peers' answers here")
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.parent.name}/{TARGET.name}")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the table between the markers in this file")
    options = parser.parse_args()
    everything = read_rows(data_folder(options.data))
    peers = [Peer(python) for python in options.peer]
    chosen = [i for i, row in enumerate(everything) if row.source in _SETS]
    rows = [everything[i] for i in chosen]
    asked = [ask_all(peer, rows, options.answers) for peer in peers]
    own = shipped(rows)
    kept = left_out(everything, family_of, fitted_to(everything))
    without = [kept[i] for i in chosen]
    document = {
        "made_by": "benchmarks/score/peers.py",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "kvcalc": kvcalc.__version__,
        "sets": list(_SETS),
        "asked": "cli_estimate in agg mode (continuous batching), batch_size = requests in flight, defaults otherwise",
        "errors": "of seconds, |predicted / measured - 1|, on the points that both calculators answer",
        "peers": [
            describe(peer, rows, answers, compare(rows, answers, own, without)) for peer, answers in zip(peers, asked)
        ],
    }
    table = markdown(document)
    print(table)
    if options.write:
        TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {TARGET}")
    if options.docs:
        write_docs(options.docs, table)


if __name__ == "__main__":
    main()
