"""The short form of two pools: how many instances a load needs, by brute force, and a queue that is played out."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvcalc.planning.plan.disaggregated.rates import Decode, Load, Pair, Prefill, between_counts
from kvcalc.planning.plan.disaggregated.search import candidates_of
from kvcalc.planning.plan.targets import Targets

# A prefill takes 0.5 s, a decode step 0.02 s whatever runs, an answer has 100 tokens, and at most 10 run at once.
PREFILL = Prefill(1, lambda prompts: 0.5 * prompts, 1)
DECODE = Decode(1, lambda _: 0.02, 10, 100)


def pair_of(random: Random) -> Pair:
    prompt, step, each = random.uniform(0.01, 1), random.uniform(0.005, 0.03), random.uniform(0.0001, 0.001)
    prefill = Prefill(
        random.choice((1, 2, 4)), lambda prompts: prompt * (0.2 + 0.8 * prompts), random.choice((1, 1, 4)), 1,
        random.choice((None, 3, 20)), 0.02,
    )  # fmt: skip
    decode = Decode(
        random.choice((1, 2, 4)), between_counts(lambda requests: step + each * requests), random.choice((8, 64)),
        random.choice((50, 500)), random.choice((None, 10, 100)), random.choice((1.0, 2.4)), 0.01,
    )  # fmt: skip
    return Pair(prefill, decode, random.choice((0.001, 0.1, 1.0)))


def test_the_fewest_decode_instances_and_then_the_fewest_prefill_instances_are_taken() -> None:
    random, served = Random(5), 0
    for number in range(60):
        pair = pair_of(random)
        limits = random.randint(2, 16), random.randint(2, 16), random.randint(4, 24)
        load = Load(random.uniform(0.1, 8)) if number % 2 else Load(concurrency=random.randint(1, 80))
        longest = random.choice((1e9, 3 * pair.prefill.seconds(1), 2.0))

        def serves(prefills: int, decodes: int, pair: Pair = pair, load: Load = load, longest: float = longest) -> bool:
            times = pair.times(prefills, decodes, load)
            return times is not None and times.ttft_seconds <= longest

        each = pair.prefill.devices, pair.decode.devices
        decodes = next((y for y in range(1, 17) if y * each[1] <= limits[1] and serves(10**9, y)), None)
        of_load = None if decodes is None else pair.times(10**9, decodes, load)
        # Those that keep up with the requests if none waits for another.
        busy = 0.0 if of_load is None else of_load.requests_per_second * pair.prefill.interval(pair.transfer)
        expected = decodes and next(
            (
                (x, decodes)
                for x in range(1, 17)
                if x >= busy - 1e-9 and serves(x, decodes) and x * each[0] <= limits[0]
                and x * each[0] + decodes * each[1] <= limits[2]
            ),
            None,
        )  # fmt: skip
        match = pair.fewest(load, lambda times, longest=longest: times.ttft_seconds <= longest, limits)  # type: ignore[misc]
        assert (match and (match.prefills, match.decodes)) == expected
        served += match is not None
    assert 15 < served < 55, "some loads are too much for these devices, and some are not"


@pytest.mark.parametrize(("prefills", "decodes", "transfer"), [(3, 1, 0.0), (2, 3, 0.0), (3, 2, 2.0), (8, 1, 0.4)])
def test_the_slower_pool_or_the_link_limits_the_rate(prefills: int, decodes: int, transfer: float) -> None:
    pair = Pair(PREFILL, DECODE, transfer)
    # 10 answers of 2 s each at once; a link sends one cache at a time.
    limit = min(prefills / max(0.5, transfer), decodes * (10 / 2.0), decodes / transfer if transfer else 1e9)
    assert min(pair.capacities(prefills, decodes)) == pytest.approx(limit)
    assert pair.busy_load(prefills, decodes).requests_per_second == pytest.approx(0.9 * limit)
    assert pair.times(prefills, decodes, Load(0.999 * limit)) is not None
    assert pair.times(prefills, decodes, Load(1.001 * limit)) is None


def test_without_load_nothing_waits() -> None:
    pair = Pair(PREFILL, DECODE._replace(first_steps=2.5, host_seconds=0.003), 0.1)
    times = pair.times(1, 1, Load(1e-9))
    assert times is not None
    assert times.ttft_seconds == pytest.approx(0.5 + 0.1 + 2.5 * 0.02 + 0.003)


@pytest.mark.parametrize("host", [0.0, 2.0])
@pytest.mark.parametrize("clients", [2, 17, 80])
def test_the_clients_are_all_somewhere(clients: int, host: float) -> None:
    """Little's law: the rate times what a request goes through is the number of clients."""
    pair = Pair(PREFILL._replace(host_seconds=host), DECODE._replace(most=40), 0.1)
    match = pair.fewest(Load(concurrency=clients), lambda _: True, (100, 100, 100))
    assert match is not None
    times = match.times
    stay = times.ttft_seconds + 99 * times.tpot_seconds
    assert times.requests_per_second * stay == pytest.approx(clients, rel=1e-6)
    # The pool of prefills is no smaller than what the clients ask for if none waits for a device.
    alone = pair.times(10**9, match.decodes, Load(concurrency=clients))
    assert alone is not None
    assert match.prefills == -(-alone.requests_per_second * 0.5 // 1)


@pytest.mark.parametrize(("service", "transfer"), [(0.5, 0.1), (0.2, 0.5)])
def test_a_queue_that_is_played_out_waits_as_long(service: float, transfer: float) -> None:
    """Poisson arrivals at a device and then its link, with fixed times."""
    random, now, waited, number = Random(3), 0.0, 0.0, 200_000
    device, link, rate = 0.0, 0.0, 0.7 / max(service, transfer)
    for _ in range(number):
        now += random.expovariate(rate)
        device = max(now, device) + service
        link = max(device, link) + transfer
        waited += link - now - service - transfer
    pair = Pair(PREFILL._replace(seconds=lambda prompts: service * prompts), DECODE._replace(most=1000), transfer)
    times = pair.times(1, 10, Load(rate))
    assert times is not None
    assert waited / number == pytest.approx(times.queue_seconds, rel=0.05)


def test_a_decode_instance_holds_what_it_receives() -> None:
    # 10 slots, of which a transfer of 1 s takes 1/2 for each that decodes 2 s.
    decode = DECODE._replace(slots=10)
    assert [decode.largest(transfer) for transfer in (0.0, 1.0, 2.0, 18.0)] == [10, 6, 5, 1]
    # An answer of 10 tokens takes 0.2 s, and 0.03 s pass until its first step: 8 hold 9.2 slots, and 9 hold 10.35.
    assert decode._replace(output_tokens=10, first_steps=2.5).largest(0.0) == 8


def test_between_whole_numbers_of_requests_times_lie_on_straight_lines() -> None:
    seconds = between_counts(lambda requests: float(requests * requests))
    assert [seconds(requests) for requests in (2, 2.25, 3)] == [4.0, 4.0 + 0.25 * 5.0, 9.0]


def test_a_load_of_just_what_the_decode_instances_answer_is_served_in_spite_of_rounding() -> None:
    decode = DECODE._replace(tpot=lambda _: 0.0201)
    pair = Pair(PREFILL, decode, 0.0001)
    rate = decode.rate(decode.largest(pair.transfer))
    rounded = [number for number in range(1, 60) if number * rate / number > rate]
    assert rounded, "some rates are larger after rounding"
    assert all(pair.times(1000, number, Load(number * rate)) is not None for number in range(1, 60))


@pytest.mark.parametrize("load", [Load(1.5), Load(concurrency=5), Load(concurrency=1)])
def test_a_cache_that_is_sent_in_no_time_waits_for_no_link(load: Load) -> None:
    at_once, soon = (Pair(PREFILL, DECODE, transfer).times(2, 2, load) for transfer in (0.0, 1e-9))
    assert at_once is not None
    assert soon is not None
    assert tuple(at_once) == pytest.approx(tuple(soon), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("rate", "decodes"), [(1e-12, 1), (5.0, 1), (5.001, 2), (10.0, 2), (15.0, 3)])
def test_instances_that_are_just_enough_are_not_rounded_up(rate: float, decodes: int) -> None:
    match = Pair(PREFILL, DECODE, 0.0).fewest(Load(rate), lambda _: True, (100, 100, 100))
    assert match is not None
    assert match.decodes == decodes
    assert match.prefills == int(rate * 0.5) + 1  # at a utilization of 1 a queue without an end forms


def test_prefill_instances_that_are_always_busy_but_for_rounding_are_too_few() -> None:
    pair = Pair(PREFILL, DECODE._replace(most=100), 0.1)
    for number in (1, 3):
        for rate, prefills in ((2 * number * (1 - 1e-6), number), (2 * number * (1 - 1e-12), number + 1)):
            match = pair.fewest(Load(rate), lambda _: True, (100, 100, 100))
            assert match is not None
            assert match.prefills == prefills


def test_few_clients_with_quick_prompts_need_one_instance_of_each() -> None:
    quick = PREFILL._replace(seconds=lambda prompts: 1e-12 * prompts)
    match = Pair(quick, DECODE, 0.0).fewest(Load(concurrency=1), lambda _: True, (100, 100, 100))
    assert match is not None
    assert (match.prefills, match.decodes) == (1, 1)


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


@pytest.mark.parametrize(
    ("rate", "decoding"), [(0.5, 1.0), (1.0, 2.0), (3.3, 6.6), (4.99, 9.98), (5.0, 10.0), (9.0, 10.0)]
)
def test_the_batch_of_a_rate_follows_from_littles_law(rate: float, decoding: float) -> None:
    """Each request stays 2 s, and at most 10 run at once."""
    assert DECODE.decoding(rate) == pytest.approx(decoding)


def test_instances_that_hold_no_request_are_not_matched() -> None:
    pair = Pair(PREFILL, DECODE._replace(slots=0), 0.0)
    for load in (Load(1.0), Load(concurrency=4)):
        assert pair.fewest(load, lambda _: True, (9, 9, 9)) is None
        assert Pair(PREFILL, DECODE, 0.0).fewest(load, lambda _: True, (9, 0, 9)) is None


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
    candidates: Any = candidates_of(known, kinds, load)
    assert candidates == [(pytest.approx(bound), prefills[0], decodes[1])], "no request fits in the other"
