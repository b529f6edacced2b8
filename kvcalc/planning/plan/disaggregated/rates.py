"""The short form of separate pools: what their instances complete, and what a request takes that nobody else delays.

Plain arithmetic: it knows no model, engine or device. It says with how many instances the search of a plan begins, and
in which order it tries layouts; what a plan prints is simulated. A request is computed by a prefill instance, its cache
is sent, and a decode instance answers:

    TTFT = host + prefill + transfer + first step
    TPOT = one decode step per token, which no prefill disturbs

A prefill instance completes a prompt every `interval` seconds at most: the time of a prompt in full steps, or the
transfer if that takes longer, because the link and the device are two servers in a row. A prompt waits for one as in
M/D/1, for a server that is as fast as the whole pool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import ceil, inf

from kvcalc.records import NamedTuple
from kvcalc.search import largest_where, smallest_where

# A count that is a whole number but for rounding is not rounded up.
_TINY = 1e-9


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
        seconds = max(step / batch / self.stages, transfer)
        return seconds if self.slots is None else max(seconds, (step + batch * transfer) / self.slots)


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

    def decoding(self, rate: float) -> int:
        """About how many requests are in the batch at a rate, at most `most`."""
        return smallest_where(lambda decoding: self.rate(decoding) >= rate, 1, self.most)


class Pair(NamedTuple):
    """A layout of prefill and one of decode instances. Sending a prompt's cache takes `transfer` seconds."""

    prefill: Prefill
    decode: Decode
    transfer: float

    def capacities(self, prefills: int, decodes: int, batch: int | None = None) -> tuple[float, float]:
        """The most requests per second of the prefill and of the decode instances, by default with full batches."""
        answered = self.decode.rate(self.decode.largest(self.transfer) if batch is None else batch)
        each = min(answered, 1 / self.transfer) if self.transfer else answered
        return prefills / self.prefill.interval(self.transfer), decodes * each

    def prefills(self, rate: float, wait_seconds: float | None, most: int) -> int:
        """The fewest prefill instances, at most `most`, that keep up with a rate and let a prompt wait no longer."""
        interval = self.prefill.interval(self.transfer)

        def serves(number: int) -> bool:
            used = rate * interval / number
            wait = used / (1 - used) * interval / number / 2 if used < 1 else inf
            return used < 1 and (wait_seconds is None or wait <= wait_seconds)

        return smallest_where(serves, 1, most)

    @property
    def host_seconds(self) -> float:
        """What the servers of both instances take for a request."""
        return self.prefill.host_seconds + self.decode.host_seconds

    @property
    def ttft_seconds(self) -> float:
        """The time to the first token of a request alone."""
        first_step = self.decode.first_steps * self.decode.step(1)
        return self.host_seconds + self.prefill.seconds(1) + self.transfer + first_step

    def stay_seconds(self, decoding: float) -> float:
        """How long a request stays that waits for no instance, with `decoding` requests in its batch."""
        return self.ttft_seconds + self.decode.output_tokens * self.decode.tpot(max(decoding, 1.0))


def between_counts(seconds: Callable[[int], float]) -> Callable[[float], float]:
    """The times of whole numbers of requests, each computed once, and straight lines between them."""
    at = lru_cache(maxsize=None)(seconds)

    def interpolated(requests: float) -> float:
        below = int(requests)
        rest = requests - below
        return at(below) + rest * (at(below + 1) - at(below)) if rest else at(below)

    return interpolated
