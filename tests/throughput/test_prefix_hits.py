"""Prompts whose first tokens are in the prefix cache."""

from __future__ import annotations

import pytest

from kvcalc.throughput.serving import serve
from tests.throughput.conftest import MakeModel


def test_nothing_cached_is_the_whole_prefill(model_of: MakeModel) -> None:
    for name in ("llama-3-70b", "gpt-oss-120b", "qwen3.6-27b"):
        model = model_of(name)
        assert model.prefill_work(3000, 0.0) == model.prefill_work(3000)
        assert model.prefill(3000, 2, 0.0) == model.prefill(3000, 2)
        assert serve(model, 3000, 100, 8, 8, 0.0) == serve(model, 3000, 100, 8, 8)


def test_a_prompt_in_two_parts_takes_the_work_of_the_whole(model_of: MakeModel) -> None:
    # The second part attends to the first: only the sum of both is the whole causal triangle.
    for name in ("llama-3-70b", "gemma-3-27b", "deepseek-v3"):
        model = model_of(name)
        first, rest, whole = model.prefill_work(1500), model.prefill_work(9000, 1500), model.prefill_work(9000)
        assert first.seconds + rest.seconds == pytest.approx(whole.seconds)


def test_missed_tokens_attend_to_the_cached_ones(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b")
    assert model.prefill_work(8000, 7000).compute > model.prefill_work(1000).compute


def test_more_hits_are_never_slower(model_of: MakeModel) -> None:
    for engine in ("vllm", "sglang", "llama.cpp"):
        model = model_of("llama-3-70b", engine=engine, tensor_parallel_size=4)
        found = [serve(model, 4000, 200, 40, 32, rate * 4000) for rate in (0.0, 0.2, 0.5, 0.8, 0.99)]
        times = [(one.ttft_seconds, one.tpot_seconds, -one.tokens_per_second) for one in found]
        assert times == sorted(times, reverse=True)
        assert len(set(times)) == len(times)
