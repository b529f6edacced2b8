"""How often the blocks of prompts are used again, at every size of an LRU cache, in one pass over the prompts.

The blocks are kept in a stack, the most recently used first. A block is found in a cache of N blocks if it is among
the first N when it is asked for (Mattson et al., Evaluation techniques for storage hierarchies, 1970), so its place in
the stack, its *distance*, gives the answer for every N. A prompt puts its blocks on top, its first block first. So
the end of a prompt is evicted before its start, and a block is never in the cache without those before it.

That order makes the pass fast. The blocks that a request was the last to use are neighbours in the stack, and the next
prompt that needs some of them needs the first ones. It is enough to keep one number per request, how many blocks it
was the last to use, in a Fenwick tree. A prompt of many blocks then costs a few sums, not one per block.

More than `most_blocks` distinct blocks are sampled by a hash of their names (Waldspurger et al., Efficient MRC
construction with SHARDS, FAST 2015): half of them are kept, and distances and counts are doubled; when there are too
many again, half of these. Misses are scaled and subtracted from the known total, as in SHARDS-adj, because blocks that
every prompt uses are seldom missed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from math import sqrt
from typing import NamedTuple

MOST_BLOCKS = 1_000_000
"""By default, this many distinct blocks are counted exactly. They take about 200 MB."""

_LEAST_SLOTS = 1 << 12
_MASK = (1 << 64) - 1
# Odd numbers with well-mixed bits (the golden ratio, and a multiplier of MurmurHash3's finalizer).
_MIX, _MIX_AGAIN = 0x9E3779B97F4A7C15, 0xC4CEB9FE1A85EC53
_OFFSET = 0x5851F42D4C957F2D  # so that the name 0 is not always in the sample
# The sampled blocks are divided into this many parts, whose differences give the error.
_PARTS = 16
# Bins per doubling of the distance, for the error.
_BINS = 8
# Standard errors on either side of a range. With 16 parts, 99 % of errors are within 2.95 of them (Student's t).
_ERRORS = 2.95


class NotAPrefixError(ValueError):
    """The names of a prompt's blocks contradict earlier prompts: a block follows another block than before."""


class Reuse(NamedTuple):
    """What a cache of `cache_blocks` blocks finds. `hit_tokens` is between `low_tokens` and `high_tokens`.

    Without sampling, all three are the same. `hit_squares` is the sum of end^2 - start^2 over the runs of tokens that
    are found, by their places in the prompt: the prefill of a token is as long as the prompt before it.
    """

    cache_blocks: int
    hit_tokens: float
    hit_squares: float
    low_tokens: float
    high_tokens: float


