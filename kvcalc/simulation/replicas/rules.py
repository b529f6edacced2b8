"""What a replica's scheduler may do, and what lies between the engine and its clients."""

from __future__ import annotations

from fractions import Fraction

from kvcalc.engines.scheduler import Schedule
from kvcalc.records import NamedTuple


class Lag(NamedTuple):
    """What a request waits for its first token besides what the engine does, which the simulation has.

    - seconds: host time. token_seconds: host time for each token of the prompt. steps: decode steps in the server's
      pipeline. launch_seconds: host time to launch a prompt, which counts as far as the prompt takes less.
    """

    seconds: float
    steps: float = 0.0
    token_seconds: float = 0.0
    launch_seconds: float = 0.0


class Rules(NamedTuple):
    """The engine's schedule, and what a replica adds to it.

    - step_tokens: the most tokens of one step: one for each decoding request, and the chunks of prompts.
    - max_running: the most running requests.
    - lag: the time between the engine and the client. None is no time.
    - tokens_per_step: the mean number of tokens that a decode step gives a sequence. It computes `checked_tokens`
      tokens of each sequence, which has slots for `lookahead_tokens` beyond its own. More than 1, 1 and 0 if tokens are
      drafted.
    - keeps: what a preempted request need not compute again: the tokens that it "found" in the prefix cache, "nothing",
      or "all" but its last token.
    - sends: whether a request that ends keeps its blocks until its cache is sent to another instance.
    """

    schedule: Schedule
    step_tokens: int
    max_running: int
    lag: Lag | None = None
    tokens_per_step: Fraction = Fraction(1)
    checked_tokens: int = 1
    lookahead_tokens: int = 0
    keeps: str = "found"
    sends: bool = False
