"""What must hold between answers about memory and steps, whatever the model, the engine and the device.

Questions are random. `pytest -m fuzz --cases 1000000 --fuzz-seed 7` is a long run.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from random import Random
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError
from tests.conftest import preset_names

pytestmark = pytest.mark.fuzz

ENGINES = (
    "logical", "transformers", "vllm", "vllm@0.11", "sglang", "sglang@0.5.3", "tensorrt-llm", "llama.cpp", "mlx",
)  # fmt: skip
GPUS = ("h100", "h200", "l4", "a100-80gb", "rtx-4090", "mi300x", "b200", "l40s", "m3-max")
CASES_PER_QUESTION = 125
# Keys of rows, and where the figure stands in the document of the same question.
BOTH = {
    "total_bytes": "kv_cache.total_bytes", "fits": "fit.fits", "free_bytes": "fit.free_bytes",
    "decode_step_seconds": "throughput.decode_step_seconds",
}  # fmt: skip
COMPARED = {
    **BOTH, "bytes_per_token": "kv_cache.bytes_per_token", "weights_bytes": "weights.bytes",
    "fixed_bytes_per_sequence": "kv_cache.fixed_bytes_per_sequence", "max_batch_size": "fit.max_batch_size",
    "max_context_tokens": "fit.max_context_tokens",
}  # fmt: skip


def at(document: Mapping[str, Any], path: str) -> Any:
    """The figure under a path, or None if a part of the way is null."""
    found: Any = document
    for key in path.split("."):
        found = found and found[key]
    return found


def different(row: Mapping[str, Any], document: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    """The figures of a row that are not those of the document."""
    found = ((key, row[key], at(document, path)) for key, path in keys.items())
    return [f"{key} {one!r} and {other!r}" for key, one, other in found if one != other]


class Question:
    """One random question about a model on a device, and the same one with changes."""

    def __init__(self, random: Random) -> None:
        self.model = random.choice(preset_names())
        gpu, self.number = random.choice(GPUS), random.choice([1, 2, 4, 8])
        self.number = 1 if gpu == "m3-max" else self.number
        self.gpu = gpu
        self.asked: dict[str, Any] = {
            "context_tokens": random.choice([100, 1024, 4096, 8192, 10_007, 32_768]),
            "batch_size": random.choice([1, 2, 3, 8, 17, 64]),
            "engine": random.choice(ENGINES),
            "kv_dtype": random.choice(["auto", "auto", "fp8"]),
        }

    def estimate(self, gpu: str | None = None, **changed: Any) -> dict[str, Any] | None:
        """The document, or None if the question is refused."""
        asked = {**self.asked, **changed}
        devices = asked.pop("devices", None) or kvcalc.find_devices(gpu or self.device)
        try:
            return kvcalc.estimate(self.model, devices=devices, **asked)  # type: ignore[return-value]
        except KvcalcError:
            return None

    @property
    def device(self) -> str:
        return f"{self.gpu}x{self.number}"

    @property
    def options(self) -> dict[str, Any]:
        """The question as options of a command, and as keys of a line of a batch."""
        asked = self.asked
        return {
            "context": asked["context_tokens"], "batch": asked["batch_size"], "engine": asked["engine"],
            "kv_dtype": asked["kv_dtype"], "gpu": self.device,
        }  # fmt: skip

    @property
    def words(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()]

    def __str__(self) -> str:
        return " ".join(["kvcalc estimate", self.model, *self.words])


def answered(pytestconfig: pytest.Config, name: str) -> list[tuple[Question, dict[str, Any], Random]]:
    """Random questions that are answered, the document of each, and a generator for what is changed in it."""
    random = Random(f"{name} {pytestconfig.getoption('--fuzz-seed')}")
    found: list[tuple[Question, dict[str, Any], Random]] = []
    while len(found) < max(4, pytestconfig.getoption("--cases") // CASES_PER_QUESTION):
        question = Question(random)
        document = question.estimate()
        if document is not None:
            found.append((question, document, random))
    return found


def test_every_way_of_asking_gives_the_same_figures(
    kvcalc: Any, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimate, fit, compare, sweep and a line of a batch, on the command line, and Python."""

    def told(command: str, *words: str) -> Any:
        result = kvcalc(command, *words, "--json")
        assert result.out, f"kvcalc {command} {' '.join(words)}: {result.err}"
        return result.json

    lines, documents = [], []
    for question, document, _ in answered(pytestconfig, "ways"):
        text, words = str(question), [question.model, *question.words]
        assert told("estimate", *words) == document, text
        if document["fit"] is not None:
            fit = kvcalc("fit", *words, "--json")
            assert fit.json["fit"] == document["fit"], text
            server = document["server"] or {"starts": True}
            starts = document["fit"]["fits"] and server["starts"] is not False
            assert fit.status == (0 if starts else 4), text
        (row,) = told("compare", *words)["models"]
        assert not different(row, document, COMPARED if document["fit"] else {"total_bytes": BOTH["total_bytes"]}), text
        (point,) = told("sweep", *words)["points"]
        assert not different(point, document, BOTH if document["fit"] else {"total_bytes": BOTH["total_bytes"]}), text
        lines.append(json.dumps({"model": question.model, **question.options}))
        documents.append(document)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
    assert [json.loads(line) for line in kvcalc("batch", "-").out.splitlines()] == documents