class LruStack:
    """The stack. `add` takes the prompts one by one, and `at` then says what a cache of any size finds."""

    def __init__(self, block_tokens: int, most_blocks: int = MOST_BLOCKS) -> None:
        self.block_tokens = block_tokens
        self.num_requests = self.num_blocks = self.num_tokens = 0
        self.num_squares = 0.0
        self.largest_request = 0
        self._most_blocks = most_blocks
        self._owner: dict[int, int] = {}  # block -> the slot of the last request that used it
        # By slot: how many blocks it owns, and the place in the prompt of the first of them.
        self._tree, self._weights, self._starts = [0] * (_LEAST_SLOTS + 1), [0] * _LEAST_SLOTS, [0] * _LEAST_SLOTS
        self._slot = self._total = 0
        self._shift = 0  # one in 2**_shift blocks is kept
        self._counts = _Ranges()
        self._sample: _Sample | None = None

    @property
    def sampling_rate(self) -> float:
        """The share of the distinct blocks that is kept at the end."""
        return 1 / (1 << self._shift)

    @property
    def distinct_blocks(self) -> int:
        """The number of distinct blocks; an estimate if they were sampled."""
        return len(self._owner) << self._shift

    def add(self, blocks: Sequence[int], prompt_tokens: int, usable_tokens: int) -> None:
        """Take the prompt of `prompt_tokens` tokens whose blocks have these names.

        Only its first `usable_tokens` tokens can be found, because an engine computes at least the last one; they reach
        into its last block. Raises NotAPrefixError, and changes nothing, if the names contradict earlier prompts.
        """
        path = _Path(blocks, self.block_tokens, usable_tokens)
        if self._slot == len(self._weights):
            self._renumber()
        if self._shift:
            path.keep(self._shift)
        kept = path.blocks
        owners = list(map(self._owner.get, kept))
        groups = self._groups(owners)
        above = [self._above(slot) for slot, _ in groups]
        if self._sample is None:
            self._counts.add(path, groups, above)
        else:
            self._sample.add(path, groups, above, self._shift)
        for slot, count in groups:
            self._change(slot, -count)
            self._starts[slot] += count
        self._put(kept)
        self.num_requests += 1
        self.num_blocks += len(blocks)
        self.num_tokens += prompt_tokens
        self.num_squares += float(prompt_tokens) ** 2
        self.largest_request = max(self.largest_request, len(blocks))
        while len(self._owner) > self._most_blocks:
            self._halve()

    def at(self, sizes: Sequence[int]) -> list[Reuse]:
        """What caches of these numbers of blocks find."""
        if self._sample is not None:
            return self._sample.at(sizes, self._shift)
        tokens, squares = self._counts.sums(self.block_tokens)
        return [
            Reuse(size, tokens[place], squares[place], tokens[place], tokens[place])
            for size, place in ((size, min(size, len(tokens) - 1)) for size in sizes)
        ]

    def _groups(self, owners: list[int | None]) -> list[tuple[int, int]]:
        """The slots that own the first blocks of a prompt, each with a number of blocks. The other blocks are new."""
        groups: list[tuple[int, int]] = []
        found, latest = 0, self._slot
        for slot, run in groupby(owners):
            if slot is None:
                break
            # A sample does not have every place.
            if slot >= latest or (self._starts[slot] != found and not self._shift):
                raise NotAPrefixError
            latest, count = slot, sum(1 for _ in run)
            groups.append((slot, count))
            found += count
        if owners.count(None) != len(owners) - found:
            raise NotAPrefixError
        return groups

    def _above(self, slot: int) -> int:
        """The number of blocks in the stack above those of `slot`."""
        tree, place, found = self._tree, slot + 1, self._total
        while place:
            found -= tree[place]
            place &= place - 1
        return found

    def _change(self, slot: int, by: int) -> None:
        tree, place, size = self._tree, slot + 1, len(self._tree)
        self._weights[slot] += by
        self._total += by
        while place < size:
            tree[place] += by
            place += place & -place

    def _put(self, blocks: Sequence[int]) -> None:
        """Put the blocks of a prompt on top."""
        if not blocks:
            return
        self._owner.update(dict.fromkeys(blocks, self._slot))
        self._change(self._slot, len(blocks))
        self._slot += 1

    def _renumber(self) -> None:
        """Give new slots to the requests that still own blocks, in the same order, and room for as many more."""
        live = [slot for slot in range(self._slot) if self._weights[slot]]
        new = dict(zip(live, range(len(live))))
        owner = self._owner
        for block, slot in owner.items():
            owner[block] = new[slot]
        size = max(_LEAST_SLOTS, 2 * len(live))
        room = [0] * (size - len(live))
        self._weights = [self._weights[slot] for slot in live] + room
        self._starts = [self._starts[slot] for slot in live] + room
        self._slot = len(live)
        self._build()

    def _build(self) -> None:
        tree = [0, *self._weights]
        for place in range(1, len(tree)):
            parent = place + (place & -place)
            if parent < len(tree):
                tree[parent] += tree[place]
        self._tree = tree

    def _halve(self) -> None:
        """Keep half of the blocks, and count in steps of twice as many."""
        if self._sample is None:
            self._sample = _Sample(self)
            self._counts = _Ranges()
        else:
            self._sample.halve()
        self._shift += 1
        limit = (_MASK + 1) >> self._shift
        self._owner = {block: slot for block, slot in self._owner.items() if _mixed(block) < limit}
        self._weights = [0] * len(self._weights)
        for slot in self._owner.values():
            self._weights[slot] += 1
        self._total = len(self._owner)
        self._build()

    def exact_counts(self) -> tuple[list[int], list[float], int]:
        """Tokens and squares found, by distance, and all tokens that could be found. For `_Sample`."""
        tokens, squares = self._counts.sums(self.block_tokens)
        return tokens, squares, self._counts.usable_tokens


