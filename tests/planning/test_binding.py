"""What binds a plan is said: memory, or the time of one request where the number of devices is too small as well."""

from __future__ import annotations

from typing import Any

import kvcalc
from kvcalc.model.resolve import load_model
from kvcalc.planning.plan.binding import too_slow_alone
from kvcalc.planning.plan.targets import Targets
from kvcalc.planning.plan.traffic import Platform, Traffic
from kvcalc.question.question import Question
from kvcalc.question.request_lengths import one_length
from kvcalc.throughput.hardware import find_gpu

LONG: dict[str, Any] = {"input_tokens": 61_440, "output_tokens": 1024, "concurrency": 60}


def memory_notes_of(model: str, gpu: str, **more: Any) -> list[str]:
    found = kvcalc.plan(model, [gpu], engine="vllm", **more)
    return [note["text"] for note in found["warnings"] if note["code"] == "memory-binds"]


def test_a_plan_says_that_memory_binds_and_what_holds_more() -> None:
    (text,) = memory_notes_of("qwen3-coder-480b", "h200", **LONG)
    document = kvcalc.plan("qwen3-coder-480b", ["h200"], engine="vllm", dtype="fp8", **LONG)
    fewer, best = document["best"], kvcalc.plan("qwen3-coder-480b", ["h200"], engine="vllm", **LONG)["best"]
    assert fewer is not None
    assert best is not None
    held = f"memory binds: a replica holds {best['max_batch_size']} requests at once"
    assert text.startswith(held)
    assert f"{fewer['max_batch_size']} with --dtype fp8" in text
    assert (fewer["num_devices"] or 0) < (best["num_devices"] or 0)


def test_a_type_that_holds_no_more_is_not_named() -> None:
    (text,) = memory_notes_of("llama-3.1-8b", "l40s", input_tokens=30_000, output_tokens=100, concurrency=64)
    assert "--kv-dtype fp8" in text
    (text,) = memory_notes_of(
        "llama-3.1-8b", "l40s", input_tokens=30_000, output_tokens=100, concurrency=64, kv_dtype="fp8", dtype="fp8"
    )
    assert "with --" not in text


def test_nothing_is_said_where_memory_does_not_bind() -> None:
    asked: dict[str, Any] = {"input_tokens": 2000, "output_tokens": 200}
    assert memory_notes_of("llama-3.1-8b", "h200", concurrency=8, **asked) == []
    # A limit on the time binds.
    fast = {**asked, "requests_per_second": 40.0, "max_tpot_seconds": 0.012}
    assert memory_notes_of("llama-3.1-8b", "h100", **fast) == []


def test_more_devices_are_not_the_hint_where_one_request_is_too_slow() -> None:
    """43 replicas of tp 8 x pp 8 need 2,752 L40S, and all of them would miss the limit."""
    (row,) = kvcalc.plan(
        "llama-3-70b", ["l40s"], engine="vllm", input_tokens=4096, output_tokens=500, requests_per_second=60.0,
        max_tpot_seconds=0.015,
    )["plans"]  # fmt: skip
    assert "TPOT of one request is" in str(row["reason"])
    assert "--max-gpus" not in str(row["hint"])
    (slow,) = kvcalc.plan(
        "llama-3-70b", ["l40s"], engine="vllm", input_tokens=4096, output_tokens=500, requests_per_second=60.0,
        max_tpot_seconds=5.0,
    )["plans"]  # fmt: skip
    assert "--max-gpus" in str(slow["hint"])


def test_one_layout_that_is_fast_enough_alone_is_enough() -> None:
    def trouble(seconds: float) -> Any:
        question = Question(load_model("llama-3-70b"), engine="vllm")
        targets = Targets(4, None, max_tpot_seconds=seconds)
        return too_slow_alone(
            Traffic(question, one_length(1000, 100), targets, False), Platform(find_gpu("h100"), 16, "vllm")
        )

    assert trouble(0.05) is None
    assert "TPOT of one request is" in trouble(0.001).reason


def test_a_time_that_is_hardly_known_is_named_where_it_binds() -> None:
    asked: dict[str, Any] = {"input_tokens": 2048, "output_tokens": 300, "requests_per_second": 10.0}
    limits: dict[str, Any] = {"max_ttft_seconds": 3.0, "max_tpot_seconds": 0.5}

    def notes(engine: str, **more: Any) -> tuple[list[str], Any]:
        found = kvcalc.plan("llama-3.3-70b", ["h100"], engine=engine, **asked, **{**limits, **more})
        return [note["text"] for note in found["warnings"] if note["code"] == "wide-range"], found["best"]

    (text,), best = notes("sglang")
    factor = best["ttft_judged_seconds"] / best["ttft_seconds"]
    assert factor > 1.5
    assert text.startswith("TTFT binds, and is judged at ")
    assert "--confidence 50" in text
    assert notes("sglang", confidence=50)[0] == []
    assert notes("vllm")[0] == []
    # Two pools say it too.
    split = kvcalc.plan(
        "llama-3.3-70b", ["h100"], engine="sglang", disaggregate=True, transfer="infiniband-400g", **asked, **limits
    )
    assert any(note["code"] == "wide-range" for note in split["warnings"])
