"""The short form of two pools: what instances complete, and a queue that is played out."""

from __future__ import annotations

from random import Random

import pytest

from kvcalc.planning.plan.disaggregated.rates import Decode, Pair, Prefill, between_counts

# A prefill takes 0.5 s, a decode step 0.02 s whatever runs, an answer has 100 tokens, and at most 10 run at once.
PREFILL = Prefill(1, lambda prompts: 0.5 * prompts, 1)
DECODE = Decode(1, lambda _: 0.02, 10, 100)


@pytest.mark.parametrize(("prefills", "decodes", "transfer"), [(3, 1, 0.0), (2, 3, 0.0), (3, 2, 2.0), (8, 1, 0.4)])
def test_the_slower_pool_or_the_link_limits_the_rate(prefills: int, decodes: int, transfer: float) -> None:
    pair = Pair(PREFILL, DECODE, transfer)
    # 10 answers of 2 s each at once; a link sends one cache at a time.
    limits = prefills / max(0.5, transfer), min(decodes * (10 / 2.0), decodes / transfer if transfer else 1e9)
    assert pair.capacities(prefills, decodes) == pytest.approx(limits)
    # With half of the batch, the decode instances complete half, unless the link limits them.
    half = min(decodes * (5 / 2.0), decodes / transfer if transfer else 1e9)
    assert pair.capacities(prefills, decodes, 5)[1] == pytest.approx(half)


def test_without_load_nothing_waits() -> None:
    pair = Pair(PREFILL._replace(host_seconds=0.25), DECODE._replace(first_steps=2.5, host_seconds=0.003), 0.1)
    assert pair.host_seconds == 0.253
    assert pair.ttft_seconds == pytest.approx(0.253 + 0.5 + 0.1 + 2.5 * 0.02)
    assert pair.stay_seconds(0.5) == pytest.approx(pair.ttft_seconds + 100 * 0.02)


@pytest.mark.parametrize(("service", "transfer"), [(0.5, 0.1), (0.2, 0.5)])
@pytest.mark.parametrize("used", [0.6, 0.8])
def test_a_queue_that_is_played_out_waits_as_long(service: float, transfer: float, used: float) -> None:
    """Poisson arrivals at a device and then its link, with fixed times: one instance is enough for just that wait."""
    random, now, waited, number = Random(3), 0.0, 0.0, 200_000
    device, link, rate = 0.0, 0.0, used / max(service, transfer)
    for _ in range(number):
        now += random.expovariate(rate)
        device = max(now, device) + service
        link = max(device, link) + transfer
        waited += link - now - service - transfer
    pair = Pair(PREFILL._replace(seconds=lambda prompts: service * prompts), DECODE._replace(most=1000), transfer)
    mean = waited / number
    assert [pair.prefills(rate, seconds, 9) for seconds in (1.05 * mean, 0.95 * mean, None)] == [1, 2, 1]


@pytest.mark.parametrize(("rate", "prefills"), [(1e-12, 1), (1.9, 1), (2.0, 2), (5.9, 3), (6.1, 4), (100.0, 9)])
def test_prefill_instances_that_are_always_busy_are_too_few(rate: float, prefills: int) -> None:
    """At a utilization of 1 a queue without an end forms. Each completes two prompts a second, and there are nine."""
    assert Pair(PREFILL, DECODE, 0.0).prefills(rate, None, 9) == prefills


def test_a_decode_instance_holds_what_it_receives() -> None:
    # 10 slots, of which a transfer of 1 s takes 1/2 for each that decodes 2 s.
    decode = DECODE._replace(slots=10)
    assert [decode.largest(transfer) for transfer in (0.0, 1.0, 2.0, 18.0)] == [10, 6, 5, 1]
    # An answer of 10 tokens takes 0.2 s, and 0.03 s pass until its first step: 8 hold 9.2 slots, and 9 hold 10.35.
    assert decode._replace(output_tokens=10, first_steps=2.5).largest(0.0) == 8


def test_between_whole_numbers_of_requests_times_lie_on_straight_lines() -> None:
    seconds = between_counts(lambda requests: float(requests * requests))
    assert [seconds(requests) for requests in (2, 2.25, 3)] == [4.0, 4.0 + 0.25 * 5.0, 9.0]


@pytest.mark.parametrize(("slots", "interval"), [(None, 0.5), (1, 0.8), (2, 0.5), (3, 0.5)])
def test_a_slot_is_taken_until_the_cache_is_sent(slots: int | None, interval: float) -> None:
    """A prompt of 0.5 s, and 0.3 s for sending it: with one slot, the next prompt waits for both."""
    assert PREFILL._replace(slots=slots).interval(0.3) == pytest.approx(interval)


def test_a_step_of_several_prompts_takes_as_many_slots() -> None:
    prefill = Prefill(1, lambda prompts: 0.2 + 0.1 * prompts, 4, slots=4)
    # Four prompts take 0.6 s, and their four caches 1.2 s one after another. A slot is free again after both.
    assert prefill.interval(0.3) == pytest.approx((0.6 + 4 * 0.3) / 4)
    assert prefill._replace(slots=3).most_prompts == 3


def test_a_step_is_never_shorter_than_that_of_one_request() -> None:
    decode = Decode(1, lambda n: 0.01 + 0.001 * n, 10, 100, tokens_per_step=2.0)
    assert [decode.step(n) for n in (0.25, 1.0, 5.0)] == pytest.approx([0.022, 0.022, 0.03])
    assert [decode.rate(n) for n in (0.25, 1.0, 5.0)] == pytest.approx([0.25 / 1.1, 1 / 1.1, 5 / 1.5])


@pytest.mark.parametrize(("rate", "decoding"), [(0.3, 1), (1.0, 2), (3.3, 7), (4.99, 10), (5.0, 10), (9.0, 10)])
def test_the_batch_of_a_rate_follows_from_littles_law(rate: float, decoding: int) -> None:
    """Each request stays 2 s, and at most 10 run at once."""
    assert DECODE.decoding(rate) == decoding