class _Path:
    """The blocks of a prompt, and how many of their tokens can be found. `places` are those of a sample's blocks."""

    def __init__(self, blocks: Sequence[int], block_tokens: int, usable_tokens: int) -> None:
        self.blocks = blocks
        self.places: Sequence[int] | None = None
        self.num_blocks = len(blocks)
        self.block_tokens = block_tokens
        self.usable_tokens = min(usable_tokens, len(blocks) * block_tokens)

    def keep(self, shift: int) -> None:
        """Keep the blocks of the sample."""
        limit = (_MASK + 1) >> shift
        self.places = [place for place, block in enumerate(self.blocks) if _mixed(block) < limit]
        self.blocks = [self.blocks[place] for place in self.places]

    def span(self, place: int) -> tuple[int, int]:
        """Where the usable tokens of a block start and end in the prompt."""
        start = place * self.block_tokens
        return start, max(start, min(start + self.block_tokens, self.usable_tokens))


def _mixed(block: int) -> int:
    """A well-distributed 64-bit number for a block's name: names may be consecutive."""
    mixed = (block ^ _OFFSET) * _MIX & _MASK
    return (mixed ^ mixed >> 29) * _MIX_AGAIN & _MASK


class _Ranges:
    """Exact counts by distance. A run of blocks adds to a range of distances, so differences are kept.

    The runs are counted as if all their tokens were usable. The last block of a prompt is corrected.
    """

    def __init__(self) -> None:
        self.usable_tokens = 0
        self._counts, self._places = array("q", (0, 0)), array("q", (0, 0))
        self._tokens, self._squares = array("q", (0, 0)), array("d", (0.0, 0.0))

    def add(self, path: _Path, groups: list[tuple[int, int]], above: list[int]) -> None:
        """Count the blocks of a prompt that are found: groups of neighbours, and what is above each in the stack."""
        self.usable_tokens += path.usable_tokens
        if not groups:
            return
        start = 0
        self._grow(max(before + count for before, (_, count) in zip(above, groups)) + 2)
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
            (begin, stop), size, distance = path.span(start - 1), path.block_tokens, above[-1] + groups[-1][1]
            self._tokens[distance] += stop - begin - size
            self._squares[distance] += stop * stop - (begin + size) ** 2

    def _grow(self, size: int) -> None:
        if size > len(self._counts):
            more = size + size // 2 - len(self._counts)
            for values in (self._counts, self._places, self._tokens):
                values.extend(array("q", bytes(8 * more)))
            self._squares.extend(array("d", bytes(8 * more)))

    def sums(self, size: int) -> tuple[list[int], list[float]]:
        """The tokens and the squares found by caches of 0, 1, 2, ... blocks."""
        tokens: list[int] = []
        squares: list[float] = []
        found, area = 0, 0.0
        rows = zip(accumulate(self._counts), accumulate(self._places), self._tokens, self._squares)
        for distance, (count, offset, missing, missing_area) in enumerate(rows):
            # end^2 - start^2 of a full block at a place is size^2 x (2 x place + 1).
            found += count * size + missing
            area += size * size * (2 * (distance * count + offset) + count) + missing_area
            tokens.append(found)
            squares.append(area)
        return tokens, squares


