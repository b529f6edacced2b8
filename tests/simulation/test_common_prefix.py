"""`--prefix-tokens`: requests whose prompts begin with the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc import CacheReuse

MODEL, PROMPT, ANSWER, PREFIX = "llama-3.1-8b", 2048, 60, 1024
BLOCK = 512
LOAD: dict[str, Any] = {"requests_per_second": 12.0, "requests": 300}


def simulated(engine: str = "vllm", **more: Any) -> Any:
    lengths = {"prompt_tokens": f"fixed:{PROMPT}", "answer_tokens": f"fixed:{ANSWER}"}
    return kvcalc.simulate(MODEL, "h100", engine=engine, **{**lengths, **LOAD, **more})


def prefix(tokens: int) -> dict[str, Any]:
    return {"reuse": CacheReuse(prefix_tokens=tokens)}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_common_prefix_is_a_trace_whose_prompts_begin_with_the_same_blocks(engine: str, tmp_path: Path) -> None:
    arrivals = [place * 0.07 for place in range(200)]
    lengths = [(PROMPT + 37 * (place % 5), ANSWER + place % 7) for place in range(200)]
    plain, named = tmp_path / "plain.csv", tmp_path / "named.jsonl"
    rows = [f"{at},{one[0]},{one[1]}" for at, one in zip(arrivals, lengths)]
    plain.write_text("arrival_seconds,prompt_tokens,answer_tokens\n" + "\n".join(rows))
    with named.open("w") as file:
        for number, (at, (prompt, answer)) in enumerate(zip(arrivals, lengths)):
            own = range(100 * number + 2, 100 * number + 2 + -(-prompt // BLOCK) - 2)
            row = {"timestamp": at * 1000, "input_length": prompt, "output_length": answer, "hash_ids": [0, 1, *own]}
            file.write(json.dumps(row) + "\n")
    no_load = {"prompt_tokens": None, "answer_tokens": None, "requests_per_second": None, "requests": None}
    common = simulated(engine, **no_load, trace=str(plain), **prefix(PREFIX))
    blocks = simulated(engine, **no_load, trace=str(named))
    # In the first steps, a request finds the part of the prefix that has been computed by whole blocks.
    later = (common["times"], blocks["times"])
    for ours, theirs in zip(*later):
        assert ours["p50_seconds"] == pytest.approx(theirs["p50_seconds"], rel=0.01)
    assert common["results"]["cached_tokens"] == pytest.approx(blocks["results"]["cached_tokens"], rel=0.01)
    assert common["results"]["cached_tokens"] > 190 * PREFIX


def test_a_prefix_is_kept_once_and_computed_once() -> None:
    without, found = simulated(), simulated(**prefix(PREFIX))
    assert found["results"]["cached_tokens"] >= 295 * PREFIX
    saved = without["results"]["most_used_blocks"] - found["results"]["most_used_blocks"]
    assert saved > PREFIX / 16
    by_metric = [{row["metric"]: row["mean_seconds"] for row in one["times"]} for one in (without, found)]
    assert by_metric[1]["ttft"] < by_metric[0]["ttft"]


def test_prompts_shorter_than_the_prefix_have_a_part_of_it() -> None:
    found = simulated(prompt_tokens="uniform:600..2000", **prefix(PREFIX))["results"]["cached_tokens"]
    assert 200 * 600 < found < 300 * PREFIX


def test_a_higher_hit_rate_is_found_beside_the_prefix() -> None:
    rate = kvcalc.SpeedQuestion(prefix_hit_rate=0.75)
    found = simulated(speed=rate, **prefix(PREFIX))["results"]["cached_tokens"]
    assert found == pytest.approx(300 * PROMPT * 0.75, rel=0.02)


@pytest.mark.parametrize(("model", "engine", "code"), [
    ("llama-3.1-8b", "llama.cpp", "prefix-copied"), ("gpt-oss-20b", "vllm", "not-shared"),
])  # fmt: skip
def test_requests_that_share_no_memory_find_the_prefix_and_a_note_says_so(model: str, engine: str, code: str) -> None:
    document = kvcalc.simulate(
        model, "h100", engine=engine, prompt_tokens=f"fixed:{PROMPT}", answer_tokens=f"fixed:{ANSWER}",
        **LOAD, **prefix(PREFIX)
    )  # fmt: skip
    assert document["results"]["cached_tokens"] == 300 * PREFIX
    assert code in {row["code"] for row in document["warnings"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prefix-tokens", "8k"), "the prompt has"),
        (("--prefix-tokens", "64", "--engine", "vllm", "--no-enable-prefix-caching"), "caches no prefixes"),
        (("--prefix-tokens", "64", "--engine", "sglang", "--disable-radix-cache"), "caches no prefixes"),
        (("--prefix-hit-rate", "0.5", "--engine", "vllm", "--no-enable-prefix-caching"), "caches no prefixes"),
        (("--prefix-hit-rate", "0.5", "--engine", "sglang", "--disable-radix-cache"), "caches no prefixes"),
    ],
)
def test_a_prefix_that_cannot_be_simulated_is_refused(kvcalc: Any, words: tuple[str, ...], message: str) -> None:
    lengths = ("--input-tokens", PROMPT, "--output-tokens", ANSWER, "--requests-per-second", 4)
    result = kvcalc("simulate", MODEL, "--gpu", "h100", *lengths, *words)
    assert result.status == 2
    assert message in result.err


def test_a_plan_with_a_percentile_needs_fewer_devices_with_a_prefix() -> None:
    load: dict[str, Any] = {"input_tokens": PROMPT, "output_tokens": 300, "requests_per_second": 30.0, "requests": 400}
    target: dict[str, Any] = {"max_ttft_seconds": 0.3, "ttft_percentile": 99}
    plain = kvcalc.plan(MODEL, ["h100"], **load, **target)
    common: Any = kvcalc.plan(MODEL, ["h100"], **load, **target, **prefix(PREFIX))
    assert plain["best"] is not None
    assert common["best"]["num_devices"] < plain["best"]["num_devices"]
    passing = next(row for row in common["finalists"] if row["passes"])
    times = kvcalc.simulate(
        MODEL, "h100", prompt_tokens=PROMPT, answer_tokens=300, requests_per_second=30.0, requests=400,
        replicas=passing["replicas"], tensor_parallel_size=passing["tensor_parallel_size"],
        step_factor=passing["step_factor"], router="random", seed=passing["seed"], **prefix(PREFIX),
    )["times"]  # fmt: skip
    ttft = next(row["p99_seconds"] for row in times if row["metric"] == "ttft")
    assert passing["ttft_p99_seconds"] == pytest.approx(ttft * passing["ttft_factor"])


@pytest.mark.parametrize(
    ("engine", "option"), [("vllm", "no-enable-prefix-caching"), ("sglang", "disable-radix-cache")]
)
@pytest.mark.parametrize("replicas", [{}, {"prefill_replicas": 1, "transfer": "nvlink"}])
def test_named_blocks_are_not_found_if_the_cache_of_prefixes_is_off(
    tmp_path: Path, engine: str, option: str, replicas: Any
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "input_length": 2048, "output_length": 4, "hash_ids": [1, 2, 3, 4]} for at in (0, 9000)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    ask: Any = {"trace": str(trace), "engine": engine, **replicas}
    on = kvcalc.simulate("llama-3.1-8b", "h100", **ask)
    off = kvcalc.simulate("llama-3.1-8b", "h100", **ask, engine_settings={option: True})
    assert on["results"]["cached_tokens"] > 0
    assert off["results"]["cached_tokens"] == 0
    assert "not-shared" in {row["code"] for row in off["warnings"]}
