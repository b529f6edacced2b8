"""`--confidence`: one level for all that is judged, and less knowledge never makes an answer better."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest

import kvcalc
from kvcalc.planning.answers import short_form, throughput
from kvcalc.planning.plan.disaggregated import instances
from kvcalc.throughput.serving import serve
from kvcalc.throughput.speed import judged_factor, range_factors
from tests.conftest import at_night

LOAD: dict[str, Any] = {"input_tokens": 2048, "output_tokens": 300, "requests_per_second": 12.0}
# Long requests, because few of them are simulated.
LONG: dict[str, Any] = {"input_tokens": 8000, "output_tokens": 1000}
WIDTHS = (1.0, 1.6, 8.0)


@pytest.fixture
def width(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the power by which ranges are wider: all of them, or those of layouts without a measurement."""

    def widen(power: float, *, unmeasured_only: bool = False) -> None:
        def factors(model: Any, ranges: Any, dtype: str, batch: float, gaps: Any) -> tuple[float, float]:
            low, high = range_factors(model, ranges, dtype, batch, gaps)
            return (low, high) if unmeasured_only and not gaps else (low**power, high**power)

        for module in (throughput, instances):
            monkeypatch.setattr(module, "range_factors", factors)

    return widen


def devices_of(model: str, gpus: list[str] | None = None, **asked: Any) -> list[float]:
    """The devices of each row of a plan, without end for a row without a layout."""
    rows = kvcalc.plan(model, gpus or ["h100"], **{**LOAD, **asked})["plans"]
    return [row["num_devices"] or inf for row in rows]


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("llama-3.1-8b", {"max_tpot_seconds": 0.03}),
        ("llama-3.1-8b", {}),
        ("llama-3.1-8b", {"max_ttft_seconds": 2.0, "engine": "sglang"}),
        ("llama-3.1-8b", {"max_tpot_seconds": 0.03, "tpot_percentile": 90, "requests": 200}),
        ("llama-3.1-8b", {"max_tpot_seconds": 0.03, "disaggregate": True, "transfer": "infiniband-400g"}),
        at_night("qwen3-30b-a3b", {"max_tpot_seconds": 0.02, "requests_per_second": None, "concurrency": 300}),
    ],
    ids=["mean", "no-limit", "sglang", "percentile", "pools", "experts"],
)
def test_a_wider_range_never_makes_a_plan_cheaper(model: str, asked: dict[str, Any], width: Any) -> None:
    found = []
    for power in WIDTHS:
        width(power)
        found.append(min(devices_of(model, **asked)))
    assert found == sorted(found), found
    assert found[0] < found[-1]


def test_a_layout_without_measurements_does_not_win_by_a_wider_range(width: Any) -> None:
    asked: dict[str, Any] = {"input_tokens": 4096, "output_tokens": 1024, "requests_per_second": 10.0}
    ranks = []
    for power in (1.0, 4.0):
        width(power, unmeasured_only=True)
        best: Any = kvcalc.plan("deepseek-v3", ["h200"], **asked, max_tpot_seconds=0.04)["best"]
        ranks.append((best["num_devices"], best["data_parallel_size"]))
    assert ranks[0][0] <= ranks[1][0]
    assert ranks[1][1] == 1


def sustained(confidence: int = 80, **limits: Any) -> float:
    """The rate that one server of the plan's kind sustains."""
    document = kvcalc.check(
        "vllm serve meta-llama/Llama-3.1-8B-Instruct", "h100", **LONG,
        speed=kvcalc.SpeedQuestion(confidence=confidence), **limits,
    )  # fmt: skip
    capacity = document["capacity"]
    assert capacity is not None
    assert capacity["confidence"] == confidence
    return capacity["requests_per_second"]


@pytest.mark.parametrize("limits", [{"max_tpot_seconds": 0.03}, at_night({})], ids=["limit", "no-limit"])
def test_a_wider_range_never_makes_the_sustained_rate_larger(limits: dict[str, Any], width: Any) -> None:
    rates = []
    for power in WIDTHS:
        width(power)
        rates.append(sustained(**limits))
    assert rates[0] > rates[1] > rates[2]


def test_the_sustained_rate_is_that_of_the_simulation_if_the_short_form_says_too_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rate = sustained(max_tpot_seconds=0.03)

    def slow(*args: Any, **more: Any) -> Any:
        short = serve(*args, **more)
        return short._replace(requests_per_second=short.requests_per_second / 8)

    monkeypatch.setattr(short_form, "serve", slow)
    assert sustained(max_tpot_seconds=0.03) == pytest.approx(rate, rel=0.05)


