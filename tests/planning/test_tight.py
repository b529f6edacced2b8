"""`tight`: it fits, but the free memory is within the range of the estimated parts."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.planning.plan.document import Targets, plan
from kvcalc.question.question import Question
from kvcalc.question.request_lengths import one_length
from kvcalc.throughput.hardware import find_devices, find_gpu
from tests.documents import estimate


def fit(context: int, **asked: Any) -> dict[str, Any]:
    model = kvcalc.load_model("llama-3.1-8b")
    found: dict[str, Any] = estimate(
        model, devices=find_devices("rtx-4090"), engine="vllm", context_tokens=context, **asked
    )["fit"]
    return found


def test_the_verdict_follows_the_margin() -> None:
    roomy, longest = fit(1024), fit(1024)["max_context_tokens"]
    tight, too_long = fit(longest), fit(longest + 1)
    assert (roomy["verdict"], tight["verdict"], too_long["verdict"]) == ("fits", "tight", "does_not_fit")
    assert (tight["fits"], too_long["fits"]) == (True, False)
    assert tight["free_low_bytes"] < 0 <= tight["free_bytes"] < tight["free_high_bytes"]
    assert roomy["free_low_bytes"] >= 0


def test_the_range_is_that_of_the_lines() -> None:
    found = fit(1024)
    lines = [line for line in found["lines"] if line["high_bytes"] is not None]
    assert sum(line["high_bytes"] - line["bytes"] for line in lines) == found["free_bytes"] - found["free_low_bytes"]
    assert sum(line["bytes"] - line["low_bytes"] for line in lines) == found["free_high_bytes"] - found["free_bytes"]


def test_a_given_memory_is_never_tight() -> None:
    longest = fit(1024, kv_memory_bytes=2**30)["max_context_tokens"]
    found = fit(longest, kv_memory_bytes=2**30)
    assert (found["verdict"], found["free_low_bytes"]) == ("fits", None)


@pytest.mark.parametrize("engine", ["sglang", "llama.cpp", "tensorrt-llm"])
def test_other_engines_with_a_range_are_tight_where_the_memory_ends(engine: str) -> None:
    model, devices = kvcalc.load_model("llama-3.1-8b"), find_devices("rtx-4090")
    asked: dict[str, Any] = {"devices": devices, "engine": engine, "dtype": "int8"}
    longest = estimate(model, context_tokens=1024, **asked)["fit"]["max_context_tokens"]
    found = estimate(model, context_tokens=longest, **asked)["fit"]
    assert found["verdict"] == "tight"
    assert found["free_low_bytes"] < 0 < found["free_high_bytes"]
    assert estimate(model, context_tokens=longest // 2, **asked)["fit"]["verdict"] == "fits"


@pytest.mark.parametrize("engine", ["logical", "transformers"])
def test_engines_without_a_range_are_never_tight(engine: str) -> None:
    model, devices = kvcalc.load_model("llama-3.1-8b"), find_devices("rtx-4090")
    asked: dict[str, Any] = {"devices": devices, "engine": engine}
    longest = estimate(model, context_tokens=1024, **asked)["fit"]["max_context_tokens"]
    found = estimate(model, context_tokens=longest, **asked)["fit"]
    assert (found["verdict"], found["free_low_bytes"]) == ("fits", None)


def ask(strict: bool) -> Any:
    model = kvcalc.load_model("qwen2.5-vl-7b")
    found = plan(
        Question(model), [find_gpu("l4")], one_length(2048, 512), Targets(8, None), strict=strict
    )  # fmt: skip
    return found["plans"][0]


def test_a_plan_marks_tight_layouts_and_strict_leaves_them_out() -> None:
    loose, strict = ask(False), ask(True)
    assert (loose["verdict"], strict["verdict"]) == ("tight", "fits")
    assert strict["num_devices"] >= loose["num_devices"]
