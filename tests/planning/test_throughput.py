"""The `throughput` part of the estimate document."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.documents import texts
from tests.throughput.test_calibrate import RECORD


def throughput(kvcalc: Any, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = kvcalc("estimate", *arguments, "--json").json["throughput"]
    return found


def warned(result: Any) -> str:
    return "\n".join(texts(result.json))


def test_without_a_device_there_is_no_speed(kvcalc: Any) -> None:
    assert kvcalc("estimate", "llama-3-8b", "--json").json["throughput"] is None
    for options in (("--input-tokens", "1k", "--output-tokens", "10"), ("--ep", "2"), ("--concurrency", "3")):
        result = kvcalc("estimate", "llama-3-8b", *options)
        assert result.status == 2
        assert "--gpu" in result.err


def test_a_step_its_parts_its_range_and_the_roofline_agree(kvcalc: Any) -> None:
    found = throughput(kvcalc, "llama-3-70b", "--gpu", "h100x8", "--engine", "vllm", "--batch", "16", "--dtype", "fp8",
                       "--context", "4k")  # fmt: skip
    step = found["decode_step_seconds"]
    assert sum(found["parts"].values()) == pytest.approx(step)
    assert found["roofline_decode_step_seconds"] <= found["low_seconds"] <= step <= found["high_seconds"]
    assert found["decode_tokens_per_second"] == pytest.approx(16 / step)
    assert found["tokens_per_second_per_sequence"] == pytest.approx(1 / step)
    assert found["parts"][f"{found['bound_by']}_seconds"] == max(found["parts"].values())
    assert found["serving"] is None
    # 69.5e9 weights of 1 byte, except the head's 1.05e9 of 2 bytes, on 8 devices with 3.35e12 bytes per second.
    read = (69_503_033_344 + 128_256 * 8192) / 8 / 3.35e12 + 16 * 4096 * 327_680 / 8 / 3.35e12
    assert found["roofline_decode_step_seconds"] == pytest.approx(read, rel=2e-3)


@pytest.mark.settled
def test_serving_answers_for_requests_in_flight(kvcalc: Any) -> None:
    options = (
        "--gpu",
        "h100x4",
        "--engine",
        "vllm",
        "--dtype",
        "fp8",
        "--input-tokens",
        "2k",
        "--output-tokens",
        "500",
    )
    found = throughput(kvcalc, "llama-3-70b", *options, "--concurrency", "32")["serving"]
    assert (found["input_tokens"], found["output_tokens"], found["concurrency"]) == (2048, 500, 32)
    assert found["running_requests"] == 32
    assert found["tpot_low_seconds"] < found["tpot_seconds"] < found["tpot_high_seconds"]
    assert found["tokens_per_second_per_device"] == pytest.approx(found["tokens_per_second"] / 4)
    most = throughput(kvcalc, "llama-3-70b", *options)["serving"]
    # A place is taken again some steps after its answer has ended.
    assert most["concurrency"] >= most["running_requests"] > 0.9 * most["concurrency"] > 32
    full = throughput(kvcalc, "llama-3-70b", *options, "--concurrency", "5000")["serving"]
    # With a queue, slightly fewer run on average: not always does a place that is free fit the next request.
    # With others waiting, no place stays free, and more run than fit at their full length.
    assert most["running_requests"] <= full["running_requests"] < 1.25 * most["running_requests"]
    assert full["running_requests"] < full["concurrency"]
    assert full["ttft_seconds"] > 10 * most["ttft_seconds"]


@pytest.mark.parametrize(
    "options", [("--input-tokens", "1k"), ("--output-tokens", "1k"), ("--concurrency", "8"), ("--ep", "3", "--tp", "4"),
                ("--ep", "0"), ("--output-tokens", "0", "--input-tokens", "1")],
)  # fmt: skip
def test_half_a_question_is_a_usage_error(kvcalc: Any, options: tuple[str, ...]) -> None:
    result = kvcalc("estimate", "mixtral-8x7b", "--gpu", "h100", *options)
    assert result.status == 2
    assert options[0] in result.err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--gpu", "mi300x", "--engine", "vllm"), "devices like mi300x"),
        (("--gpu", "h100x2", "--engine", "vllm", "--dtype", "int8"), "int8 weights"),
        (
            ("--gpu", "h100x4", "--engine", "vllm", "--batch", "4000", "--context", "64", "--max-num-seqs", "4000"),
            "batches beyond",
        ),
        (("--gpu", "gb200x16", "--engine", "vllm", "--tp", "16"), "--tp beyond 8"),
        (("--gpu", "h100x16", "--engine", "vllm", "--tp", "16"), "NVLink 4 connects"),
        (("--gpu", "h100x4", "--engine", "transformers"), "this engine"),
    ],
)
def test_outside_the_fit_it_warns_and_the_range_is_wider(kvcalc: Any, options: tuple[str, ...], why: str) -> None:
    result = kvcalc("estimate", "llama-3-70b", *options, "--json")
    assert re.search(f"throughput: (not fitted for|no measurement of) .*{re.escape(why)}", warned(result))
    found, usual = result.json["throughput"], throughput(kvcalc, "llama-3-70b", "--gpu", "h100x8", "--engine", "vllm")
    assert found["high_seconds"] / found["decode_step_seconds"] > usual["high_seconds"] / usual["decode_step_seconds"]


def test_inside_the_fit_it_does_not_warn(kvcalc: Any) -> None:
    for engine, gpu in (("vllm", "h100x8"), ("sglang", "b200x8"), ("tensorrt-llm", "h200x8")):
        result = kvcalc("estimate", "llama-3-70b", "--gpu", gpu, "--engine", engine, "--context", "4k", "--json")
        assert "not fitted" not in warned(result)
        assert "no measurement" not in warned(result)


def test_what_is_not_known_is_null_and_says_why(kvcalc: Any) -> None:
    for arguments, why in (
        (("bert-base", "--gpu", "h100"), "does not decode"),
        (("llama-3-8b", "--gpu-memory", "80GB"), "--gpu-bandwidth"),
    ):
        result = kvcalc("estimate", *arguments, "--json")
        assert result.status == 0
        assert result.json["throughput"] is None
        assert why in warned(result)


def test_tensorrt_llm_keeps_and_reads_the_fp8_cache_of_its_quantised_checkpoints(kvcalc: Any) -> None:
    options = ("llama-3-70b", "--gpu", "h200x8", "--engine", "tensorrt-llm", "--dtype", "fp8", "--batch", "64")
    automatic, asked = (
        kvcalc("estimate", *options, "--json"),
        kvcalc("estimate", *options, "--kv-dtype", "bf16", "--json"),
    )
    assert automatic.json["engine"]["kv_dtype_reason"] == "modelopt's fp8 checkpoints use an fp8 cache"
    assert asked.json["engine"]["kv_dtype_reason"] is None
    for part, key in (("kv_cache", "bytes_per_device"), ("fit", "kv_cache_bytes")):
        assert automatic.json[part][key] * 2 == asked.json[part][key]
    halves = [result.json["throughput"]["parts"]["kv_seconds"] for result in (automatic, asked)]
    assert halves[0] == pytest.approx(halves[1] / 2)


def test_llama_cpp_uses_one_device_after_the_other(kvcalc: Any) -> None:
    options = ("llama-3-70b", "--engine", "llama.cpp", "--dtype", "q4_k_m")
    one = throughput(kvcalc, *options, "--gpu", "a6000")
    result = kvcalc("estimate", *options, "--gpu", "a6000", "--pp", "4", "--json")
    four = result.json["throughput"]
    assert one["decode_step_seconds"] < four["decode_step_seconds"] < 1.02 * one["decode_step_seconds"]
    assert throughput(kvcalc, *options, "--gpu", "a6000", "--pp", "1") == one


def test_a_record_of_measure_replaces_constants(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORD))
    plain, own = (throughput(kvcalc, "llama-3-8b", "--gpu", "h100", *more) for more in ((), ("--calibrate", str(path))))
    # The record's device reads 1e12 bytes per second, an H100 3.35e12.
    assert own["roofline_decode_step_seconds"] == pytest.approx(3.35 * plain["roofline_decode_step_seconds"], rel=1e-6)
    assert own["decode_step_seconds"] > plain["decode_step_seconds"]
    path.write_text("{}")
    result = kvcalc("estimate", "llama-3-8b", "--gpu", "h100", "--calibrate", str(path))
    assert result.status == 2
    assert result.err.startswith("kvcalc: --calibrate ")


def test_whole_experts_take_longer_than_split_ones_and_nothing_else_does(kvcalc: Any) -> None:
    options = ("deepseek-v3", "--gpu", "h200x8", "--engine", "sglang", "--batch", "64", "--context", "4k")
    split, whole = throughput(kvcalc, *options)["parts"], throughput(kvcalc, *options, "--ep", "8")["parts"]
    # The busiest rank reads more experts, and has more rows of activations.
    for part in ("weights_seconds", "overhead_seconds"):
        assert split.pop(part) < whole.pop(part)
    split.pop("compute_seconds"), whole.pop("compute_seconds")
    assert whole == split


def test_a_person_reads_the_step_the_parts_and_serving(kvcalc: Any) -> None:
    options = ("--gpu", "h100x4", "--dtype", "fp8", "--engine", "vllm", "--format", "human")
    serving = ("--input-tokens", "2k", "--output-tokens", "500", "--concurrency", "64")
    out = kvcalc("estimate", "llama-3-70b", *options, *serving).out
    for text in ("decode step", "ideal roofline", "communication", "tokens/s", "time to first token", "64 requests"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 80
