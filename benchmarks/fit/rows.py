"""Published speed measurements as questions that kvcalc answers. Used by the fit and the score.

The data are not part of the repository. The folder in `--data FOLDER` (or KVCALC_THROUGHPUT_DATA) has
    speed_points.jsonl  a measured point per line: a question of `kvcalc batch`, metric, seconds, family, device,
                        engine, version, date, and `suspect`, a reason not to trust the point
    throughput.jsonl    a published figure per line: model, dtype, gpu, tp, pp, isl, osl, engine, metric, value, source
    serving_runs.jsonl  a measured run per line: arguments of `kvcalc simulate`, and means and percentiles of its times
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.cli.batch import Questions
from kvcalc.cli.question import question_of
from kvcalc.errors import KvcalcError
from kvcalc.planning.answers.load import at_load
from kvcalc.planning.answers.short_form import places_of, step_rules
from kvcalc.releases import Release, parse_release
from kvcalc.server.admission import most_at_once, wanted_requests
from kvcalc.server.budget import budget
from kvcalc.server.case import Case, make_case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.throughput.constants import constants_kind, device_kind, weight_class
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.scheduling import StepRules

_MODELS = {
    "LLaMA v3.1 8B": "llama-3.1-8b", "Mistral 7B": "mistral-7b-v0.3", "Mixtral 8x7B": "mixtral-8x7b",
    "Llama-2-7B": "llama-2-7b", "Llama-2-70B": "llama-2-70b", "Llama-3.1-8B": "llama-3.1-8b",
    "Llama-3-8B": "llama-3-8b", "Llama-3-70B": "llama-3-70b",
}  # fmt: skip
# Models with the same architecture, which are left out together.
FAMILIES = {
    "llama-3.1-8b": "llama-3", "llama-3.1-70b": "llama-3", "llama-3.1-405b": "llama-3", "llama-3.3-70b": "llama-3",
    "llama-3-8b": "llama-3", "llama-3-70b": "llama-3", "llama-2-7b": "llama-2", "llama-2-70b": "llama-2",
    "gpt-oss-20b": "gpt-oss", "gpt-oss-120b": "gpt-oss", "qwen3-8b": "qwen3", "qwen3-32b": "qwen3",
    "qwen3-235b-a22b": "qwen3-moe", "qwen3-30b-a3b": "qwen3-moe", "qwen3-30b-a3b-2507": "qwen3-moe",
    "deepseek-r1": "deepseek-v3", "qwen2.5-14b": "qwen2.5", "qwen2.5-32b": "qwen2.5",
}  # fmt: skip
_GPUS = {
    "H100": "h100", "H200": "h200", "A100-SXM4-80GB": "a100", "A100-SXM-80GB (330 W cap)": "a100", "L40S": "l40s",
    "3080 Ti 12GB": "rtx-3080-ti", "3090 24GB": "rtx-3090", "4070 Ti 12GB": "rtx-4070-ti", "4080 16GB": "rtx-4080",
    "4090 24GB": "rtx-4090", "A100 PCIe 80GB": "a100-pcie-80gb", "A100 SXM 80GB": "a100", "A40 48GB": "a40",
    "L40S 48GB": "l40s", "M1 7-Core GPU 8GB": "m1", "M1 Max 32-Core GPU 64GB": "m1-max",
    "M2 Ultra 76-Core GPU 192GB": "m2-ultra", "RTX 4000 Ada 20GB": "rtx-4000-ada", "RTX 5000 Ada 32GB": "rtx-5000-ada",
    "RTX 6000 Ada 48GB": "rtx-6000-ada", "RTX A6000 48GB": "rtx-a6000",
}  # fmt: skip
_DTYPES = {"bf16": None, "fp16": None, "F16": "fp16", "int8": "int8", "int4-g32": "int4", "Q4_K_M": "q4_k_m"}
# Points that the collection does not mark, with the reason why the fit does not trust them. They are scored.
BELOW_THE_ROOFLINE = "faster than the roofline"


# Of a benchmark: all requests, those after the first ones, and 9 in 10 of the first ones, which is the longest of 99 %
# with 10 requests per client.
ALL, STEADY, FIRST = "all", "steady", "first"
# The runs of the collection's own benchmark, whose requests all have the same lengths. InferenceX's vary by 20 %.
EQUAL_LENGTHS = (("vllm", "0.12.0"), ("tensorrt-llm", "1.0.0rc3"), ("sglang", "0.5.1.post1"))


class Row(NamedTuple):
    """One measurement of a deployment.

    `seconds` is the time of a decode step, or a running request's time per output token. `output_tokens` is 0 if no
    requests are served. `decoding` is the number of requests that decode at the same time: by Little's law from the
    measured times if both are known, else the number that kvcalc expects to run.
    """

    source: str
    family: str
    engine: str
    version: str | None
    date: str | None
    question: dict[str, Any]
    model: SpeedModel
    weight_dtype: str
    context_tokens: float
    input_tokens: int
    output_tokens: int
    concurrency: int
    running: float
    decoding: float
    seconds: float
    ttft_seconds: float | None
    suspect: str | None
    case: Case
    rules: StepRules = StepRules()
    cached_tokens: float = 0.0
    rate: float = 0.0  # requests per second that arrive at random. 0: clients send the next one after each answer
    requests: str = ALL  # those of which the time to first token is known

    @property
    def kind(self) -> str:
        return device_kind(self.model.gpu)

    @property
    def constants_kind(self) -> str:
        return constants_kind(self.model.gpu)

    @property
    def weights(self) -> str:
        return weight_class(self.weight_dtype)

    @property
    def has_equal_lengths(self) -> bool:
        """Whether all requests have the same lengths.

        Then the answers of a step's prompts end together, the next prompts come together, and the clients wait for each
        other again and again.
        """
        return (self.engine, self.version) in EQUAL_LENGTHS

    @property
    def is_cold(self) -> bool:
        """Whether first tokens took seconds even with four requests, as if kernels were compiled during the run."""
        gpu = self.question["gpu"]
        return self.engine == "sglang" and self.version is None and gpu == "b200" and self.weights == "nvfp4"

    @property
    def release(self) -> Release | None:
        """The release that was measured: the named one, or the newest one on that day. None is the newest."""
        for text in (self.version, self.date):
            if not text:
                continue
            try:
                asked = parse_release(self.engine, text)
            except KvcalcError:
                continue
            if asked.release is not None:
                return asked.release
        return None


def data_folder(given: str | None) -> Path:
    """The data folder. If there is none, print how to set it and exit."""
    folder = given or os.environ.get("KVCALC_THROUGHPUT_DATA")
    if not folder or not (Path(folder) / "speed_points.jsonl").is_file():
        print("set --data to a folder with speed_points.jsonl and throughput.jsonl", file=sys.stderr)
        raise SystemExit(2)
    return Path(folder)


def read_rows(folder: Path) -> list[Row]:
    """Every point that kvcalc answers, without those that the collection marks as suspect."""
    asks = Questions()
    rows = []
    points = *_points(folder / "speed_points.jsonl"), *_published(folder / "throughput.jsonl")
    for point in (*points, *_runs(folder / "serving_runs.jsonl")):
        row = _row(asks, point)
        if row is not None:
            rows.append(row)
    return rows


def _points(path: Path) -> Iterator[dict[str, Any]]:
    """The points, with the time to first token beside the time per output token of the same run."""
    points = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    first: dict[str, list[float]] = defaultdict(list)
    for point in points:
        if point["metric"] == "ttft":
            first[_run(point)].append(point["seconds"])
    for point in points:
        if point["metric"] != "ttft" and not point["suspect"]:
            found = first[_run(point)]
            yield {**point, "ttft": found.pop(0) if found else None}


def _run(point: dict[str, Any]) -> str:
    return json.dumps([point[key] for key in ("set", "question", "version", "date")], sort_keys=True)


def _published(path: Path) -> Iterator[dict[str, Any]]:
    """gpt-fast's table, which the logical engine stands for, and llama.cpp's of 2024."""
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["source"].startswith("meta-pytorch/gpt-fast"):
            source, engine, date = "gpt-fast", "logical", "2023-12"
        elif line["source"].startswith("XiongjieDai/"):
            source, engine, date = "llama.cpp 2024", "llama.cpp", "2024-05-20"
        else:
            continue  # the weight types are guessed, or the figure is not for a whole model
        name = _MODELS[line["model"]]
        # llama.cpp splits by layers and uses one device after the other, so devices are pipeline stages.
        context = max(1, int(line["isl"] + line["osl"] / 2))
        question = {
            "model": name, "gpu": _GPUS[line["gpu"].replace("\u2011", "-")], "engine": engine, "tp": line["tp"],
            "pp": line["pp"], "dtype": _DTYPES[line["dtype"]], "batch": 1, "context": context,
        }  # fmt: skip
        yield {
            "set": source, "question": question, "metric": "decode_step", "seconds": 1 / line["value"], "family": name,
            "engine": engine, "version": None, "date": date, "ttft": None,
        }  # fmt: skip


def _runs(path: Path) -> Iterator[dict[str, Any]]:
    """Runs at random arrivals with their means. Runs with clients have the median and the 99th percentile of TTFT."""
    for text in path.read_text(encoding="utf-8").splitlines():
        run = json.loads(text)
        options = dict(zip(run["arguments"][1::2], run["arguments"][2::2]))
        seconds, question = run["seconds"], {"model": run["arguments"][0]}
        if "tpot_mean" not in seconds or "trace" in run or "--prefill-replicas" in options:
            continue
        for option, value in options.items():
            name = _RENAMED.get(option, option.removeprefix("--"))
            question[name] = _mean(value) if name in ("input_tokens", "output_tokens") else value
        question = {name: int(v) if isinstance(v, str) and v.isdigit() else v for name, v in question.items()}
        rate = float(question.pop("requests-per-second", 0))
        for name in ("requests", "replicas", "prefix-tokens"):
            question.pop(name, None)
        if rate:
            question["concurrency"] = max(2, round(rate * seconds["e2e_mean"]))
            question["prefix_hit_rate"] = found_again(question["input_tokens"]) / question["input_tokens"]
            # Some answers are shorter than asked.
            question["output_tokens"] = round((seconds["e2e_mean"] - seconds["ttft_mean"]) / seconds["tpot_mean"])
        point = {
            "question": question, "metric": "tpot", "seconds": seconds["tpot_mean"], "family": run["family"],
            "engine": run["engine"], "version": run["release"], "date": run.get("date"), "suspect": None, "rate": rate,
        }  # fmt: skip
        if rate:
            yield {**point, "set": "serving runs", "ttft": seconds["ttft_mean"], "requests": STEADY}
        else:
            yield {**point, "set": "inferencex p50", "ttft": seconds["ttft_p50"], "requests": STEADY}
            yield {**point, "set": "inferencex p99", "ttft": seconds["ttft_p99"], "requests": FIRST}


_RENAMED = {
    "--input-tokens": "input_tokens", "--output-tokens": "output_tokens", "--prompt-tokens": "input_tokens",
    "--answer-tokens": "output_tokens",
}  # fmt: skip


def found_again(tokens: int) -> int:
    """The tokens of a prompt that are found in vLLM's prefix cache if the whole prompt was computed before.

    inference-perf repeats a few prompts (`data_index % len(self.prompts)`, shared_prefix_datagen.py), and the runs show
    it: the time to first token is 2.5 decode steps and about 7 ms, whether the prompt takes 7 or 25 ms to compute.
    """
    return (tokens - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS


_BLOCK_TOKENS = 16


def _mean(lengths: str) -> int:
    """The mean of a length: 1000 or uniform:900..1100."""
    ends = lengths.removeprefix("uniform:").split("..")
    return round(sum(map(float, ends)) / len(ends))


def _row(asks: Questions, point: dict[str, Any]) -> Row | None:
    """The row of a point, or None if kvcalc has no answer."""
    fields = {key: value for key, value in point["question"].items() if value is not None} | _flags(point)
    try:
        question = question_of(asks.given("estimate", fields), asks.models.model_of)
        case = at_load(make_case(question))
        speed = speed_of(case, [])
    except KvcalcError:
        return None
    if not isinstance(speed, Speed):
        return None
    served = fields.get("output_tokens", 0)
    most = most_at_once(case, budget(case))
    running = places_of(case, wanted_requests(case, most))
    if not running:
        return None  # it does not fit
    concurrency = fields.get("concurrency", running)
    context = fields["input_tokens"] + served / 2 if served else case.workload.context_tokens
    first, seconds, decoding = point["ttft"], point["seconds"], float(running)
    suspect = BELOW_THE_ROOFLINE if seconds < speed.model.roofline(running, context) else _suspect(point, fields)
    if first is not None and suspect is None:
        decode = served * seconds
        decoding = max(1.0, (point.get("rate") or concurrency / (first + decode)) * decode)
    return Row(
        point["set"], FAMILIES.get(point["family"], point["family"]), point["engine"], point["version"],
        point["date"], fields, speed.model, speed.weight_dtype, context, fields.get("input_tokens", 0), served,
        concurrency, running, decoding, seconds, first, suspect, case, step_rules(case, most),
        fields.get("prefix_hit_rate", 0.0) * fields.get("input_tokens", 0), point.get("rate") or 0.0,
        point.get("requests", ALL),
    )  # fmt: skip


def _flags(point: dict[str, Any]) -> dict[str, Any]:
    """The flags that the scripts of a measurement set, and that the collection does not have.

    InferenceX's SGLang looks for new requests less often on Blackwell: after 30 decode steps with 16 clients or more,
    else after 10 (its scripts dsr1_fp4_b200 and dsr1_fp8_b200).
    """
    question = point["question"]
    if point["engine"] != "sglang" or question["gpu"] not in ("b200", "b300") or "deepseek" not in point["family"]:
        return {}
    return {"scheduler-recv-interval": 30 if question.get("concurrency", 0) >= 16 else 10}


def _suspect(point: dict[str, Any], fields: dict[str, Any]) -> str | None:
    """Why the fit does not use a point that the collection does not mark, or None."""
    version, family, gpu = point["version"], point["family"], fields["gpu"]
    if family == "deepseek-v3" and version == "1.2.0rc6.post3":
        return "drafts tokens: 1.5 to 2 times as fast as the previous release at the same points"
    if family == "deepseek-v3" and (version, gpu, fields.get("dtype")) == ("0.5.9", "b200", "fp8"):
        return "drafts tokens: faster than nvfp4 with few requests, slower with many"
    if version == "0.5.1.post1":
        return "all requests start at once: short answers do not wait for other prompts"
    if version == "0.5.8.post1":
        return "two to five of sixteen requests run"
    if family.startswith("gpt-oss") and gpu == "h100" and fields.get("concurrency") == 512:
        return "the client holds about 100 connections"
    if gpu == "b300" and point["engine"] == "sglang" and fields.get("input_tokens", 0) > 4000:
        return "prompts take a second each, eight times as long as on b200"
    if gpu.startswith("mi") and (point["date"] or "9") < "2026":
        return "the first release for this device"
    if family.startswith("phi-3-medium"):
        return BELOW_THE_ROOFLINE
    return None
