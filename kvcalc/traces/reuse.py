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

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import groupby

from kvcalc.traces.reuse_counts import ExactCounts, Path, Reuse, SampledCounts, sampled

MOST_BLOCKS = 1_000_000
"""By default, this many distinct blocks are counted exactly. They take about 200 MB."""

_LEAST_SLOTS = 1 << 12


class NotAPrefixError(ValueError):
    """The names of a prompt's blocks contradict earlier prompts: a block follows another block than before."""


class LruStack:
    """The stack. `add` takes the prompts one by one, and `at` then says what a cache of any size finds.

    `num_counted`, `counted_tokens` and `counted_squares` are of the requests after the warm-up. `next_uses` are those
    of the blocks, if `optimal` asks for them and no blocks are sampled.
    """

    def __init__(self, block_tokens: int, most_blocks: int = MOST_BLOCKS, optimal: bool = False) -> None:
        self.block_tokens = block_tokens
        self.num_requests = self.num_blocks = self.num_tokens = 0
        self.num_counted = self.counted_tokens = 0
        self.counted_squares = 0.0
        self.next_uses = NextUses(block_tokens) if optimal else None
        self._requests: list[int] = []  # by slot: the number of its request
        self.largest_request = 0
        self._most_blocks = most_blocks
        self._owner: dict[int, int] = {}  # block -> the slot of the last request that used it
        # By slot: how many blocks it owns, and the place in the prompt of the first of them.
        self._tree, self._weights, self._starts = [0] * (_LEAST_SLOTS + 1), [0] * _LEAST_SLOTS, [0] * _LEAST_SLOTS
        self._slot = self._total = 0
        self._shift = 0  # one in 2**_shift blocks is kept
        self._counts: ExactCounts | SampledCounts = ExactCounts(block_tokens)

    @property
    def sampling_rate(self) -> float:
        """The share of the distinct blocks that is kept at the end."""
        return 1 / (1 << self._shift)

    @property
    def distinct_blocks(self) -> int:
        """The number of distinct blocks; an estimate if they were sampled."""
        return len(self._owner) << self._shift

    def add(self, blocks: Sequence[int], prompt_tokens: int, usable_tokens: int, is_counted: bool = True) -> None:
        """Take the prompt of `prompt_tokens` tokens whose blocks have these names.

        Only its first `usable_tokens` tokens can be found, because an engine computes at least the last one; they reach
        into its last block. A prompt that is not counted only fills the cache. Raises NotAPrefixError, and changes
        nothing, if the names contradict earlier prompts.
        """
        path = Path(blocks, self.block_tokens, usable_tokens, self._shift)
        if self._slot == len(self._weights):
            self._renumber()
        kept = path.blocks
        owners = list(map(self._owner.get, kept))
        groups = self._groups(owners)
        above = [self._above(slot) for slot, _ in groups]
        if is_counted:
            self._counts.add(path, groups, above)
        if self.next_uses is not None:
            owned = [(self._requests[slot], count) for slot, count in groups]
            self.next_uses.add(owned, path.usable_tokens if is_counted else 0)
        for slot, count in groups:
            self._change(slot, -count)
            self._starts[slot] += count
        self._put(kept)
        self.num_requests += 1
        self.num_blocks += len(blocks)
        self.num_tokens += prompt_tokens
        if is_counted:
            self.num_counted += 1
            self.counted_tokens += prompt_tokens
            self.counted_squares += float(prompt_tokens) ** 2
        self.largest_request = max(self.largest_request, len(blocks))
        while len(self._owner) > self._most_blocks:
            self._halve()

    def at(self, sizes: Sequence[int]) -> list[Reuse]:
        """What caches of these numbers of blocks find."""
        return self._counts.at(sizes)

    def smallest(self, share: float) -> int:
        """The fewest blocks that find at least this share of what a cache without a limit finds."""
        return self._counts.smallest(share)

    def _groups(self, owners: list[int | None]) -> list[tuple[int, int]]:
        """The slots that own the first blocks of a prompt, each with a number of blocks. The other blocks are new."""
        groups: list[tuple[int, int]] = []
        total, latest = 0, self._slot
        for slot, run in groupby(owners):
            if slot is None:
                break
            # A sample does not have every place.
            if slot >= latest or (self._starts[slot] != total and not self._shift):
                raise NotAPrefixError
            latest, count = slot, sum(1 for _ in run)
            groups.append((slot, count))
            total += count
        if owners.count(None) != len(owners) - total:
            raise NotAPrefixError
        return groups

    def _above(self, slot: int) -> int:
        """The number of blocks in the stack above those of `slot`."""
        tree, place, above = self._tree, slot + 1, self._total
        while place:
            above -= tree[place]
            place &= place - 1
        return above

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
        self._requests.append(self.num_requests)
        self._slot += 1

    def _renumber(self) -> None:
        """Give new slots to the requests that still own blocks, in the same order, and make room for more.

        This takes a time in proportion to the blocks, so there is room for as many requests as an eighth of them.
        """
        live = [slot for slot in range(self._slot) if self._weights[slot]]
        new = dict(zip(live, range(len(live))))
        owner = self._owner
        for block, slot in owner.items():
            owner[block] = new[slot]
        room = [0] * max(_LEAST_SLOTS, len(live), len(owner) // 8)
        self._weights = [self._weights[slot] for slot in live] + room
        self._starts = [self._starts[slot] for slot in live] + room
        self._requests = [self._requests[slot] for slot in live]
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
        self.next_uses = None
        self._counts = SampledCounts(self._counts)
        self._shift += 1
        self._owner = {block: self._owner[block] for block in sampled(self._owner, self._shift)}
        self._weights = [0] * len(self._weights)
        for slot in self._owner.values():
            self._weights[slot] += 1
        self._total = len(self._owner)
        self._build()


class NextUses:
    """The next uses of all blocks. `add` takes the prompts one by one, and `hit_tokens` is then known for any size.

    It is what the best possible policy finds in a cache, which drops the block whose next use is the furthest away. No
    policy finds more (Belady, A study of replacement algorithms for a virtual-storage computer, 1966). It has to know
    the requests to come, so it says how much any other policy than LRU could win.

    All blocks that the same later request uses next are equal, and it finds as many of its blocks as are still kept. So
    it is enough to count the kept blocks by the request that uses them next. Blocks that follow others are used no
    sooner than these, so the blocks that are kept are always the start of a prompt.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        # By request: the requests that use its blocks next, with numbers of blocks.
        self._next: list[list[tuple[int, int]]] = []
        self._usable: list[int] = []  # 0 if the request is not counted

    def add(self, owners: Iterable[tuple[int, int]], usable_tokens: int) -> None:
        """Take a prompt whose first blocks were last used by these requests, each with a number of blocks."""
        now = len(self._next)
        for request, count in owners:
            self._next[request].append((now, count))
        self._next.append([])
        self._usable.append(usable_tokens)

    def hit_tokens(self, cache_blocks: int) -> int:
        """The tokens that are found in a cache of `cache_blocks` blocks."""
        kept: dict[int, int] = {}
        furthest: list[int] = []  # the requests in `kept`, negative
        total = hits = 0
        for now, (later, usable) in enumerate(zip(self._next, self._usable)):
            here = kept.pop(now, 0)
            total -= here
            hits += min(here * self._block_tokens, usable)
            for request, count in later:
                if request not in kept:
                    heappush(furthest, -request)
                    kept[request] = 0
                kept[request] += count
                total += count
            while total > cache_blocks:
                request = -furthest[0]
                dropped = min(total - cache_blocks, kept.get(request, 0))
                total -= dropped
                if dropped:
                    kept[request] -= dropped
                if not kept.get(request):
                    heappop(furthest)
                    kept.pop(request, None)
        return hits
