"""`--prefix-hit-rate`: less prefill, and memory as before."""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc import CacheReuse, estimate
from kvcalc.errors import UsageError
from kvcalc.throughput.hardware import find_devices

QUESTION = (
    "llama-3-70b", "--gpu", "h100x4", "--dtype", "fp8", "--input-tokens", "4k", "--output-tokens", "200",
    "--concurrency", "48",
)  # fmt: skip


def ask(kvcalc: Any, *options: str, engine: str = "vllm") -> dict[str, Any]:
    found: dict[str, Any] = kvcalc("estimate", *QUESTION, "--engine", engine, *options, "--json").json
    return found


@pytest.mark.parametrize("engine", ["logical", "vllm", "sglang", "tensorrt-llm", "llama.cpp"])
def test_a_rate_of_zero_is_no_rate(kvcalc: Any, engine: str) -> None:
    # llama.cpp splits no heads.
    more = ("--tp", "1", "--pp", "4") if engine == "llama.cpp" else ()
    assert ask(kvcalc, *more, engine=engine) == ask(kvcalc, *more, "--prefix-hit-rate", "0", engine=engine)


def test_hits_shorten_prefills_and_leave_the_memory(kvcalc: Any) -> None:
    plain, hit = ask(kvcalc), ask(kvcalc, "--prefix-hit-rate", "0.6")
    before, after = plain["throughput"]["serving"], hit["throughput"]["serving"]
    assert after["ttft_seconds"] < before["ttft_seconds"]
    assert after["prefill_share"] < before["prefill_share"]
    assert after["tokens_per_second"] > before["tokens_per_second"]
    assert hit["throughput"]["prefill_seconds"] < plain["throughput"]["prefill_seconds"]
    for part in ("kv_cache", "fit", "engine", "weights"):
        assert hit[part] == plain[part]
    assert (plain["workload"]["prefix_hit_rate"], hit["workload"]["prefix_hit_rate"]) == (None, 0.6)
    texts = [note["text"] for note in hit["warnings"] if note["code"] == "prefix-hits"]
    assert len(texts) == 1
    assert "60%" in texts[0]
    assert "memory as without hits" in texts[0]


def test_a_decode_step_is_the_same(kvcalc: Any) -> None:
    options = ("estimate", "llama-3-8b", "--gpu", "h100", "--engine", "vllm", "--get", "throughput.decode_step_seconds")
    assert kvcalc(*options).out == kvcalc(*options, "--prefix-hit-rate", "0.9").out


def test_percent_and_share_are_the_same(kvcalc: Any) -> None:
    assert ask(kvcalc, "--prefix-hit-rate", "25%") == ask(kvcalc, "--prefix-hit-rate", "0.25")


@pytest.mark.parametrize("text", ["1", "100%", "-0.1", "nan", "inf", "most", "", "%"])
def test_a_rate_out_of_range_is_refused(kvcalc: Any, text: str) -> None:
    result = kvcalc("estimate", *QUESTION, "--engine", "vllm", "--prefix-hit-rate", text)
    assert result.status == 2
    assert "--prefix-hit-rate" in result.err
    assert "0.3" in result.err


def test_what_has_no_prefix_cache_is_refused_by_name(kvcalc: Any) -> None:
    for model, engine in (("llama-3-8b", "transformers"), ("whisper-large-v3", "vllm")):
        result = kvcalc("estimate", model, "--gpu", "h100", "--engine", engine, "--prefix-hit-rate", "0.5")
        assert result.status == 2, (model, engine)
        assert "prefix cache" in result.err


def test_a_rate_needs_a_device(kvcalc: Any) -> None:
    for command in (("estimate", "llama-3-8b"), ("sweep", "llama-3-8b", "--context", "4k"), ("compare", "llama-3-8b")):
        result = kvcalc(*command, "--prefix-hit-rate", "0.5")
        assert result.status == 2
        assert "--gpu h100" in result.err


def test_comparisons_sweeps_and_plans_take_the_rate(kvcalc: Any) -> None:
    rate, device = ("--prefix-hit-rate", "0.8"), ("--gpu", "h100", "--engine", "vllm", "--json")
    for command, path in (("compare", "models"), ("sweep", "points")):
        arguments = (command, "llama-3-8b", "--context", "16k", *device)
        before, after = kvcalc(*arguments).json[path][0], kvcalc(*arguments, *rate).json[path][0]
        assert after["prefill_seconds"] < before["prefill_seconds"]
        assert after["total_bytes"] == before["total_bytes"]
    load = ("plan", "llama-3.1-8b", "--input-tokens", "8k", "--output-tokens", "100", "--concurrency", "16", *device)
    before, after = kvcalc(*load).json, kvcalc(*load, *rate).json
    assert after["plans"][0]["tokens_per_second"] > before["plans"][0]["tokens_per_second"]
    assert (before["prefix_hit_rate"], after["prefix_hit_rate"]) == (None, 0.8)


@pytest.mark.parametrize(
    ("engine", "option"), [("vllm", "no-enable-prefix-caching"), ("sglang", "disable-radix-cache")]
)
def test_a_cache_without_prefixes_is_sent_but_not_reused(engine: str, option: str) -> None:
    ask: Any = {"engine": engine, "engine_settings": {option: True}, "devices": find_devices("h100")}
    for reuse in (
        CacheReuse(prefix_tokens=512), CacheReuse(turns=2), CacheReuse(offload=(("cpu", 2**30),)),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="caches no prefixes"):
            estimate("llama-3.1-8b", context_tokens=4096, reuse=reuse, **ask)
    sent: Any = estimate("llama-3.1-8b", context_tokens=4096, reuse=CacheReuse(transfer="nvlink"), **ask)
    # 32 layers of K and V, 8 heads of 128 elements of 2 bytes
    assert sent["throughput"]["kv_transfer"]["bytes_per_device"] == 4096 * 32 * 2 * 8 * 128 * 2
