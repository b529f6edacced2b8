"""How an engine's scheduler works: which requests start, what a step computes, and what happens in a full cache.

`Engine.schedule` gives the facts. The simulation (`kvcalc.simulation`) and the short form (`kvcalc.throughput.serving`)
read the same ones, and know no engine. The sources are in the engines' own modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.records import NamedTuple
from kvcalc.throughput.scheduling import STEP_TOKENS, StepRules

# Which DP rank gets a request. The simulation's routers say how.
ROUND_ROBIN, LEAST_LOADED, FEWEST_TOKENS = "round robin", "least loaded", "fewest tokens"


class NewTokenRatio(NamedTuple):
    """The part of the answers of running requests that must be free when another request starts.

    The ratio is `first` at the start, and falls to `least` in `steps` decode steps. At most `most_tokens` tokens of an
    answer count. When requests are retracted, the ratio rises to what the others took, and `retract_steps` steps more.
    """

    first: float
    least: float
    steps: int
    most_tokens: int
    retract_steps: int


class Balance(NamedTuple):
    """Prompts wait until all DP ranks have one, but for `most_steps` steps at most.

    If all have one, they wait for `gathering_steps` steps more, so that there are several.
    """

    most_steps: int
    gathering_steps: int


class Schedule(NamedTuple):
    """The facts about an engine's scheduler.

    A request needs room for its prompt to start, or with `reserves_answer` also for its longest answer. Without that,
    a request may find a full cache while it runs. Then the last one is preempted or, with `new_tokens`, those with the
    shortest answers so far are retracted.
    """

    name: str  # in documents
    step_tokens: int = STEP_TOKENS  # the most that one DP rank computes in a step of one pipeline stage
    stages: int = 1  # the pipeline stages that have steps of their own in the time of one step of the model
    mixes: bool = True  # whether prompts are computed in the steps of decoding requests, not in steps of their own
    divides: bool = True  # whether a prompt is divided over steps, and does not wait for one with room for all of it
    overlaps: bool = False  # whether a step is scheduled while the one before it runs
    reserves_answer: bool = False
    new_tokens: NewTokenRatio | None = None
    has_slots: bool = False  # whether requests run in slots with memory of their own, which share a step
    part_ends: tuple[int, ...] = ()  # where parts of a prompt end in any case: tokens before the end of the prompt
    finds_preempted: bool = False  # whether a preempted request is looked up in the prefix cache when it starts again
    merges_prefixes: bool = False  # whether blocks that two requests compute at the same time become one
    routing: str = LEAST_LOADED  # which DP rank gets a request
    enough_tokens: int | None = None  # no other prompt joins a step with this many prompt tokens
    receives_every: int = 1  # after how many decode steps the scheduler looks for new requests; after prompts at once
    reads_beside: bool = False  # whether the host reads requests while the prompts of others are computed
    is_exact: bool = False  # whether step_tokens is what was asked for, even if a whole prompt has no room
    balance: Balance | None = None  # how long prompts wait for those of other DP ranks. None: they do not

    def steps(self, running: int, longest_tokens: int, checked_tokens: int = 1) -> StepRules:
        """The steps of a model with at most `running` requests of up to `longest_tokens` tokens.

        Each running request has `checked_tokens` tokens in a step: more than one if tokens are drafted. In steps with
        prompts and others, all of them have room, and a prompt that is not divided beside them.
        """
        tokens = self.step_tokens * self.stages
        if self.mixes and not self.has_slots and not self.is_exact:
            tokens = max(tokens, running * checked_tokens + (0 if self.divides else longest_tokens))
        return StepRules(tokens, self.mixes, self.divides, self.overlaps, self.enough_tokens or 0, self.reads_beside)

    def end_of_part(self, start: int, prompt: int, room: int) -> int:
        """Where the next part of a prompt of `prompt` tokens ends if a step has `room` tokens left for it."""
        end = min(prompt, start + room)
        stops = [prompt - min(tokens, self.step_tokens) for tokens in self.part_ends]
        return min((stop for stop in stops if start < stop <= end), default=end)


class Disaggregation(NamedTuple):
    """What prefill and decode on separate instances need."""

    host_passes: int  # how often a request passes the engine's server one after the other
    staged_prefill: bool  # whether an instance may have several pipeline stages
    staged_decode: bool
    reserved_tokens: int  # are left free for a request when it is admitted to a decode instance
    transfer_buffers: int  # the buffers of one prompt on each device
    uncounted: str  # the memory that is not counted
    settings: Mapping[str, Mapping[str, Any]] = {}  # by role: the options that an instance has in any case
    limits_held: bool = False  # whether its limit of running requests counts those that are sent or received, too
    # What a preempted request of a decode instance need not compute again: "nothing" but what it finds in the
    # instance's own prefix cache, or "all".
    preempted_keep: str = "nothing"
