"""Serving under a constant number of requests."""

from __future__ import annotations

from math import exp

import pytest

from kvcalc.throughput.prompts import Prompts
from kvcalc.throughput.roofline import Part, SpeedModel
from kvcalc.throughput.scheduling import StepRules
from kvcalc.throughput.serving import REQUESTS_PER_CLIENT, Serving, requests_per_client, serve
from tests.throughput.conftest import MakeModel


def added(model: SpeedModel, prompt: int, found: Serving, answer: int, again: float = 1.0) -> float:
    """The seconds that a prompt adds to the steps of the decoding requests, which compute it with their tokens.

    Prompts come at random, so a step that has some has the mean of a Poisson distribution without its zero.
    """
    arriving = found.decoding * again / answer * model.tokens_per_step
    some = arriving / (1 - exp(-arriving))
    return model.beside([Part(0, prompt, 1.0, some)], found.decoding).seconds / some


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
    stall = found.decoding * added(model, 1000, found, 200) / 200
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
    host = c.ttft_seconds + 1000 * c.ttft_token_seconds + c.ttft_steps * found.tpot_seconds
    assert found.steady_ttft_seconds == pytest.approx(host + prefill)
    assert found.ttft_seconds == pytest.approx(host + prefill + c.first_seconds / requests_per_client(1))


