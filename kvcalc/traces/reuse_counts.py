"""Counts of blocks that are used again, by their distance in the stack: exact ones, and those of a sample.

`kvcalc.traces.reuse` says what a distance is, and how the blocks are sampled.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import sqrt

from kvcalc.records import NamedTuple

_MASK = (1 << 64) - 1
# Odd numbers with well-mixed bits: the golden ratio, and a multiplier of MurmurHash3's finalizer.
_MIX, _MIX_AGAIN = 0x9E3779B97F4A7C15, 0xC4CEB9FE1A85EC53
_OFFSET = 0x5851F42D4C957F2D  # so that the name 0 is not always in the sample
# The sampled blocks are divided into this many parts, whose differences give the error.
_PARTS = 16
# The upper ends of the distances' bins, for the error: 8 for each doubling.
_EDGES = sorted({round(2 ** (step / 8)) for step in range(64 * 8)})
# Standard errors on either side of a range: with 16 parts, 99 % of errors are within 2.95 of them (Student's t).
_ERRORS = 2.95

Groups = list[tuple[int, int]]
"""The first blocks of a prompt, as neighbours in the stack: the slot that owns them, and their number."""


class Reuse(NamedTuple):
    """What a cache of `cache_blocks` blocks finds. `hit_tokens` is between `low_tokens` and `high_tokens`.

    Without sampling, all three are the same. `hit_squares` is the sum of the squares of the tokens that each prompt
    finds: the attention of a prompt grows with the square of its tokens.
    """

    cache_blocks: int
    hit_tokens: float
    hit_squares: float
    low_tokens: float
    high_tokens: float


class Path:
    """The blocks of a prompt, or those in the sample, with their places; and how many of its tokens can be found."""

    def __init__(self, blocks: Sequence[int], block_tokens: int, usable_tokens: int, shift: int) -> None:
        self.num_blocks = len(blocks)
        self.block_tokens = block_tokens
        self.usable_tokens = min(usable_tokens, len(blocks) * block_tokens)
        self.blocks = blocks
        self.places: Sequence[int] = range(len(blocks))
        if shift:
            limit = (_MASK + 1) >> shift
            places = [
                place
                for place, block in enumerate(blocks)
                if ((mixed := (block ^ _OFFSET) * _MIX & _MASK) ^ mixed >> 29) * _MIX_AGAIN & _MASK < limit
            ]
            self.places = places
            self.blocks = [blocks[place] for place in places]

    def span(self, place: int) -> tuple[int, int]:
        """Where the usable tokens of a block start and end in the prompt."""
        start = place * self.block_tokens
        return start, max(start, min(start + self.block_tokens, self.usable_tokens))


def sampled(blocks: Iterable[int], shift: int) -> list[int]:
    """Those of `blocks` that a sample of one in 2**shift has."""
    return list(Path(list(blocks), 1, 0, shift).blocks)


class ExactCounts:
    """Exact counts. A run of blocks adds to a range of distances, so the differences between distances are kept.

    The runs are counted as if all their tokens were usable. The last block of a prompt is corrected.
    """

    shift = 0

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.usable_tokens = 0
        self._counts, self._places = array("q", (0, 0)), array("q", (0, 0))
        self._tokens, self._squares = array("q", (0, 0)), array("d", (0.0, 0.0))

    def add(self, path: Path, groups: Groups, above: Sequence[int]) -> None:
        """Count the blocks of a prompt that are found: groups of neighbours, and what is above each in the stack."""
        self.usable_tokens += path.usable_tokens
        if not groups:
            return
        start, last = 0, above[-1] + groups[-1][1]
        self._grow(last + 2)
        for before, (_, count) in zip(above, groups):
            first, end = before + 1, before + 1 + count
            self._counts[first] += 1
            self._counts[end] -= 1
            # The block at distance d has the place d - first + start.
            self._places[first] += start - first
            self._places[end] -= start - first
            start += count
        if start == path.num_blocks:
            # The last block may be partial, and the last token is never found.
            begin, stop = path.span(start - 1)
            self._tokens[last] += stop - begin - self.block_tokens
            self._squares[last] += stop * stop - (begin + self.block_tokens) ** 2

    def at(self, sizes: Iterable[int]) -> list[Reuse]:
        """What caches of these numbers of blocks find."""
        tokens, squares = self.sums()
        places = [(size, min(size, len(tokens) - 1)) for size in sizes]
        return [Reuse(size, tokens[place], squares[place], tokens[place], tokens[place]) for size, place in places]

    def smallest(self, share: float) -> int:
        """The fewest blocks that find at least this share of what a cache without a limit finds."""
        tokens, _ = self.sums()
        return bisect_left(tokens, share * tokens[-1])

    def sums(self) -> tuple[list[int], list[float]]:
        """The tokens and the squares that caches of 0, 1, 2, ... blocks find."""
        tokens: list[int] = []
        squares: list[float] = []
        hits, area, size = 0, 0.0, self.block_tokens
        rows = zip(accumulate(self._counts), accumulate(self._places), self._tokens, self._squares)
        for distance, (count, offset, missing, missing_area) in enumerate(rows):
            # end^2 - start^2 of a full block at a place is size^2 x (2 x place + 1).
            hits += count * size + missing
            area += size * size * (2 * (distance * count + offset) + count) + missing_area
            tokens.append(hits)
            squares.append(area)
        return tokens, squares

    def by_distance(self) -> tuple[list[float], list[float]]:
        """The tokens and the squares found at each distance."""
        tokens, squares = self.sums()
        return (
            [float(after - before) for before, after in zip([0, *tokens], tokens)],
            [after - before for before, after in zip([0.0, *squares], squares)],
        )

    def _grow(self, size: int) -> None:
        if size > len(self._counts):
            more = size + size // 2 - len(self._counts)
            for values in (self._counts, self._places, self._tokens):
                values.extend(array("q", bytes(8 * more)))
            self._squares.extend(array("d", bytes(8 * more)))


class SampledCounts:
    """Counts of a sample, by distance in steps of 2**shift blocks, and by part of the sample, for the error.

    It continues other counts with half of their blocks.
    """

    def __init__(self, before: ExactCounts | SampledCounts) -> None:
        self.shift: int = before.shift + 1
        # The tokens of all prompts that could be found, and the same as the sample counts them.
        self.usable_tokens: int = before.usable_tokens
        self._counted = float(before.usable_tokens)
        self._parts = [[0.0] * (len(_EDGES) + 1) for _ in range(_PARTS)]
        self._missed = [0.0] * _PARTS
        if isinstance(before, SampledCounts):
            self._counted, self._parts, self._missed = before._counted, before._parts, before._missed
        tokens, squares = before.by_distance()
        self._tokens, self._squares = _folded(tokens), _folded(squares)

    def by_distance(self) -> tuple[list[float], list[float]]:
        """The tokens and the squares found at each distance."""
        return self._tokens, self._squares

    def add(self, path: Path, groups: Groups, above: Sequence[int]) -> None:
        """Count the sampled blocks of a prompt."""
        self.usable_tokens += path.usable_tokens
        distances = [before + 1 + i for before, (_, count) in zip(above, groups) for i in range(count)]
        if distances and distances[-1] >= len(self._tokens):
            room = [0.0] * (distances[-1] + 1 - len(self._tokens))
            self._tokens += room
            self._squares += room
        shift, hits, size, usable = self.shift, len(distances), path.block_tokens, path.usable_tokens
        for at, (block, place) in enumerate(zip(path.blocks, path.places)):
            start = place * size
            end = start + size
            if end > usable:
                start, end = path.span(place)
            tokens = float((end - start) << shift)
            self._counted += tokens
            part = (block ^ _OFFSET) * _MIX >> 40 & (_PARTS - 1)
            if at < hits:
                distance = distances[at]
                self._tokens[distance] += tokens
                self._squares[distance] += float((end * end - start * start) << shift)
                self._parts[part][bisect_right(_EDGES, distance << shift)] += tokens
            else:
                self._missed[part] += tokens

    def at(self, sizes: Iterable[int]) -> list[Reuse]:
        """What caches of these numbers of blocks find, with the range of the error."""
        tokens, squares = list(accumulate(self._tokens)), list(accumulate(self._squares))
        parts = [list(accumulate(bins)) for bins in self._parts]
        # Misses are counted by the sample; the rest of the known total is found.
        most, offset, scale = float(self.usable_tokens), self.usable_tokens - self._counted, 1 << self.shift

        def found(size: float) -> float:
            steps = min(int(size) >> self.shift, len(tokens) - 1)
            return min(max(tokens[steps] + offset, 0.0), most) if steps else 0.0

        answers = []
        for size in sizes:
            steps = min(size >> self.shift, len(tokens) - 1)
            hits, share = found(size), squares[steps] / tokens[steps] if tokens[steps] else 0.0
            # A distance is a number of sampled blocks, with the error of a binomial count.
            off = _ERRORS * sqrt(max(size, scale) * (scale - 1))
            error = _ERRORS * self._error(parts, size)
            low, high = found(max(size - off, 0.0)) - error, found(size + off) + error
            answers.append(Reuse(size, hits, hits * share, max(low, 0.0), min(high, most)))
        return answers

    def smallest(self, share: float) -> int:
        """The fewest blocks that find at least this share of what a cache without a limit finds."""
        offset = self.usable_tokens - self._counted
        tokens = [sums + offset for sums in accumulate(self._tokens)]
        return bisect_left(tokens, share * tokens[-1]) << self.shift

    def _error(self, parts: Sequence[Sequence[float]], size: int) -> float:
        """The standard error of the missed tokens at a size, from the differences between the parts of the sample."""
        place = bisect_right(_EDGES, max(size, 1))
        misses = [missed + sums[-1] - sums[place] for sums, missed in zip(parts, self._missed)]
        mean = sum(misses) / _PARTS
        return sqrt(sum((value - mean) ** 2 for value in misses) * _PARTS / (_PARTS - 1))


def _folded(values: Sequence[float]) -> list[float]:
    """Counts in steps of twice as many blocks: a distance of d steps becomes one of ceil(d / 2)."""
    rest = [*values[1:], 0.0]
    return [values[0], *(first + second for first, second in zip(rest[::2], rest[1::2]))]