def test_limits_are_exact(pytestconfig: pytest.Config) -> None:
    for question, document, _ in answered(pytestconfig, "limits"):
        fit, text = document["fit"], str(question)
        if fit is None:
            continue
        if question.asked["engine"].startswith("sglang") and document["model"]["attention"] == "none":
            continue  # another context is another server, whose pool has the tokens of one request (--context-length)
        for limit, key, bound in (
            ("memory_context_tokens", "context_tokens", 2**62),
            ("max_batch_size", "batch_size", 2**31 - 1),
        ):
            most = fit[limit]
            if not most or most >= bound:
                continue
            there, beyond = question.estimate(**{key: most}), question.estimate(**{key: most + 1})
            assert there is None or there["fit"]["fits"], f"{text}: {limit} {most} does not fit"
            assert beyond is None or not beyond["fit"]["fits"], f"{text}: {limit} {most}, and one more fits"


# A change of a question, and figures that it may not make smaller.
MORE: dict[str, tuple[Callable[[Question, Random], dict[str, Any]], str]] = {
    "tokens": (
        lambda q, draw: {"context_tokens": q.asked["context_tokens"] + draw.choice([1, 16, 1000])},
        "total_bytes",
    ),
    "sequences": (lambda q, draw: {"batch_size": q.asked["batch_size"] + 1}, "total_bytes"),
    "bits": (lambda q, draw: {"kv_dtype": "fp32"}, "total_bytes"),
}


@pytest.mark.parametrize("name", [*MORE])
def test_more_takes_no_less(name: str, pytestconfig: pytest.Config) -> None:
    change, figure = MORE[name]
    for question, document, random in answered(pytestconfig, name):
        if document["model"]["model_type"].startswith("deepseek_v4"):  # compressors empty their buffers
            continue
        more = question.estimate(**change(question, random))
        if more is not None:
            assert more["kv_cache"][figure] >= document["kv_cache"][figure], f"{question} and more {name}"


def test_twice_as_many_devices_hold_no_less(pytestconfig: pytest.Config) -> None:
    for question, document, _ in answered(pytestconfig, "devices"):
        if question.gpu == "m3-max" or document["fit"] is None:
            continue
        if question.asked["engine"].startswith("sglang") and document["model"]["attention"] == "hybrid":
            continue  # SGLang divides the memory between states and tokens
        more = question.estimate(f"{question.gpu}x{2 * question.number}")
        for limit in ("memory_context_tokens", "max_batch_size") if more and more["fit"] else ():
            one, other = document["fit"][limit], more and more["fit"][limit]
            assert other is None or (one is not None and one <= other), f"{question}: {limit} {one}, {other} with twice"


def test_a_faster_memory_is_never_slower(pytestconfig: pytest.Config) -> None:
    for question, document, _ in answered(pytestconfig, "bandwidth"):
        if document["throughput"] is None:
            continue
        found = []
        for speed in (10**12, 2 * 10**12, 3 * 10**12):
            devices = kvcalc.find_devices(question.device)
            devices = devices._replace(gpu=devices.gpu._replace(bandwidth_bytes_per_second=speed))
            answer = question.estimate(devices=devices)
            if answer is not None and answer["throughput"] is not None:
                found.append(answer["throughput"]["decode_step_seconds"])
        assert all(slow >= fast * (1 - 1e-9) for slow, fast in pairwise(found)), f"{question}: {found}"


def test_values_are_within_their_ranges(pytestconfig: pytest.Config) -> None:
    for question, document, _ in answered(pytestconfig, "ranges"):
        speed, fit = document["throughput"], document["fit"]
        if speed is not None and speed["low_seconds"] is not None:
            assert speed["low_seconds"] <= speed["decode_step_seconds"] <= speed["high_seconds"], question
        if fit is not None and fit["free_low_bytes"] is not None:
            assert fit["free_low_bytes"] <= fit["free_bytes"] <= fit["free_high_bytes"], question
        for line in (fit and fit["lines"]) or ():
            if line["low_bytes"] is not None:
                assert line["low_bytes"] <= line["bytes"] <= line["high_bytes"], f"{question}: {line['name']}"