def test_the_host_reads_the_whole_prompt_even_if_most_of_it_is_cached(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    none = SpeedModel(model.counts, model.gpu, model.constants._replace(ttft_token_seconds=0.0))
    for clients in (1, 8):
        whole, without = (serve(one, 1000, 200, clients, clients, cached_tokens=900) for one in (model, none))
        host = whole.random_ttft_seconds - without.random_ttft_seconds
        assert host == pytest.approx(1000 * model.constants.ttft_token_seconds, rel=0.05)


def test_a_short_prompt_waits_until_the_host_has_launched_its_kernels(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    launch = model.constants.prompt_launch_seconds
    short, long = model.prefill(100).seconds, model.prefill(20_000).seconds
    slow = SpeedModel(
        model.counts, model.gpu, model.constants._replace(prompt_launch_seconds=2 * short / model.counts.launches)
    )
    none = SpeedModel(model.counts, model.gpu, model.constants._replace(prompt_launch_seconds=0.0))
    assert launch * model.counts.launches < long
    for clients in (1, 8):
        waits = [serve(one, 100, 200, clients, clients).random_ttft_seconds for one in (slow, none)]
        assert waits[0] - waits[1] == pytest.approx(short, rel=0.02)
    assert serve(slow, 20_000, 200, 1, 1) == serve(none, 20_000, 200, 1, 1)


def test_a_lone_request_waits_for_no_other_one(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    rules = StepRules(overlaps=True)
    lone, two = (serve(model, 1000, 200, number, number, rules=rules) for number in (1, 2))
    assert lone.tpot_seconds == model.decode(1, 1100).seconds
    # With another one, a prompt waits for the rest of its step and, as steps overlap, for the one after it.
    assert two.steady_ttft_seconds > lone.steady_ttft_seconds + 1.3 * lone.tpot_seconds
    assert two.steady_ttft_seconds > lone.steady_ttft_seconds
    assert lone.queued == 0


def test_prompts_for_which_no_step_has_room_wait(model_of: MakeModel) -> None:
    """A step has a token of each decoding request, and with them no more than its share of the prompts."""
    model, rules = model_of("llama-3-70b", tensor_parallel_size=4), StepRules(step_tokens=2048)
    found = serve(model, 4000, 100, 400, 400, rules=rules)
    # Of every request, 4,000 + 100 tokens are computed while it decodes for 100 steps.
    assert found.decoding == pytest.approx(100 * 2048 / 4100, rel=0.05)
    assert found.queued == pytest.approx(400 - found.decoding, rel=0.1)
    assert serve(model, 4000, 100, 400, 400, rules=StepRules(step_tokens=65_536)).decoding > 3 * found.decoding


def test_steps_that_compute_prompts_alone_read_the_weights_for_each_of_them(model_of: MakeModel) -> None:
    """With answers of many lengths, clients come back one by one, so few prompts share such a step."""
    model = model_of("deepseek-v3", tensor_parallel_size=8)
    mixed, alone = (serve(model, 500, 200, 32, 32, rules=StepRules(mixes=mixes)) for mixes in (True, False))
    assert alone.tpot_seconds > 1.05 * mixed.tpot_seconds
    step, each = model.decode(alone.decoding, 600).seconds, model.prefill(500).seconds
    assert step < alone.tpot_seconds < step + alone.decoding * each / 200


def test_the_first_requests_of_an_engine_that_keeps_room_free_wait_longer(model_of: MakeModel) -> None:
    model, rules = model_of("llama-3-70b", tensor_parallel_size=4), StepRules(mixes=False)
    soon, late = (serve(model, 200, 2000, 64, 64, rules=rules, late_steps=steps) for steps in (0.0, 150.0))
    assert late.ttft_seconds - soon.ttft_seconds == pytest.approx(
        150 * soon.tpot_seconds / REQUESTS_PER_CLIENT, rel=0.02
    )
    assert late.steady_ttft_seconds == pytest.approx(soon.steady_ttft_seconds, rel=0.02)


def test_tokens_that_are_computed_again_stop_the_others_and_are_waited_for_after_the_first_token(
    model_of: MakeModel,
) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    before, after = serve(model, 1000, 500, 60, 40), serve(model, 1000, 500, 60, 40, recomputed_tokens=600.0)
    step = model.decode(after.decoding, 1250).seconds
    stall = after.decoding * added(model, 1000, after, 500, again=1.6) * 1.6 / 500
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
    # Of the first requests, the 40 that find room wait for each other, and the others for their room.
    few = serve(model, 1000, 500, 60, 4)
    assert 0 < few.ttft_seconds - few.steady_ttft_seconds < full.ttft_seconds - full.steady_ttft_seconds


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
    found = serve(model, tokens, 500, number, number)
    # Prompt by prompt, or as many together as a step has tokens for, each with its share of the step that decodes.
    together = min(float(number), (8192 - found.decoding) / tokens)
    step = model.decode(found.decoding, tokens + 250).seconds
    part = Part(0, tokens, 1.0, max(together, 1.0) if together > 1 else together)
    work = step / together + model.beside([part], found.decoding).seconds / part.number
    c = model.constants
    wait = work * ((number + min(number, max(together, 1.0))) / 2 - 1) + c.first_seconds
    # Each of them also waits for the host's time of the others.
    wait += (number - 1) * (c.ttft_seconds + c.ttft_token_seconds * tokens)
    assert found.ttft_seconds - found.steady_ttft_seconds == pytest.approx(wait / REQUESTS_PER_CLIENT, rel=0.05)


def test_a_prompt_that_is_computed_in_parts_reads_the_weights_for_each_part(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    whole, parts = (
        serve(model, 1000, 200, 1, 1),
        serve(model, 1000, 200, 1, 1, parts=[(0, 400), (400, 996), (996, 1000)]),
    )
    read = model.prefill(4).seconds
    assert parts.ttft_seconds > whole.ttft_seconds + 1.2 * read


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_host_that_reads_requests_while_prompts_are_computed_delays_only_by_what_is_longer(
    model_of: MakeModel, ranks: int
) -> None:
    layout = {"tensor_parallel_size": 4} if ranks == 1 else {"data_parallel_size": 4, "expert_parallel_size": 4}
    model = model_of("mixtral-8x7b", engine="sglang", **layout)
    steps = StepRules(step_tokens=8000, mixes=False)
    # Full steps of all DP ranks have eight prompts each.
    each = model.alone([Part(0, 1000, 1 / ranks, 8 * ranks)]).seconds / 8
    assert Prompts(model, 1000, 0, steps).hidden == 0
    assert Prompts(model, 1000, 0, steps._replace(reads_beside=True)).hidden == pytest.approx(each)

    def ttft(host: float, reads_beside: bool) -> float:
        constants = model.constants._replace(ttft_seconds=host, ttft_token_seconds=0.0)
        slow = SpeedModel(model.counts, model.gpu, constants)
        found = serve(slow, 1000, 200, 32, 32, rules=steps._replace(reads_beside=reads_beside))
        return found.ttft_seconds - found.steady_ttft_seconds

    others, requests = 32 / ranks - 1, requests_per_client(32)
    for host in (0.5 * each, 3 * each):
        hidden = ttft(host, False) - ttft(host, True)
        assert hidden == pytest.approx(min(host, each) * others / requests, rel=0.02)
