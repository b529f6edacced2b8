"""The same server and load have the same times, whoever prints them: estimate, batch, simulate and plan."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

import kvcalc
from tests.conftest import at_night

MODELS = ("llama-3.1-8b", "qwen3-8b", "gpt-oss-20b", "gemma-3-12b", "qwen3-30b-a3b", "llama-3.3-70b")
ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")
# The means of a run are known to 2 %, and two runs of different lengths are compared.
CLOSE = 0.045


def asked(seed: int) -> dict[str, Any]:
    """A random server and load."""
    draw = Random(seed)
    model, engine = draw.choice(MODELS), draw.choice(ENGINES)
    size = 1 if engine == "llama.cpp" else draw.choice((1, 2, 4))
    size = 4 if model == "llama-3.3-70b" and engine != "llama.cpp" else size
    lengths = [draw.choice((f"fixed:{mean}", mean, mean)) for mean in (draw.randint(50, 4000), draw.randint(20, 400))]
    return {
        "model": "qwen3-8b" if model == "llama-3.3-70b" and size == 1 else model, "engine": engine, "size": size,
        "gpu": draw.choice(("h100", "h200", "a100-80gb")), "lengths": lengths,
        "clients": draw.choice((1, 3, 8, 24, 60)),
    }  # fmt: skip


def times_of(document: Any) -> dict[str, float]:
    return {row["metric"]: row["mean_seconds"] for row in document["times"]}


@pytest.mark.parametrize("seed", [*range(8), *(at_night(seed) for seed in range(8, 200))])
def test_every_command_has_the_same_times(kvcalc: Any, tmp_path: Any, seed: int) -> None:
    question = asked(seed)
    prompt, answer = question["lengths"]
    words = f"--gpu {question['gpu']} --engine {question['engine']} --tp {question['size']} "
    words += f"--input-tokens {prompt} --output-tokens {answer} --concurrency {question['clients']}"
    estimate = kvcalc("estimate", question["model"], *words.split(), "--json").json["throughput"]["serving"]
    line = {
        "model": question["model"], "gpu": question["gpu"], "engine": question["engine"], "tp": question["size"],
        "input_tokens": prompt, "output_tokens": answer, "concurrency": question["clients"],
    }  # fmt: skip
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert kvcalc("batch", str(file)).json["throughput"]["serving"] == estimate
    simulated = kvcalc("simulate", question["model"], *words.split(), "--replicas", "1", "--json").json
    means = times_of(simulated)
    assert estimate["tpot_seconds"] == pytest.approx(means["tpot"], rel=CLOSE)
    assert estimate["ttft_seconds"] == pytest.approx(means["ttft"], rel=CLOSE)
    assert estimate["tokens_per_second"] == pytest.approx(simulated["results"]["tokens_per_second"], rel=CLOSE)


@pytest.mark.parametrize("seed", [0, 1, *(at_night(seed) for seed in range(2, 30))])
def test_a_plan_prints_what_the_estimate_of_its_layout_says(seed: int) -> None:
    draw = Random(seed)
    lengths: dict[str, Any] = {"input_tokens": draw.randint(100, 3000), "output_tokens": draw.randint(50, 400)}
    clients = draw.choice((4, 16, 48))
    limit: dict[str, Any] = {"max_tpot_seconds": 0.08} if seed % 2 else {}
    (row,) = kvcalc.plan(draw.choice(MODELS[:4]), ["h100"], concurrency=clients, **lengths, **limit)["plans"]
    if row["replicas"] != 1:
        return
    served = kvcalc.SpeedQuestion(concurrency=clients, **lengths)
    estimate = kvcalc.estimate(
        row["model"], devices=kvcalc.find_devices("h100"), engine=row["engine"], speed=served,
        tensor_parallel_size=row["tensor_parallel_size"],
    )["throughput"]  # fmt: skip
    assert estimate is not None
    assert estimate["serving"] is not None
    for key in ("ttft_seconds", "tpot_seconds", "tokens_per_second"):
        assert row[key] == pytest.approx(estimate["serving"][key], rel=CLOSE), key
