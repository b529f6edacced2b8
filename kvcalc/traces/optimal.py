"""What the best possible policy finds in a cache: it drops the block whose next use is the furthest away.

No policy finds more (Belady, A study of replacement algorithms for a virtual-storage computer, 1966). It has to know
the requests to come, so it says how much any other policy than LRU could win.

All blocks that the same later request uses next are equal, and it finds as many of its blocks as are still kept. So it
is enough to count the kept blocks by the request that uses them next. Blocks that follow others are used no sooner than
these, so the blocks that are kept are always the start of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush


class NextUses:
    """The next uses of all blocks. `add` takes the prompts one by one, and `hit_tokens` is then known for any size."""

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
        total = found = 0
        for now, (later, usable) in enumerate(zip(self._next, self._usable)):
            here = kept.pop(now, 0)
            total -= here
            found += min(here * self._block_tokens, usable)
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
        return found
