"""Serving under a constant number of requests."""

from __future__ import annotations

import pytest

from kvcalc.throughput.serving import REQUESTS_PER_CLIENT, serve
from tests.throughput.conftest import MakeModel


def test_of_the_running_requests_those_past_their_first_token_decode(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    found = serve(model, 1000, 200, 32, 32)
    decode = 200 * found.tpot_seconds
    # Little's law: there are 32 requests, and each of them decodes for a part of the time it stays.
    assert found.decoding == pytest.approx(32 * decode / (found.ttft_seconds + decode), rel=0.01)
    assert 1 < found.decoding < 32


def test_a_running_request_waits_for_the_others_prefills(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    found = serve(model, 1000, 200, 32, 32)
    step = model.decode(found.decoding, 1100).seconds
    stall = found.decoding * model.prefill_work(1000).seconds / 200
    assert found.tpot_seconds == pytest.approx(step + stall, rel=0.01)
    assert found.prefill_share == pytest.approx(stall / found.tpot_seconds, rel=0.01)
    stay = found.ttft_seconds + 200 * found.tpot_seconds
    assert found.requests_per_second == pytest.approx(32 / stay)
    assert found.tokens_per_second == pytest.approx(200 * found.requests_per_second)


def test_a_lone_request_waits_for_its_own_prefill_alone(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    c, found = model.constants, serve(model, 1000, 200, 1, 1)
    assert found.decoding == 1
    prefill = model.prefill(1000).seconds
    steps = c.ttft_steps + c.ttft_prompt_steps * 1000 / 8192
    assert found.ttft_seconds == pytest.approx(c.ttft_seconds + steps * found.tpot_seconds + prefill)


def test_a_lone_request_waits_for_no_other_one(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    c, lone, two = model.constants, serve(model, 1000, 200, 1, 1, 0.0, 2.5), serve(model, 1000, 200, 2, 2, 0.0, 2.5)
    assert lone.tpot_seconds == model.decode(1, 1100).seconds
    steps = max(0.0, c.ttft_steps - 2.5) + c.ttft_prompt_steps * 1000 / 8192
    assert lone.ttft_seconds == pytest.approx(c.ttft_seconds + steps * lone.tpot_seconds + model.prefill(1000).seconds)
    assert two.ttft_seconds == serve(model, 1000, 200, 2, 2).ttft_seconds


def test_tokens_that_are_computed_again_stop_the_others_and_are_waited_for_after_the_first_token(
    model_of: MakeModel,
) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    before, after = serve(model, 1000, 500, 60, 40), serve(model, 1000, 500, 60, 40, 0.0, 0.0, 600.0)
    step = model.decode(after.decoding, 1250).seconds
    stall = after.decoding * model.prefill_work(1000).seconds * 1.6 / 500
    assert after.tpot_seconds == pytest.approx(step + stall, rel=0.01)
    assert after.tokens_per_second < before.tokens_per_second
    # Every request holds its cache for as long as its prompts are computed and its answer lasts, and 40 of 60 do.
    for found, again in ((before, 1.0), (after, 1.6)):
        held = again * model.prefill(1000).seconds + 500 * found.tpot_seconds
        assert found.requests_per_second == pytest.approx(40 / held, rel=0.01)


def test_more_requests_are_more_tokens_a_second_and_each_slower(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=8)
    answers = [serve(model, 1000, 1000, n, n) for n in (1, 4, 16, 64, 256)]
    assert [a.tpot_seconds for a in answers] == sorted(a.tpot_seconds for a in answers)
    assert [a.tokens_per_second for a in answers] == sorted(a.tokens_per_second for a in answers)
    assert [a.ttft_seconds for a in answers] == sorted(a.ttft_seconds for a in answers)


def test_requests_without_room_wait_before_their_first_token(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    full = serve(model, 1000, 500, 60, 40)
    # A request takes no memory while it waits for the step that computes its prompt, so nearly all of the 40 decode.
    decode = 500 * full.tpot_seconds
    assert full.decoding == pytest.approx(40 * decode / (model.prefill(1000).seconds + decode), rel=0.001)
    # Little's law: the rate of finished requests is 60 requests in flight divided by the time each stays.
    assert full.requests_per_second == pytest.approx(60 / (full.ttft_seconds + decode), rel=0.01)
    # There is no first burst: those that find no room start one by one.
    assert full.ttft_seconds == full.steady_ttft_seconds


def test_requests_that_are_put_at_the_end_of_the_queue_wait_there_again(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    once, again = (serve(model, 1000, 500, 160, 40, requeued=share) for share in (0.0, 0.25))
    assert again.tokens_per_second == once.tokens_per_second
    assert again.tpot_seconds > 1.5 * once.tpot_seconds
    # The time of a request in the system is the same: less of it is before the first token.
    stays = [found.ttft_seconds + 500 * found.tpot_seconds for found in (once, again)]
    assert stays[1] == pytest.approx(stays[0], rel=0.001)


@pytest.mark.parametrize("tokens", [100, 1000, 20_000])
def test_a_benchmark_waits_longer_by_its_first_requests(model_of: MakeModel, tokens: int) -> None:
    model, number = model_of("llama-3-70b", tensor_parallel_size=4), 64
    found, work = serve(model, tokens, 500, number, number), model.prefill_work(tokens).seconds
    # Prompt by prompt, or as many together as a step has tokens for: when each of them is computed.
    together = min(number, max(1, 8192 // tokens))
    ends = [work * together * (place // together + 1) for place in range(number)]
    wait = sum(min(end, work * number) for end in ends) / number - work
    assert found.ttft_seconds - found.steady_ttft_seconds == pytest.approx(wait / REQUESTS_PER_CLIENT, rel=0.02)


def test_a_prompt_that_is_computed_in_parts_reads_the_weights_for_each_part(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    whole, parts = (
        serve(model, 1000, 200, 1, 1),
        serve(model, 1000, 200, 1, 1, parts=[(0, 400), (400, 996), (996, 1000)]),
    )
    read = model.prefill(4).seconds
    assert parts.ttft_seconds > whole.ttft_seconds + 1.2 * read
