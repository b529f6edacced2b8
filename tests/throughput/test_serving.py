"""Requests kept in flight."""

from __future__ import annotations

import pytest

from kvcalc.throughput.serving import room, serve
from tests.throughput.conftest import MakeModel


def test_a_running_request_waits_for_the_others_prefills(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    found = serve(model, 1000, 200, 32, None)
    step = model.decode(32, 1100).seconds
    work = model.prefill_work(1000).seconds
    assert found.tpot_seconds == pytest.approx(step + 32 * work / 200)
    assert found.tokens_per_second == pytest.approx(32 / found.tpot_seconds)
    assert found.requests_per_second == pytest.approx(found.tokens_per_second / 200)
    assert found.prefill_share == pytest.approx(32 * work / 200 / found.tpot_seconds)
    assert found.running == 32


def test_more_requests_are_more_tokens_a_second_and_each_slower(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=8)
    answers = [serve(model, 1000, 1000, n, None) for n in (1, 4, 16, 64, 256)]
    assert [a.tpot_seconds for a in answers] == sorted(a.tpot_seconds for a in answers)
    assert [a.tokens_per_second for a in answers] == sorted(a.tokens_per_second for a in answers)
    assert [a.ttft_seconds for a in answers] == sorted(a.ttft_seconds for a in answers)


def test_requests_without_room_wait_before_their_first_token(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    free, full = serve(model, 1000, 500, 40, 40.0), serve(model, 1000, 500, 60, 40.0)
    assert full.running == 40
    assert full.tpot_seconds == free.tpot_seconds
    assert full.tokens_per_second == free.tokens_per_second
    # Little's law: 60 requests in flight, each staying so long, leave at the rate the devices answer them at.
    stay = free.ttft_seconds + 500 * free.tpot_seconds
    assert full.ttft_seconds == pytest.approx(free.ttft_seconds + 20 / 40 * stay)


def test_an_engine_that_prefills_first_makes_requests_wait_at_the_door(model_of: MakeModel) -> None:
    mixing, first = (model_of("llama-3-70b", engine=e, tensor_parallel_size=4) for e in ("vllm", "sglang"))
    assert mixing.constants.prefill_interference == 1
    assert 0 < first.constants.prefill_interference < 1
    found = serve(first, 2000, 200, 64, None)
    work = first.prefill_work(2000).seconds
    interference = first.constants.prefill_interference
    assert found.tpot_seconds == pytest.approx(first.decode(64, 2100).seconds + interference * 64 * work / 200)
    # The devices do all prefills whoever waits for them.
    assert found.tokens_per_second == pytest.approx(64 / (first.decode(64, 2100).seconds + 64 * work / 200))


def test_with_no_number_given_as_many_run_as_there_is_room_for(model_of: MakeModel) -> None:
    model = model_of("llama-3-8b", engine="tensorrt-llm")
    limit = room(model, 1000, 1000)
    assert limit is not None
    # 131,072 bytes of cache a token; all of a prompt and three quarters of an answer, on average.
    free = (model.gpu.memory_bytes * 0.98 - 2 * 8_030_261_248 - 2 * model.counts.whole_bytes / 2 - 1.5e9) * 0.9
    assert limit == pytest.approx(free / (131_072 * 1750), rel=1e-3)
    assert serve(model, 1000, 1000, None, limit).running == limit
    assert serve(model, 10, 10, None, room(model, 10, 10)).running == model.constants.max_sequences


def test_weights_that_fill_the_device_leave_no_telling(model_of: MakeModel) -> None:
    assert room(model_of("llama-3-70b"), 1000, 1000) is None
    assert room(model_of("mamba-2.8b"), 1000, 1000) is not None
