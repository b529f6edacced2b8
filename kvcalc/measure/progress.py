"""What a run is doing, and how long all runs will take. This module does not need torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kvcalc.records import NamedTuple

# The phases of a run, in order.
PHASES = ("weights", "prefill", "fill the cache", "compare kernels", "decode", "attention core")


class PlannedRun(NamedTuple):
    """A run: what it measures, and the expected seconds of each of its phases."""

    title: str
    seconds: Mapping[str, float]


class Progress:
    """Follows the runs. It prints nothing; subclasses show it.

    Expected times follow from the roofs at first. They are corrected by the time that finished phases really took.
    """

    def __init__(self) -> None:
        self.runs: Sequence[PlannedRun] = ()
        self.number = 0
        """The number of the present run, from 1. 0 before the first one."""
        self.phase, self.done, self.of = "", 0, 0
        self._started = self._began = time.monotonic()

    def plan(self, runs: Sequence[PlannedRun]) -> None:
        """All runs are known. Called once, before the first one."""
        self.runs, self._began = runs, time.monotonic()

    def start(self, number: int) -> None:
        """The run `number` begins."""
        self.number = number
        self("", 0, 0)

    def __call__(self, phase: str, done: int, of: int) -> None:
        """`done` parts of `of` of a phase are finished."""
        self.phase, self.done, self.of = phase, done, of

    def stop(self) -> None:
        """Show nothing any more. May be called from another thread."""

    def elapsed_seconds(self) -> float:
        """Seconds since the measurement started."""
        return time.monotonic() - self._started

    def expected_seconds(self) -> float | None:
        """Seconds that all of it is expected to take. None before the runs are known."""
        if not self.runs:
            return None
        every = sum(sum(run.seconds.values()) for run in self.runs)
        done = sum(sum(run.seconds.values()) for run in self.runs[: max(0, self.number - 1)]) + self._done_of_run()
        taken = time.monotonic() - self._began
        # Before a tenth is done, the first phases say little about the others.
        factor = taken / done if done > every / 10 else max(1.0, taken / max(done, every / 10))
        return self._began - self._started + taken + max(0.0, every - done) * factor

    def _done_of_run(self) -> float:
        if not self.number or self.phase not in PHASES:
            return 0.0
        seconds = self.runs[self.number - 1].seconds
        before = sum(seconds.get(phase, 0.0) for phase in PHASES[: PHASES.index(self.phase)])
        return before + seconds.get(self.phase, 0.0) * (self.done / self.of if self.of else 0.0)
