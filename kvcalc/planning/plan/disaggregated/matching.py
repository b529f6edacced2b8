"""The numbers of prefill and decode instances that serve a load, and how long their requests take.

Plain arithmetic: it knows no model, engine or device. A request waits for a prefill instance, is computed there, its
cache is sent, and a decode instance answers:

    TTFT = host + queue + prefill + transfer + first step
    TPOT = one decode step per token, which no prefill disturbs

A prefill instance completes a prompt every `interval` seconds at most: the time of a prompt in full steps, or the
transfer if that takes longer, because the link and the device are two servers in a row. With fixed times, all waiting
is that for the slower one (Friedman, Reduction methods for tandem queuing systems, 1965). Requests come from many
clients, so they arrive at random, and the router asks the instances in turn. So each of x instances gets every x-th
request: the wait is that of M/D/1, utilization x interval / (2 x (1 - utilization)), for one instance, and that of
Kramer and Langenbach-Belz's approximation (1976) for several, whose requests are more regular by the factor x. A cache
waits for the link of its decode instance in the same way, because several prefill instances may send to it at once.

With a fixed number of clients, a new request sees the queue without itself (`rates.seen_share`), and the rate
follows from the time that a request stays. `x` is then at least the number with which the prefill instances are not the
bottleneck: they complete the prompts that the clients send if no prompt waits.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf
from sys import maxsize

from kvcalc.planning.plan.disaggregated.rates import TINY, Decode, Prefill, around_first, mean_wait, seen_share
from kvcalc.records import NamedTuple
from kvcalc.search import smallest_where

# The share of the time that instances work under the load of `busy_load`.
_BUSY = 0.9


class Load(NamedTuple):
    """The load: requests per second, or a number of clients that each have one request at a time."""

    requests_per_second: float | None = None
    concurrency: int | None = None


class Times(NamedTuple):
    """The stages of a request. `decoding` are the requests in the batch of one decode instance.

    `prompts` are the prompts in a prefill step. `utilization` is that of the prefill instances and their links.
    """

    requests_per_second: float
    decoding: float
    prompts: int
    utilization: float
    host_seconds: float
    queue_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    first_step_seconds: float
    tpot_seconds: float

    @property
    def ttft_seconds(self) -> float:
        """The time to the first token, which is the sum of its parts."""
        parts = self.host_seconds, self.queue_seconds, self.prefill_seconds, self.transfer_seconds
        return sum(parts) + self.first_step_seconds


class Match(NamedTuple):
    """`prefills` prefill and `decodes` decode instances, and their times."""

    prefills: int
    decodes: int
    num_devices: int
    times: Times


Judge = Callable[[Times], bool]
"""Whether the time to first token meets its target. More instances of either pool never make it longer."""


class Pair(NamedTuple):
    """A layout of prefill and one of decode instances. Sending a prompt's cache takes `transfer` seconds."""

    prefill: Prefill
    decode: Decode
    transfer: float

    def times(self, prefills: int, decodes: int, load: Load) -> Times | None:
        """The times of a load on these numbers of instances. None if they cannot serve it."""
        return self._times_with(decodes, load)(prefills)

    def _times_with(self, decodes: int, load: Load) -> Callable[[int], Times | None]:
        """`times` as a function of the number of prefill instances. What does not depend on it is computed once."""
        if load.concurrency is None:
            return self._open(decodes, load.requests_per_second or 0.0)
        return self._closed(decodes, load.concurrency)

    def capacities(self, prefills: int, decodes: int) -> tuple[float, float]:
        """The most requests per second of the prefill and of the decode instances."""
        answered = self.decode.rate(self.decode.largest(self.transfer))
        each = min(answered, 1 / self.transfer) if self.transfer else answered
        return prefills / self.prefill.interval(self.transfer), decodes * each

    def busy_load(self, prefills: int, decodes: int) -> Load:
        """Requests that keep the busier of these pools at work for nearly all of the time."""
        return Load(requests_per_second=_BUSY * min(self.capacities(prefills, decodes)))

    def cheapest(
        self, load: Load, meets: Judge, limits: tuple[int, int, int], weights: tuple[float, float] = (1.0, 1.0),
        most_cost: float = inf,
    ) -> Match | None:  # fmt: skip
        """The numbers of instances that cost the least, and at most `most_cost`. None if there are none.

        `limits` are the most devices of the prefill instances, of the decode instances, and of both. `weights` are the
        costs of a device of the prefill and of the decode instances.
        """
        of_prefills, of_decodes, of_both = limits
        costs = weights[0] * self.prefill.devices, weights[1] * self.decode.devices
        last = min(of_decodes, of_both - self.prefill.devices) // self.decode.devices
        decodes = self._first_decodes(load, meets, last)
        if decodes is None:
            return None
        best: Match | None = None
        while decodes <= min(last, _affordable(most_cost - costs[0], costs[1])):
            most = min(of_prefills, of_both - decodes * self.decode.devices) // self.prefill.devices
            most = min(most, _affordable(most_cost - decodes * costs[1], costs[0]))
            found = self.fewest_prefills(decodes, load, meets, most)
            if found is not None:
                cost = found.prefills * costs[0] + decodes * costs[1]
                if cost <= most_cost and (best is None or cost < most_cost):
                    best, most_cost = found, cost
            decodes += 1
        return best

    def _first_decodes(self, load: Load, meets: Judge, last: int) -> int | None:
        """The fewest decode instances, at most `last`, with which any number of prefill instances meets the target."""

        def with_all(decodes: int) -> bool:
            found = self.times(maxsize, decodes, load)  # no prompt waits
            return found is not None and meets(found)

        return smallest_where(with_all, 1, last) if last > 0 and with_all(last) else None

    def fewest_prefills(self, decodes: int, load: Load, meets: Judge, last: int) -> Match | None:
        """The fewest prefill instances, at most `last`, for a number of decode instances. None if none serve it."""
        times = self._times_with(decodes, load)

        def serves(prefills: int) -> bool:
            found = times(prefills)
            return found is not None and meets(found)

        low = self._least_prefills(decodes, load)
        if low > last or not serves(last):
            return None
        prefills = smallest_where(serves, low, last)
        found = times(prefills)
        devices = prefills * self.prefill.devices + decodes * self.decode.devices
        return None if found is None else Match(prefills, decodes, devices, found)

    def _least_prefills(self, decodes: int, load: Load) -> int:
        """The fewest prefill instances that are not the bottleneck."""
        interval = self.prefill.interval(self.transfer)
        if load.concurrency is None:
            busy = (load.requests_per_second or 0.0) * interval
            return int(busy + TINY) + 1  # an endless queue forms at a utilization of 1
        return max(1, ceil(self._rate_without_queue(decodes, load.concurrency) * interval - TINY))

    def _open(self, decodes: int, rate: float) -> Callable[[int], Times | None]:
        largest, each = self.decode.largest(self.transfer), rate / decodes
        if self.decode.rate(largest) * (1 + TINY) < each:
            return lambda prefills: None
        decoding = self.decode.decoding(each)
        return lambda prefills: self._timed((prefills, decodes), rate, decoding, None)

    def _rate_without_queue(self, decodes: int, clients: int) -> float:
        def has_all(decoding: float) -> bool:
            stay = decodes * self.decode.rate(decoding) * (self._beside(decoding) + self.prefill.seconds(1))
            return stay + decodes * decoding >= clients

        _, decoding = around_first(has_all, clients / decodes)
        return decodes * self.decode.rate(decoding)

    def _beside(self, decoding: float) -> float:
        """The seconds that a request spends outside the prefill step and the batch, without the queue."""
        steps = (self.decode.first_steps - 1) * self.decode.step(decoding)
        return self.prefill.host_seconds + self.decode.host_seconds + self.transfer + steps

    def _closed(self, decodes: int, clients: int) -> Callable[[int], Times | None]:
        if -(-clients // decodes) > self.decode.largest(self.transfer):
            return lambda prefills: None
        least = self._least_prefills(decodes, Load(concurrency=clients))
        return lambda prefills: None if prefills < least else self._closed_times(prefills, decodes, clients)

    def _closed_times(self, prefills: int, decodes: int, clients: int) -> Times | None:
        def at(decoding: float) -> Times | None:
            return self._timed((prefills, decodes), decodes * self.decode.rate(decoding), decoding, clients)

        def has_all(decoding: float) -> bool:
            found = at(decoding)
            if found is None:
                return True
            beside = found.queue_seconds + found.prefill_seconds + self._beside(decoding)
            return found.requests_per_second * beside + decodes * decoding >= clients

        decoding, _ = around_first(has_all, clients / decodes)
        return at(decoding)

    def _timed(self, instances: tuple[int, int], rate: float, decoding: float, clients: int | None) -> Times | None:
        """The times at a rate, of a number of clients or of requests at random. None for an endless queue."""
        prefills, decodes = instances
        interval, tpot = self.prefill.interval(self.transfer), self.decode.tpot(max(decoding, 1.0))
        used, received = rate / prefills * interval, rate / decodes * self.transfer
        if max(used, received) >= 1:
            return None
        waits = (
            mean_wait(load if clients is None else load * seen_share(load, clients, number), service, number)
            for load, service, number in ((used, interval, prefills), (received, self.transfer, decodes))
        )
        queue = sum(waits)
        prompts = min(1 + int(rate / prefills * queue), self.prefill.most_prompts)
        return Times(
            rate, decoding, prompts, used, self.prefill.host_seconds + self.decode.host_seconds, queue,
            self.prefill.seconds(prompts), self.transfer, self.decode.first_steps * self.decode.step(decoding), tpot,
        )  # fmt: skip


def _affordable(cost: float, of_each: float) -> int:
    """The number of instances that cost no more than this, and one more if it is a matter of rounding."""
    return int(min(cost / of_each + TINY, maxsize)) if of_each else maxsize