class _Sample:
    """Counts of sampled blocks by distance, in steps of 2**shift blocks, and by part, for the error."""

    def __init__(self, exact: LruStack) -> None:
        tokens, squares, usable = exact.exact_counts()
        self._tokens = [float(after - before) for before, after in zip([0, *tokens], tokens)]
        self._squares = [after - before for before, after in zip([0.0, *squares], squares)]
        self._usable = usable  # the tokens of all prompts that could be found
        self._counted = float(usable)  # the same, counted by the sample
        self._bins: list[int] = []
        self._parts: list[list[float]] = [[] for _ in range(_PARTS)]
        self._missed = [0.0] * _PARTS
        self._fold()

    def halve(self) -> None:
        """Count in steps of twice as many blocks."""
        self._fold()

    def _fold(self) -> None:
        """A distance of d steps becomes one of ceil(d / 2)."""
        for values in (self._tokens, self._squares):
            first, rest = values[:1], values[1:] + [0.0] * (len(values) % 2 == 0)
            values[:] = first + [a + b for a, b in zip(rest[::2], rest[1::2])]

    def add(self, path: _Path, groups: list[tuple[int, int]], above: list[int], shift: int) -> None:
        """Count the sampled blocks of a prompt."""
        self._usable += path.usable_tokens
        distances = [before + 1 + i for before, (_, count) in zip(above, groups) for i in range(count)]
        if distances and max(distances) >= len(self._tokens):
            more = max(distances) + 1 - len(self._tokens)
            self._tokens += [0.0] * more
            self._squares += [0.0] * more
        scale = 1 << shift
        for at, (block, place) in enumerate(zip(path.blocks, path.places or ())):
            start, end = path.span(place)
            tokens = float((end - start) * scale)
            self._counted += tokens
            part = _mixed(block) & (_PARTS - 1)
            if at < len(distances):
                distance = distances[at]
                self._tokens[distance] += tokens
                self._squares[distance] += float((end * end - start * start) * scale)
                self._note(part, distance << shift, tokens)
            else:
                self._missed[part] += tokens

    def _note(self, part: int, distance: int, tokens: float) -> None:
        place = _bin_of(distance)
        bins = self._parts[part]
        if place >= len(bins):
            bins.extend([0.0] * (place + 1 - len(bins)))
        bins[place] += tokens

    def at(self, sizes: Sequence[int], shift: int) -> list[Reuse]:
        tokens, squares = list(accumulate(self._tokens)), list(accumulate(self._squares))
        # Misses are counted by the sample; the rest of the known total is found.
        offset = self._usable - self._counted
        parts = [list(accumulate(bins)) for bins in self._parts]
        scale = 1 << shift

        def found(size: float) -> float:
            steps = min(int(size) // scale, len(tokens) - 1)
            return min(max(tokens[steps] + offset, 0.0), float(self._usable)) if steps else 0.0

        answers = []
        for size in sizes:
            steps = min(size // scale, len(tokens) - 1)
            hits = found(size)
            share = squares[steps] / tokens[steps] if tokens[steps] else 0.0
            # A distance is a number of sampled blocks, with the error of a binomial count.
            off = _ERRORS * sqrt(max(size, scale) * (scale - 1))
            error = _ERRORS * self._error(parts, size)
            low, high = found(max(size - off, 0.0)) - error, found(size + off) + error
            answers.append(Reuse(size, hits, hits * share, max(low, 0.0), min(high, float(self._usable))))
        return answers

    def _error(self, parts: list[list[float]], size: int) -> float:
        """The standard error of the misses at a size, from the differences between the parts of the sample."""
        place = _bin_of(max(size, 1))
        misses = []
        for sums, missed in zip(parts, self._missed):
            found = sums[min(place, len(sums) - 1)] if sums else 0.0
            misses.append(missed + (sums[-1] if sums else 0.0) - found)
        mean = sum(misses) / _PARTS
        return sqrt(sum((value - mean) ** 2 for value in misses) * _PARTS / (_PARTS - 1))


_EDGES = sorted({round(2 ** (step / _BINS)) for step in range(64 * _BINS)})


def _bin_of(distance: int) -> int:
    """The bin of a distance: 8 bins for each doubling."""
    return bisect_right(_EDGES, distance)
