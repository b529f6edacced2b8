"""The short form of two pools: how many instances a load needs, and about how long its requests take.

Plain arithmetic: it knows no model, engine or device. It says where the search of a plan begins, and in which order it
tries layouts; what a plan prints is simulated. A request waits for a prefill instance, is computed there, its cache is
sent, and a decode instance answers:

    TTFT = host + queue + prefill + transfer + first step
    TPOT = one decode step per token, which no prefill disturbs

A prefill instance completes a prompt every `interval` seconds at most: the time of a prompt in full steps, or the
transfer if that takes longer, because the link and the device are two servers in a row. The wait is that of M/D/1, of a
server that is as fast as the whole pool. Of a fixed number of clients, the rate follows from Little's law.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import ceil
from sys import maxsize

from kvcalc.records import NamedTuple
from kvcalc.search import largest_where, smallest_where

# A count that is a whole number but for rounding is not rounded up.
_TINY = 1e-9
# Halvings of the range of decoding requests.
_ROUNDS = 36
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
    times: Times


class Prefill(NamedTuple):
    """The times of one prefill instance on `devices` devices.

    `seconds` is the time of a number of prompts in one step, at most `batch`, and `stages` steps run at once in a
    pipeline. `slots` is the number of prompts whose cache fits, those being sent included, or None without a limit.
    """

    devices: int
    seconds: Callable[[int], float]
    batch: int
    stages: int = 1
    slots: int | None = None
    host_seconds: float = 0.0

    @property
    def most_prompts(self) -> int:
        """The most prompts in one step, whose cache fits."""
        return self.batch if self.slots is None else min(self.batch, self.slots)

    def interval(self, transfer: float) -> float:
        """The seconds between prompts at the highest rate, if sending the cache of one takes `transfer` seconds."""
        batch = self.most_prompts
        step = self.seconds(batch)
        found = max(step / batch / self.stages, transfer)
        return found if self.slots is None else max(found, (step + batch * transfer) / self.slots)


class Decode(NamedTuple):
    """The times of one decode instance on `devices` devices, for answers of `output_tokens` tokens.

    `tpot` is the time per token with a number of requests in the batch, at most `most`. `slots` is the number of
    requests whose cache fits, those being received included, or None without a limit. A request waits `first_steps`
    steps for its first token: the one that runs when it arrives, those that are scheduled already, and its own. A step
    gives `tokens_per_step` tokens, more than one if tokens are drafted.
    """

    devices: int
    tpot: Callable[[float], float]
    most: int
    output_tokens: int
    slots: int | None = None
    first_steps: float = 1.0
    host_seconds: float = 0.0
    tokens_per_step: float = 1.0

    def step(self, decoding: float) -> float:
        """The seconds of a step with `decoding` requests in the batch."""
        return self.tpot(max(decoding, 1.0)) * self.tokens_per_step

    def rate(self, decoding: float) -> float:
        """The requests per second of which `decoding` are in the batch on average."""
        return decoding / (self.output_tokens * self.tpot(max(decoding, 1.0)))

    def held(self, decoding: float, transfer: float) -> int:
        """The requests in the cache: those that decode, that wait for their first step, or that are being received."""
        waits = transfer + (self.first_steps - 1) * self.step(decoding)
        return ceil(decoding + self.rate(decoding) * waits - _TINY)

    def largest(self, transfer: float) -> int:
        """The most requests in the batch, with room for those being received. 0 if there is no such number."""
        if self.slots is None:
            return self.most
        slots = self.slots
        return largest_where(lambda decoding: self.held(decoding, transfer) <= slots, 0, self.most)

    def decoding(self, rate: float) -> float:
        """The mean number of requests in the batch at a rate. It is `most` for a rate that no smaller batch reaches."""
        _, found = around_first(lambda decoding: self.rate(decoding) >= rate, float(self.most))
        return found


class Pair(NamedTuple):
    """A layout of prefill and one of decode instances. Sending a prompt's cache takes `transfer` seconds."""

    prefill: Prefill
    decode: Decode
    transfer: float

    def capacities(self, prefills: int, decodes: int) -> tuple[float, float]:
        """The most requests per second of the prefill and of the decode instances."""
        answered = self.decode.rate(self.decode.largest(self.transfer))
        each = min(answered, 1 / self.transfer) if self.transfer else answered
        return prefills / self.prefill.interval(self.transfer), decodes * each

    def busy_load(self, prefills: int, decodes: int) -> Load:
        """Requests that keep the busier of these pools at work for nearly all of the time."""
        return Load(requests_per_second=_BUSY * min(self.capacities(prefills, decodes)))

    def times(self, prefills: int, decodes: int, load: Load) -> Times | None:
        """The times of a load on these numbers of instances. None if they cannot serve it."""
        instances, largest, clients = (prefills, decodes), self.decode.largest(self.transfer), load.concurrency
        if clients is None:
            rate = load.requests_per_second or 0.0
            if self.decode.rate(largest) * (1 + _TINY) < rate / decodes:
                return None
            return self._timed(instances, rate, self.decode.decoding(rate / decodes))
        if clients > decodes * largest:
            return None

        def at(decoding: float) -> Times | None:
            return self._timed(instances, decodes * self.decode.rate(decoding), decoding)

        def has_all(decoding: float) -> bool:
            times = at(decoding)
            if times is None:
                return True
            beside = times.ttft_seconds - self.decode.step(decoding)
            return times.requests_per_second * beside + decodes * decoding >= clients

        return at(around_first(has_all, clients / decodes)[0])

    def _timed(self, instances: tuple[int, int], rate: float, decoding: float) -> Times | None:
        """The times at a rate. None for an endless queue."""
        (prefills, decodes), interval = instances, self.prefill.interval(self.transfer)
        used, received = rate / prefills * interval, rate / decodes * self.transfer
        if max(used, received) >= 1:
            return None
        queue = _mean_wait(used, interval / prefills) + _mean_wait(received, self.transfer / decodes)
        prompts = min(1 + int(rate / prefills * queue), self.prefill.most_prompts)
        return Times(
            rate, decoding, prompts, used, self.prefill.host_seconds + self.decode.host_seconds, queue,
            self.prefill.seconds(prompts), self.transfer, self.decode.first_steps * self.decode.step(decoding),
            self.decode.tpot(max(decoding, 1.0)),
        )  # fmt: skip

    def fewest(self, load: Load, meets: Callable[[Times], bool], limits: tuple[int, int, int]) -> Match | None:
        """The fewest decode instances that serve a load, and the fewest prefill instances beside them.

        None if there are none. `meets` says whether the times meet the targets: more instances are never slower.
        `limits` are the most devices of the prefill instances, of the decode instances, and of both. So many prefill
        instances that no prompt waits long complete the prompts that clients send.
        """
        of_prefills, of_decodes, of_both = limits
        most_decodes = min(of_decodes, of_both - self.prefill.devices) // self.decode.devices

        def serves(prefills: int, decodes: int) -> bool:
            times = self.times(prefills, decodes, load)
            return times is not None and meets(times)

        if most_decodes < 1 or not serves(maxsize, most_decodes):
            return None
        decodes = smallest_where(lambda decodes: serves(maxsize, decodes), 1, most_decodes)
        most = min(of_prefills, of_both - decodes * self.decode.devices) // self.prefill.devices
        least = self._least_prefills(decodes, load)
        if least > most or not serves(most, decodes):
            return None
        prefills = smallest_where(lambda prefills: serves(prefills, decodes), least, most)
        times = self.times(prefills, decodes, load)
        return None if times is None else Match(prefills, decodes, times)

    def _least_prefills(self, decodes: int, load: Load) -> int:
        """The fewest prefill instances that are not the bottleneck."""
        interval = self.prefill.interval(self.transfer)
        if load.concurrency is None:
            # An endless queue forms at a utilization of 1.
            return int((load.requests_per_second or 0.0) * interval + _TINY) + 1
        without_queue = self.times(maxsize, decodes, load)
        return 1 if without_queue is None else max(1, ceil(without_queue.requests_per_second * interval - _TINY))


def _mean_wait(utilization: float, service: float) -> float:
    """The mean wait for a server with a fixed `service` time and random arrivals (M/D/1)."""
    return utilization * service / (2 * (1 - utilization))


def around_first(holds: Callable[[float], bool], high: float) -> tuple[float, float]:
    """Two close numbers between 0 and `high`: a condition holds from the second on, and not up to the first.

    The second is `high` if the condition holds nowhere below it.
    """
    low = 0.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def between_counts(seconds: Callable[[int], float]) -> Callable[[float], float]:
    """The times of whole numbers of requests, each computed once, and straight lines between them."""
    at = lru_cache(maxsize=None)(seconds)

    def found(requests: float) -> float:
        below = int(requests)
        rest = requests - below
        return at(below) + rest * (at(below + 1) - at(below)) if rest else at(below)

    return found
