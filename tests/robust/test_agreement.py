"""The commands answer the same question alike, and their limits are limits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvcalc.errors import KvcalcError
from kvcalc.model.presets import shipped_presets
from tests.conftest import loaded
from tests.documents import estimate

GIB = 2**30
ENGINES = ("logical", "transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp")
CASES = 80


def questions(count: int = CASES) -> list[tuple[str, dict[str, Any]]]:
    """Random presets, engines, lengths and batches. The seed is fixed."""
    rng = random.Random(16)
    names = [preset.name for preset in shipped_presets()]
    return [
        (
            rng.choice(names),
            {
                "engine": rng.choice(ENGINES),
                "context_tokens": rng.choice((1, 100, 1000, 4096, 8191, 32_768, 131_072)),
                "batch_size": rng.choice((1, 2, 7, 64)),
            },
        )
        for _ in range(count)
    ]


def test_the_longest_context_fits_and_one_more_token_does_not() -> None:
    checked = 0
    for name, asked in questions():
        model, memory = loaded(name), 24 * GIB
        try:
            fit: Any = estimate(model, **asked, kv_memory_bytes=memory)["fit"]
        except KvcalcError:
            continue
        for key, limit in (("context_tokens", fit["memory_context_tokens"]), ("batch_size", fit["max_batch_size"])):
            if not limit:
                continue
            assert estimate(model, **{**asked, key: limit}, kv_memory_bytes=memory)["fit"]["fits"], (name, asked, key)
            more = estimate(model, **{**asked, key: limit + 1}, kv_memory_bytes=memory)["fit"]
            assert not more["fits"], (name, asked, key, limit)
            checked += 1
    assert checked > CASES


def test_blocks_fit_in_the_memory() -> None:
    checked = 0
    for name, asked in questions():
        try:
            found = estimate(loaded(name), **asked, kv_memory_bytes=24 * GIB)["engine"]
        except KvcalcError:
            continue
        if found.get("num_gpu_blocks"):
            assert found["num_gpu_blocks"] * found["bytes_per_block"] <= 24 * GIB, (name, asked)
            checked += 1
    assert checked > 10


def test_ranges_contain_the_value_and_no_step_is_faster_than_the_roofline() -> None:
    from kvcalc.throughput.hardware import find_devices

    checked = 0
    for name, asked in questions(60):
        try:
            found = estimate(loaded(name), devices=find_devices("h200x8"), **asked)["throughput"]
        except KvcalcError:
            continue
        if found is None:
            continue
        step = found["decode_step_seconds"]
        assert found["low_seconds"] <= step <= found["high_seconds"], (name, asked)
        assert found["roofline_decode_step_seconds"] <= step * (1 + 1e-9), (name, asked)
        checked += 1
    assert checked > 15


def test_sweep_estimate_compare_and_batch_agree(kvcalc: Any, tmp_path: Path) -> None:
    for name, asked in questions(12):
        engine, tokens, batch = asked["engine"], asked["context_tokens"], asked["batch_size"]
        options = ("--engine", engine, "--context", tokens, "--batch", batch)
        one = kvcalc("estimate", name, *options, "--json")
        line = tmp_path / "line.jsonl"
        line.write_text(json.dumps({"model": name, "engine": engine, "context": tokens, "batch": batch}))
        answered = kvcalc("batch", line).json
        swept = kvcalc("sweep", name, *options, "--json")
        compared = kvcalc("compare", name, *options, "--json")
        if one.status:
            assert answered["error"]["exit_code"] == one.status
            continue
        assert answered == one.json
        cache = one.json["kv_cache"]
        for row in (swept.json["points"][0], compared.json["models"][0]):
            for key in ("total_bytes", "bytes_per_token", "fixed_bytes_per_sequence"):
                if key in row:
                    assert row[key] == cache[key], (name, asked, key)


@pytest.mark.parametrize("name", ["llama-3-70b", "qwen3-32b", "gpt-oss-120b"])
def test_the_plan_passes_and_a_smaller_layout_does_not(kvcalc: Any, name: str) -> None:
    load = ("--input-tokens", "2k", "--output-tokens", "500")
    plan = kvcalc("plan", name, *load, "--concurrency", "16", "--gpu", "h100", "--json").json
    best = plan["best"]
    each = best["requests_per_replica"]
    used = best["tensor_parallel_size"] * best["pipeline_parallel_size"] * best["data_parallel_size"]
    options = (*load, "--concurrency", each, "--engine", best["engine"])
    fits = kvcalc(
        "estimate", name, *options, "--gpu", "h100", "--tp", best["tensor_parallel_size"],
        "--pp", best["pipeline_parallel_size"], "--json",
    ).json["fit"]  # fmt: skip
    assert fits["fits"]
    assert fits["max_batch_size"] >= each
    assert best["num_devices"] == used * best["replicas"]
    if best["num_devices"] > 1:
        fewer = best["num_devices"] - 1
        smaller = kvcalc("plan", name, *load, "--concurrency", "16", "--gpu", "h100", "--max-gpus", fewer, "--json")
        assert smaller.status == 4
