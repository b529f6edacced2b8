"""The numbers of prefill and decode instances against brute force, short forms and a queue that is played out."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random

import pytest

from kvcalc.planning.plan.disaggregated.matching import Load, Pair
from kvcalc.planning.plan.disaggregated.rates import Decode, Prefill, between_counts


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


def test_the_matcher_finds_what_trying_all_numbers_finds() -> None:
    random, found = Random(5), 0
    for number in range(60):
        pair, most = pair_of(random), random.choice((10, 16))
        load = Load(random.uniform(0.1, 8)) if number % 2 else Load(concurrency=random.randint(1, 80))
        longest = random.choice((1e9, 3 * pair.prefill.seconds(1), 2.0))
        prefill, decode = pair.prefill.devices, pair.decode.devices
        sizes = [
            x * prefill + y * decode
            for x in range(1, most + 1)
            for y in range(1, most + 1)
            if x * prefill + y * decode <= most
            and (times := pair.times(x, y, load)) is not None
            and times.ttft_seconds <= longest
        ]
        match = pair.cheapest(load, lambda times, longest=longest: times.ttft_seconds <= longest, (most, most, most))  # type: ignore[misc]
        assert (None if match is None else match.num_devices) == min(sizes, default=None)
        found += match is not None
    assert 15 < found < 60, "some loads are too much for these devices, and some are not"


# A prefill takes 0.5 s, a decode step 0.02 s whatever runs, an answer has 100 tokens, and at most 10 run at once.
PREFILL = Prefill(1, lambda prompts: 0.5 * prompts, 1)
DECODE = Decode(1, lambda _: 0.02, 10, 100)


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
    found = [pair.times(1, 1, load) for load in (Load(1e-9), Load(concurrency=1))]
    for times in found:
        assert times is not None
        assert times.ttft_seconds == pytest.approx(0.5 + 0.1 + 2.5 * 0.02 + 0.003)
    assert times is not None
    assert times.requests_per_second == pytest.approx(1 / (times.ttft_seconds + 99 * 0.02))


@pytest.mark.parametrize("host", [0.0, 2.0])
@pytest.mark.parametrize("clients", [2, 17, 80])
def test_the_clients_are_all_somewhere(clients: int, host: float) -> None:
    """Little's law: the rate times what a request goes through is the number of clients."""
    pair = Pair(PREFILL._replace(host_seconds=host), DECODE._replace(most=40), 0.1)
    match = pair.cheapest(Load(concurrency=clients), lambda _: True, (100, 100, 100))
    assert match is not None
    times = match.times
    stay = times.ttft_seconds + 99 * times.tpot_seconds
    assert times.requests_per_second * stay == pytest.approx(clients, rel=1e-6)
    # The pool of prefills is no smaller than what the clients ask for if none waits.
    alone = clients / (host + 0.5 + 0.1 + 100 * 0.02)
    assert match.prefills == -(-alone * 0.5 // 1)


@pytest.mark.parametrize(
    ("service", "transfer", "turns", "within"), [(0.5, 0.1, 1, 0.03), (0.2, 0.5, 1, 0.03), (0.5, 0.1, 3, 0.1)]
)
def test_a_queue_that_is_played_out_waits_as_long(service: float, transfer: float, turns: int, within: float) -> None:
    """Poisson arrivals, asked in turn, at devices and then their links, all with fixed times."""
    random, now, waited, number = Random(3), 0.0, 0.0, 200_000
    devices, links = [0.0] * turns, [0.0] * turns
    rate = 0.7 * turns / max(service, transfer)
    for request in range(number):
        now += random.expovariate(rate)
        one = request % turns
        devices[one] = max(now, devices[one]) + service
        links[one] = max(devices[one], links[one]) + transfer
        waited += links[one] - now - service - transfer
    pair = Pair(PREFILL._replace(seconds=lambda prompts: service * prompts), DECODE._replace(most=1000), transfer)
    times = pair.times(turns, 10, Load(rate))
    assert times is not None
    assert waited / number == pytest.approx(times.queue_seconds, rel=within)


@pytest.mark.parametrize(
    ("clients", "prefills", "tokens"), [(5, 1, 100), (8, 2, 100), (32, 7, 100), (16, 4, 100), (60, 1, 1500)]
)
def test_clients_that_are_played_out_wait_as_long(clients: int, prefills: int, tokens: int) -> None:
    """Each client asks again when it has its answer. Lengths of answers are drawn with a mean of `tokens`."""
    random, waited, number = Random(1), 0.0, 20_000
    devices, asking = [0.0] * prefills, [0.0] * clients
    for request in range(number):
        now = heappop(asking)
        one = request % prefills
        devices[one] = max(now, devices[one]) + 0.5
        first = devices[one] + 0.01 + 0.02
        waited += first - now
        heappush(asking, first + 0.02 * random.expovariate(1 / (tokens - 1)))
    times = Pair(PREFILL, DECODE._replace(most=100, output_tokens=tokens), 0.01).times(
        prefills, 1, Load(concurrency=clients)
    )
    assert times is not None
    assert times.ttft_seconds == pytest.approx(waited / number, rel=0.08)
    assert times.requests_per_second == pytest.approx(number / now, rel=0.03)


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


def test_prefill_instances_that_are_always_busy_but_for_rounding_are_too_few() -> None:
    pair, anything = Pair(PREFILL, DECODE._replace(most=100), 0.1), lambda _: True
    for number in (1, 3):
        for rate, prefills in ((2 * number * (1 - 1e-6), number), (2 * number * (1 - 1e-12), number + 1)):
            match = pair.cheapest(Load(rate), anything, (100, 100, 100))
            assert match is not None
            assert match.prefills == prefills
