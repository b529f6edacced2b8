"""The cheapest numbers of instances within limits and prices, against brute force, and the borders of their rates."""

from __future__ import annotations

from math import inf, sqrt
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvcalc.planning.plan.disaggregated.matching import Load, Pair
from kvcalc.planning.plan.disaggregated.rates import Decode, Prefill, between_counts, seen_share
from kvcalc.planning.plan.disaggregated.search import candidates_of
from kvcalc.planning.plan.targets import Targets

# A prefill takes 0.5 s, an answer 2 s, and at most 10 run at once: 5 answers a second.
PREFILL = Prefill(1, lambda prompts: 0.5 * prompts, 1)
DECODE = Decode(1, lambda _: 0.02, 10, 100)


def test_the_cheapest_within_all_limits_is_what_trying_all_numbers_finds() -> None:
    random, found, limited = Random(11), 0, 0
    decode_times = between_counts(lambda requests: 0.01 + 0.001 * requests)
    for number in range(60):
        prefill, decode = (
            PREFILL._replace(devices=random.choice((1, 2))),
            Decode(random.choice((1, 3)), decode_times, 8, 100),
        )
        pair, most = Pair(prefill, decode, 0.05), (random.randint(2, 9), random.randint(2, 9), random.randint(4, 14))
        load = Load(random.uniform(0.5, 8)) if number % 2 else Load(concurrency=random.randint(1, 30))
        # Prices of less than 1 and of more, and sometimes nothing at all for one kind of device.
        prices = random.choice(((1.0, 1.0), (0.25, 0.5), (3.0, 0.125), (0.0, 2.0)))
        budget = random.choice((inf, 2.0, 6.0))
        costs = [
            cost
            for x in range(1, most[0] // prefill.devices + 1)
            for y in range(1, most[1] // decode.devices + 1)
            if x * prefill.devices + y * decode.devices <= most[2]
            and (cost := prices[0] * x * prefill.devices + prices[1] * y * decode.devices) <= budget
            and (times := pair.times(x, y, load)) is not None
            and times.ttft_seconds <= 1.5
        ]
        match = pair.cheapest(load, lambda times: times.ttft_seconds <= 1.5, most, prices, budget)
        assert (match is None) is (not costs)
        if match is not None:
            cost = prices[0] * match.prefills * prefill.devices + prices[1] * match.decodes * decode.devices
            assert cost == pytest.approx(min(costs))
            assert match.prefills * prefill.devices <= most[0]
            assert match.decodes * decode.devices <= most[1]
            assert match.num_devices <= most[2]
        found, limited = found + (match is not None), limited + (match is None)
    assert found > 15
    assert limited > 5


@pytest.mark.parametrize(
    ("devices", "weights", "numbers"),
    [
        ((4, 1), (1.0, 1.0), (1, 2)), ((1, 4), (1.0, 1.0), (2, 1)),  # 6 devices, not 9
        ((1, 1), (4.0, 1.0), (1, 2)), ((1, 1), (1.0, 4.0), (2, 1)),  # a price of 6, not 9
        ((2, 1), (2.0, 1.0), (1, 2)), ((2, 1), (0.5, 4.0), (2, 1)),
        ((1, 1), (1.0, 1.0), (2, 1)),  # of equal costs, the fewest decode instances
    ],
)  # fmt: skip
def test_of_two_ways_to_meet_a_limit_the_one_that_costs_less_is_taken(
    devices: tuple[int, int], weights: tuple[float, float], numbers: tuple[int, int]
) -> None:
    """A second prefill instance shortens the queue by about 27 ms, and a second decode instance ten steps by 6 ms."""
    prefill = Prefill(devices[0], lambda prompts: 0.1 * prompts, 1)
    decode = Decode(devices[1], between_counts(lambda n: 0.002 + 0.002 * n), 10, 100, first_steps=10.0)
    pair, load = Pair(prefill, decode, 0.0), Load(4.0)
    ttft = {(x, y): times.ttft_seconds for x in (1, 2) for y in (1, 2) if (times := pair.times(x, y, load))}
    assert max(ttft[1, 2], ttft[2, 1]) < 0.21 < ttft[1, 1]
    match = pair.cheapest(load, lambda times: times.ttft_seconds <= 0.21, (9, 9, 18), weights)
    assert match is not None
    assert (match.prefills, match.decodes) == numbers


@pytest.mark.parametrize(("load", "bound"), [
    (Targets(None, 20.0), 2 * 10 * 3.0 + 4 * 4 * 0.5), (Targets(None, 0.1), 2 * 3.0 + 4 * 0.5),
    (Targets(30, None), 2 * 3.0 + 4 * 3 * 0.5), (Targets(7, None), 2 * 3.0 + 4 * 0.5),
])  # fmt: skip
def test_a_pair_costs_at_least_what_its_instances_do_that_keep_up_with_the_load(load: Targets, bound: float) -> None:
    """A prefill instance has 2 devices and completes 2 prompts a second, a decode instance 4 and 5 answers of 10."""

    def instance(devices: int, rates: Any) -> Any:
        return SimpleNamespace(shape=SimpleNamespace(num_devices=devices), rates=rates)

    prefills = [instance(2, PREFILL)]
    decodes = [instance(4, DECODE._replace(slots=0)), instance(4, DECODE._replace(most=90, slots=10))]
    known: Any = SimpleNamespace(prefills=lambda _: (prefills, None), decodes=lambda *_: (decodes, None))
    kinds: Any = SimpleNamespace(prefill=None, decode=None, weights=(3.0, 0.5), is_mixed=False)
    found: Any = candidates_of(known, kinds, load)
    assert found == [(pytest.approx(bound), prefills[0], decodes[1])], "no request fits in the other"


@pytest.mark.parametrize(("rate", "decodes"), [(1e-12, 1), (5.0, 1), (5.001, 2), (10.0, 2), (15.0, 3)])
def test_instances_that_are_just_enough_are_not_rounded_up(rate: float, decodes: int) -> None:
    match = Pair(PREFILL, DECODE, 0.0).cheapest(Load(rate), lambda _: True, (100, 100, 100))
    assert match is not None
    assert match.decodes == decodes
    assert match.prefills == int(rate * 0.5) + 1  # at a utilization of 1 a queue without an end forms


def test_few_clients_with_quick_prompts_need_one_instance_of_each() -> None:
    quick = PREFILL._replace(seconds=lambda prompts: 1e-12 * prompts)
    match = Pair(quick, DECODE, 0.0).cheapest(Load(concurrency=1), lambda _: True, (100, 100, 100))
    assert match is not None
    assert (match.prefills, match.decodes) == (1, 1)


@pytest.mark.parametrize(("slots", "interval"), [(None, 0.5), (1, 0.8), (2, 0.5), (3, 0.5)])
def test_a_slot_is_taken_until_the_cache_is_sent(slots: int | None, interval: float) -> None:
    """A prompt of 0.5 s, and 0.3 s for sending it: with one slot, the next prompt waits for both."""
    assert PREFILL._replace(slots=slots).interval(0.3) == pytest.approx(interval)


def test_a_step_is_never_shorter_than_that_of_one_request() -> None:
    decode = Decode(1, lambda n: 0.01 + 0.001 * n, 10, 100, tokens_per_step=2.0)
    assert [decode.step(n) for n in (0.25, 1.0, 5.0)] == pytest.approx([0.022, 0.022, 0.03])
    assert [decode.rate(n) for n in (0.25, 1.0, 5.0)] == pytest.approx([0.25 / 1.1, 1 / 1.1, 5 / 1.5])


@pytest.mark.parametrize(
    ("rate", "decoding"), [(0.5, 1.0), (1.0, 2.0), (3.3, 6.6), (4.99, 9.98), (5.0, 10.0), (9.0, 10.0)]
)
def test_the_batch_of_a_rate_follows_from_littles_law(rate: float, decoding: float) -> None:
    """Each request stays 2 s, and at most 10 run at once."""
    assert DECODE.decoding(rate) == pytest.approx(decoding)


def test_instances_that_hold_no_request_are_not_matched() -> None:
    pair = Pair(PREFILL, DECODE._replace(slots=0), 0.0)
    for load in (Load(1.0), Load(concurrency=4)):
        assert pair.cheapest(load, lambda _: True, (9, 9, 9)) is None
        assert Pair(PREFILL, DECODE, 0.0).cheapest(load, lambda _: True, (9, 0, 9)) is None


def test_a_step_of_several_prompts_takes_as_many_slots() -> None:
    prefill = Prefill(1, lambda prompts: 0.2 + 0.1 * prompts, 4, slots=4)
    # Four prompts take 0.6 s, and their four caches 1.2 s one after another. A slot is free again after both.
    assert prefill.interval(0.3) == pytest.approx((0.6 + 4 * 0.3) / 4)
    assert prefill._replace(slots=3).most_prompts == 3


@pytest.mark.parametrize("utilization", [0.3, 0.7, 0.9])
@pytest.mark.parametrize(("clients", "instances"), [(2, 1), (5, 1), (40, 1), (40, 6)])
def test_a_new_request_sees_the_queue_of_one_client_less(utilization: float, clients: int, instances: int) -> None:
    """The share is the fixed point of the equations that `seen_share` states, with slopes by differences here."""

    def queue(used: float, share: float) -> float:
        return share * used**2 / (2 * (1 - share * used))

    most = (clients - 1) / clients
    low, high = 0.0, most
    for _ in range(60):
        share = (low + high) / 2
        slope = (queue(utilization + 1e-6, share) - queue(utilization - 1e-6, share)) / 2e-6
        thinking = clients / instances / utilization - 1 - queue(utilization, share) / utilization
        if thinking <= 0:
            high = share
            continue
        change = 1 / instances / (thinking + 1 + slope) * (1 - 1 / sqrt(clients))
        # The requests in the queue, and half a service for the one that is served.
        seen = max(queue(utilization, share) + utilization / 2 - (slope + 0.5) * change, 0.0)
        # The utilization with which M/D/1 has as many.
        as_many = 2 * seen / (1 + 2 * seen) / utilization
        low, high = (share, high) if as_many > share else (low, share)
    assert seen_share(utilization, clients, instances) == pytest.approx(share, rel=0.03)
