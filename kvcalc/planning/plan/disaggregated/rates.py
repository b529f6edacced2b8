"""The times of one prefill and of one decode instance, as functions of their load, and of a queue.

Plain arithmetic: it knows no model, engine or device. `matching` says how the instances work together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import ceil, exp, sqrt

from kvcalc.records import NamedTuple
from kvcalc.search import largest_where

# A count that is a whole number but for rounding is not rounded up.
TINY = 1e-9
# Halvings of the range of decoding requests.
_ROUNDS = 36
# Rounds after which the share that a new request sees changes by less than 1 %.
_SHARE_ROUNDS = 12


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
        return ceil(decoding + self.rate(decoding) * waits - TINY)

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


def around_first(holds: Callable[[float], bool], high: float) -> tuple[float, float]:
    """Two close numbers between 0 and `high`: a condition holds from the second on, and not up to the first.

    The second is `high` if the condition holds nowhere below it.
    """
    low = 0.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def mean_wait(utilization: float, service: float, turns: int) -> float:
    """The mean wait for a server with a fixed `service` time that gets every `turns`-th of requests at random."""
    if not utilization:
        return 0.0
    idle = 1 - utilization
    regular = exp(-2 * idle / (3 * utilization) * (1 - 1 / turns) ** 2 * turns)
    return utilization * service / (2 * idle * turns) * regular


def seen_share(utilization: float, clients: int, instances: int) -> float:
    """The share of an instance's utilization, below 1, that a new request of a closed loop sees.

    It is at most (clients - 1) / clients.

    It sees the queue that there would be with one client less (the arrival theorem; for fixed service times Reiser's
    approximation, A queueing network analysis of computer communication networks with window flow control, 1979). The
    queue grows with the clients by dq/dU x dU/dclients. Requests that think on average for Z services,

        clients / instances = U (Z + 1) + queue,

    so dU/dclients is 1 / instances / (Z + 1 + dq/dU). The queue is that of M/D/1 at the share c: c U^2 / (2 (1 - c U)).
    With few clients it shrinks less than this, by 1 / sqrt(clients): then TTFT is within 5 % of queues that are played
    out, with 5 to 100 clients and 75 to 95 % utilization (tests). Times are in units of the service.
    """
    if utilization <= 0 or clients == 1:
        return 0.0
    most = share = (clients - 1) / clients
    for _ in range(_SHARE_ROUNDS):
        used = share * utilization
        wait = used / (2 * (1 - used))
        more = used * (2 - used) / (2 * (1 - used) ** 2)
        elsewhere = clients / instances / utilization - 1 - wait
        less = (more + 0.5) / (instances * (elsewhere + 1 + more)) * (1 - 1 / sqrt(clients))
        seen = utilization * (wait + 0.5) - less
        wanted = 2 * max(seen, 0.0) / (1 + 2 * max(seen, 0.0)) / utilization
        share = (share + min(wanted, most)) / 2
    return share


def between_counts(seconds: Callable[[int], float]) -> Callable[[float], float]:
    """The times of whole numbers of requests, each computed once, and straight lines between them."""
    at = lru_cache(maxsize=None)(seconds)

    def found(requests: float) -> float:
        below = int(requests)
        rest = requests - below
        return at(below) + rest * (at(below + 1) - at(below)) if rest else at(below)

    return found