def test_check_sustains_about_what_a_plan_gives_one_replica() -> None:
    limits: dict[str, Any] = {"max_tpot_seconds": 0.03}
    for confidence in (50, 80):
        most = sustained(confidence, **limits)
        fewer, more = (
            devices_of("llama-3.1-8b", **limits, confidence=confidence, **LONG, requests_per_second=share * most)[0]
            for share in (0.85, 1.15)
        )
        assert (fewer, more) == (1, 2)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_judged_times_of_an_estimate_grow_with_the_confidence(engine: str) -> None:
    serving = []
    for confidence in (50, 65, 80, 95):
        speed = kvcalc.SpeedQuestion(input_tokens=1024, output_tokens=200, concurrency=4, confidence=confidence)
        document: Any = kvcalc.estimate("llama-3.1-8b", engine=engine, devices=kvcalc.find_devices("h100"), speed=speed)
        serving.append(document["throughput"]["serving"])
    for metric in ("tpot", "ttft"):
        judged = [one[f"{metric}_judged_seconds"] for one in serving]
        assert judged == sorted(set(judged))
        assert judged[0] == serving[0][f"{metric}_seconds"]
        # A range that is too wide to be printed is judged too.
        assert serving[2][f"{metric}_high_seconds"] in (None, pytest.approx(judged[2]))
    assert [one["confidence"] for one in serving] == [50, 65, 80, 95]


def test_the_factor_is_log_normal() -> None:
    assert [judged_factor(1.5, confidence) for confidence in (50, 80)] == [1.0, 1.5]
    assert judged_factor(1.5, 90) == pytest.approx(1.5 ** (1.2815516 / 0.8416212))


def test_a_line_of_batch_has_a_confidence(kvcalc: Any, tmp_path: Any) -> None:
    asked = {"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm", "input_tokens": 1024, "output_tokens": 200}
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({**asked, "confidence": level}) + "\n" for level in (65, 80)))
    low, high = (json.loads(line)["throughput"]["serving"] for line in kvcalc("batch", str(file)).out.splitlines())
    assert low["tpot_judged_seconds"] < high["tpot_judged_seconds"] == high["tpot_high_seconds"]


@pytest.mark.parametrize("text", ["49", "96", "x", "70.5", ""])
@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_a_confidence_is_from_50_to_95(command: str, text: str, kvcalc: Any) -> None:
    load = ("--input-tokens", "1k", "--output-tokens", "100", "--concurrency", "4")
    found = kvcalc(command, "llama-3.1-8b", "--gpu", "h100", *load, "--confidence", text)
    assert found.status == 2
    assert "from 50 to 95" in found.err


@pytest.mark.parametrize(
    "words",
    [("estimate", "llama-3.1-8b", "--gpu", "h100"), ("check", "--gpu", "h100", "vllm", "serve", "llama-3.1-8b")],
)
def test_a_confidence_needs_the_lengths_of_requests(words: tuple[str, ...], kvcalc: Any) -> None:
    found = kvcalc(*words, "--confidence", "65")
    assert found.status == 2
    assert "--input-tokens" in found.err


@pytest.mark.parametrize(
    ("engine", "settings", "said"),
    [
        ("vllm", {"enforce-eager": True}, "launches without CUDA graphs"),
        ("vllm", {"max-loras": "2", "max-lora-rank": "16"}, "LoRA adapters"),
        ("vllm", {"cudagraph-mode": "none"}, "launches without CUDA graphs"),
        ("vllm", {"cudagraph-mode": "full_and_piecewise"}, None),
        ("sglang", {"max-lora-rank": "16"}, "LoRA adapters (their time is not counted)"),
        ("vllm", {"block-size": "32"}, None),
    ],
)
def test_an_option_that_no_measurement_has_says_so_and_is_judged_by_a_wider_range(
    engine: str, settings: dict[str, Any], said: str | None
) -> None:
    speed = kvcalc.SpeedQuestion(input_tokens=1024, output_tokens=200, concurrency=4)
    asked: dict[str, Any] = {"engine": engine, "devices": kvcalc.find_devices("h100"), "speed": speed}
    plain, other = (
        kvcalc.estimate("llama-3.1-8b", **asked, engine_settings=settings)["throughput"] for settings in ({}, settings)
    )
    assert plain is not None
    assert other is not None
    assert other["evidence"]["outside"] == ([] if said is None else [said])
    times = [one["serving"]["tpot_judged_seconds"] for one in (plain, other) if one["serving"] is not None]
    assert (times[0] < times[1]) == (said is not None)
