"""The short form of a constant number of requests."""

from __future__ import annotations

import pytest

from kvcalc.throughput.roofline import Part, SpeedModel
from kvcalc.throughput.scheduling import StepRules
from kvcalc.throughput.serving import full_step_seconds, requests_per_client, serve
from tests.throughput.conftest import MakeModel


def test_of_the_running_requests_those_past_their_first_token_decode(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    short = serve(model, 1000, 200, 32, 32)
    decode = 200 * short.tpot_seconds
    # Little's law: there are 32 requests, and each of them decodes for a part of the time it stays.
    assert short.decoding == pytest.approx(32 * decode / (short.ttft_seconds + decode), rel=0.01)
    assert 1 < short.decoding < 32
    assert short.requests_per_second == pytest.approx(32 / (short.ttft_seconds + decode), rel=0.01)
    assert short.tokens_per_second == pytest.approx(200 * short.requests_per_second)


def test_a_running_request_waits_for_the_others_prefills(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    short = serve(model, 1000, 200, 32, 32)
    step = model.decode(short.decoding, 1100).seconds
    stall = 31 / 32 * short.decoding / 200 * model.beside([Part(0, 1000)], short.decoding).seconds
    assert short.tpot_seconds == pytest.approx(step + stall)
    assert short.prefill_share == pytest.approx(stall / short.tpot_seconds)


def test_a_lone_request_waits_for_its_own_prefill_alone(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    c, short = model.constants, serve(model, 1000, 200, 1, 1)
    assert short.tpot_seconds == model.decode(1, 1100).seconds
    host = c.ttft_seconds + 1000 * c.ttft_token_seconds + c.ttft_steps * short.tpot_seconds
    assert short.ttft_seconds == pytest.approx(host + model.prefill(1000).seconds)
    benchmark = serve(model, 1000, 200, 1, 1, is_benchmark=True)
    assert benchmark.ttft_seconds - short.ttft_seconds == pytest.approx(c.first_seconds / requests_per_client(1))


def test_the_host_reads_the_whole_prompt_even_if_most_of_it_is_cached(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    none = SpeedModel(model.counts, model.gpu, model.constants._replace(ttft_token_seconds=0.0))
    for clients in (1, 8):
        whole, without = (serve(each, 1000, 200, clients, clients, cached_tokens=900) for each in (model, none))
        host = whole.ttft_seconds - without.ttft_seconds
        assert host == pytest.approx(1000 * model.constants.ttft_token_seconds, rel=0.05)


def test_a_short_prompt_waits_until_the_host_has_launched_its_kernels(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    short = model.prefill(100).seconds
    slow = SpeedModel(
        model.counts, model.gpu, model.constants._replace(prompt_launch_seconds=2 * short / model.counts.launches)
    )
    none = SpeedModel(model.counts, model.gpu, model.constants._replace(prompt_launch_seconds=0.0))
    for clients in (1, 8):
        waits = [serve(each, 100, 200, clients, clients).ttft_seconds for each in (slow, none)]
        assert waits[0] - waits[1] == pytest.approx(short, rel=0.03)
    assert serve(slow, 20_000, 200, 1, 1) == serve(none, 20_000, 200, 1, 1)


def test_with_another_request_a_prompt_waits_for_a_step(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    lone, two = (serve(model, 1000, 200, number, number) for number in (1, 2))
    after_next = serve(model, 1000, 200, 2, 2, rules=StepRules(overlaps=True))
    assert two.ttft_seconds > lone.ttft_seconds + 0.5 * lone.tpot_seconds
    # As steps overlap, it waits for one more.
    assert after_next.ttft_seconds - two.ttft_seconds == pytest.approx(two.tpot_seconds, rel=0.05)


def test_prompts_for_which_no_step_has_room_wait(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    small, large = (serve(model, 4000, 100, 400, 400, rules=StepRules(tokens)) for tokens in (2048, 65_536))
    assert large.decoding > 3 * small.decoding
    assert small.ttft_seconds > large.ttft_seconds


def test_a_prompt_in_several_steps_reads_the_weights_in_each(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    whole, parts = (serve(model, 1000, 200, 1, 1, rules=StepRules(tokens)) for tokens in (8192, 250))
    assert parts.ttft_seconds > whole.ttft_seconds + 1.5 * model.prefill(4).seconds
    undivided = serve(model, 1000, 200, 1, 1, rules=StepRules(250, divides=False))
    assert undivided.ttft_seconds == whole.ttft_seconds


def test_steps_that_compute_prompts_alone_read_the_weights_for_each_of_them(model_of: MakeModel) -> None:
    model = model_of("deepseek-v3", tensor_parallel_size=8)
    mixed, alone = (serve(model, 500, 200, 32, 32, rules=StepRules(mixes=mixes)) for mixes in (True, False))
    assert alone.tpot_seconds > 1.05 * mixed.tpot_seconds
    step, each = model.decode(alone.decoding, 600).seconds, model.prefill(500).seconds
    assert alone.tpot_seconds == pytest.approx(step + 31 / 32 * alone.decoding * each / 200)


def test_a_rank_with_a_prompt_of_its_own_does_not_decode_while_others_do(model_of: MakeModel) -> None:
    layout = {"data_parallel_size": 8, "expert_parallel_size": 8}
    model = model_of("deepseek-v3", engine="sglang", **layout)
    mixed, alone = (serve(model, 500, 200, 32, 32, rules=StepRules(mixes=mixes)) for mixes in (True, False))
    step = model.decode(alone.decoding, 600).seconds
    assert mixed.tpot_seconds < alone.tpot_seconds < mixed.tpot_seconds + step


def test_more_requests_are_more_tokens_a_second_and_each_slower(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=8)
    answers = [serve(model, 1000, 1000, n, n) for n in (1, 4, 16, 64, 256)]
    assert [a.tpot_seconds for a in answers] == sorted(a.tpot_seconds for a in answers)
    assert [a.tokens_per_second for a in answers] == sorted(a.tokens_per_second for a in answers)
    assert [a.ttft_seconds for a in answers] == sorted(a.ttft_seconds for a in answers)


def test_requests_without_room_wait_before_their_first_token(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    forty, full = serve(model, 1000, 500, 40, 40), serve(model, 1000, 500, 60, 40)
    # Little's law: the rate of finished requests is 60 requests in flight divided by the time each stays.
    assert full.requests_per_second == pytest.approx(60 / (full.ttft_seconds + 500 * full.tpot_seconds))
    assert full.requests_per_second == pytest.approx(forty.requests_per_second, rel=0.02)


@pytest.mark.parametrize("tokens", [100, 1000, 20_000])
def test_a_benchmark_waits_longer_by_its_first_requests(model_of: MakeModel, tokens: int) -> None:
    model, number = model_of("llama-3-70b", tensor_parallel_size=4), 64
    steady, benchmark = (serve(model, tokens, 500, number, number, is_benchmark=each) for each in (False, True))
    # Prompt by prompt, or as many together as a step has tokens for.
    together, each = 8192 / tokens, full_step_seconds(model, tokens, 0.0, StepRules())
    c = model.constants
    wait = each * ((number + min(number, max(together, 1.0))) / 2 - 1) + c.first_seconds
    # Each of them also waits for the host's time of the others.
    wait += (number - 1) * (c.ttft_seconds + c.ttft_token_seconds * tokens)
    # The others decode while these wait, so that they meet fewer.
    assert benchmark.ttft_seconds - steady.ttft_seconds == pytest.approx(wait / requests_per_client(number), rel=0.3)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_host_that_reads_requests_while_prompts_are_computed_delays_only_by_what_is_longer(
    model_of: MakeModel, ranks: int
) -> None:
    layout = {"tensor_parallel_size": 4} if ranks == 1 else {"data_parallel_size": 4, "expert_parallel_size": 4}
    model = model_of("mixtral-8x7b", engine="sglang", **layout)
    steps = StepRules(step_tokens=8000, mixes=False)
    # Full steps of all DP ranks have eight prompts each.
    each = model.alone([Part(0, 1000, 1 / ranks, 8 * ranks)]).seconds / 8
    assert full_step_seconds(model, 1000, 0.0, steps) == pytest.approx(each)

    def ttft(host: float, reads_beside: bool) -> float:
        constants = model.constants._replace(ttft_seconds=host, ttft_token_seconds=0.0)
        slow = SpeedModel(model.counts, model.gpu, constants)
        rules = steps._replace(reads_beside=reads_beside)
        return serve(slow, 1000, 2000, 32, 32, rules=rules, is_benchmark=True).ttft_seconds

    others, requests = 32 / ranks - 1, requests_per_client(32)
    for host in (0.5 * each, 3 * each):
        hidden = ttft(host, False) - ttft(host, True)
        assert hidden == pytest.approx(min(host, each) * others / requests, rel=0.1)
