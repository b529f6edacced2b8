"""What a replica did over time: waiting and running requests, blocks, and the times between tokens."""

from __future__ import annotations

from math import exp, log

from kvcalc.records import NamedTuple

# Twice as many samples are kept at most. When there are more, every second one is dropped.
_MOST_SAMPLES = 1024
# The gaps between tokens are counted in classes this far apart. A run of steps is divided into parts as wide, so a
# percentile is exact to 1 %.
_CLASS = log(1.01)


class Sample(NamedTuple):
    """The state of a replica at one time, in seconds from the start."""

    seconds: float
    waiting: int
    running: int
    used_blocks: int


class Timeline:
    """Samples at the ends of events, at first of every event, and means over time. Means alone if not `samples`."""

    def __init__(self, *, samples: bool = True) -> None:
        self.samples: list[Sample] = []
        self.running_seconds = self.busy_seconds = 0.0
        self._every, self._skipped = 1 if samples else 2**62, 1

    def spend(self, seconds: float, running: int) -> bool:
        """Add an event that ran `running` requests for `seconds`. Returns whether the state after it is recorded."""
        self.running_seconds += seconds * running
        self.busy_seconds += seconds
        self._skipped = self._skipped % self._every + 1
        return self._skipped == 1

    def add(self, sample: Sample) -> None:
        """Keep a state."""
        self.samples.append(sample)
        if len(self.samples) >= 2 * _MOST_SAMPLES:
            del self.samples[::2]
            self._every *= 2


class TokenGaps:
    """The times between a request's tokens, counted in classes of 1 %. `longest` is exact. None if not `counts`."""

    def __init__(self, *, counts: bool = True) -> None:
        self.longest = 0.0
        self._is_counting = counts
        self._counts: dict[int, int] = {}

    def add(self, seconds: float, tokens: int) -> None:
        """`tokens` tokens came `seconds` after the one before. Steps of a test may take no time."""
        if seconds > 0 and self._is_counting:
            place = round(log(seconds) / _CLASS)
            self._counts[place] = self._counts.get(place, 0) + tokens
            if seconds > self.longest:
                self.longest = seconds

    def add_run(self, first: float, last: float, steps: int, tokens: int) -> None:
        """`tokens` tokens came in each of `steps` steps, whose seconds rise evenly from `first` to `last`."""
        if not tokens or not self._is_counting:
            return
        parts = 1 if last <= first else min(steps, 1 + int((last - first) / (first * 0.01)))
        if parts == 1:
            self.add(first + (last - first) * 0.5, tokens * steps)
        else:
            for part in range(parts):
                middle = first + (last - first) * (part + 0.5) / parts
                self.add(middle, tokens * (steps * (part + 1) // parts - steps * part // parts))
        self.longest = max(self.longest, first, last)

    @property
    def tokens(self) -> int:
        """The number of tokens that were counted."""
        return sum(self._counts.values())

    def merge(self, other: TokenGaps) -> None:
        """Add the gaps of another replica."""
        for place, tokens in other._counts.items():
            self._counts[place] = self._counts.get(place, 0) + tokens
        self.longest = max(self.longest, other.longest)

    def percentile(self, share: float) -> float | None:
        """The gap that `share` of the tokens do not exceed, and at most `longest`. None if there are no gaps."""
        total = self.tokens
        seen = 0
        for place in sorted(self._counts):
            seen += self._counts[place]
            if seen >= share * total:
                return min(exp(place * _CLASS), self.longest)
        return None
