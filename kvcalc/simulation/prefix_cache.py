"""Prompts' blocks that stay in a replica's cache, so that later requests find them.

Blocks have the names that a trace gives them. A block that running requests use is counted once, among the used units.
A block that no request uses stays until its units are needed; the one that was used longest ago goes first. So do the
units of answers, which have no names, but take their turn in the queue: in vLLM, blocks are freed from the last one to
the first, to the end of the queue (free in v1/core/kv_cache_manager.py, FreeKVCacheBlockQueue in
v1/core/kv_cache_utils.py); SGLang's radix cache evicts leaves by their last access (mem_cache/radix_cache.py).
"""

from __future__ import annotations

from collections import OrderedDict

from kvcalc.simulation.pool import BlockPool
from kvcalc.simulation.requests import Request


class PrefixCache:
    """The blocks that stay in the cache of one replica. Named ones have `tokens` tokens and `units` units.

    A preempted request without names finds its own blocks again with `finds_own`, as far as they are still there.
    """

    def __init__(self, pool: BlockPool, tokens: int, units: int, *, finds_own: bool = False) -> None:
        self.tokens, self.units, self._finds_own = tokens, units, finds_own
        self._pool = pool
        self._users: dict[int, int] = {}  # name -> running requests
        # Units without users, the first ones to go at the front. A key is whether they have a name, and it or a number.
        self._unused: OrderedDict[tuple[bool, int], int] = OrderedDict()
        self._unused_units = self._nameless = 0

    @property
    def pinned_units(self) -> int:
        """The units of blocks that running requests use."""
        return self.units * len(self._users)

    def look_up(self, request: Request, promised: int) -> int:
        """Set the tokens that `request` would find now. Returns the units of these that other requests use.

        `promised` units are taken in this step besides those in use.
        """
        self._trim(promised)
        if not request.names:
            if self._finds_own and request.kept:
                # Blocks are freed from the last one to the first, so what is left is the beginning.
                self._set_cached(request, self._unused.get((False, request.kept), 0) // self.units * self.tokens)
            return 0
        found = pinned = 0
        for name in request.names:
            if name in self._users:
                pinned += self.units
            elif (True, name) not in self._unused:
                break
            found += 1
        self._set_cached(request, found * self.tokens)
        if found == len(request.names):
            request.cached_tokens = max(request.cached_tokens, request.given_tokens)
        request.shared = found
        return pinned

    def _set_cached(self, request: Request, tokens: int) -> None:
        # The last token is always computed, and with it its block (max_cache_hit_length).
        size = self._pool.block_tokens
        request.cached_tokens = min(tokens, (request.target - 1) // size * size)

    def start(self, request: Request) -> None:
        """A request runs, and uses the blocks that it found."""
        taken = 0
        if self._finds_own and request.kept and not request.names:
            taken = request.held = request.cached_tokens // self.tokens * self.units
            self._unused_units -= taken
            if taken:
                self._unused[False, request.kept] -= taken
        for name in request.names[: request.shared]:
            if name in self._users:
                self._users[name] += 1
            else:
                self._users[name] = 1
                self._unused_units -= self._unused.pop((True, name))
                taken += self.units
        self._pool.take(taken)

    def add(self, request: Request, tokens: int) -> None:
        """The first `tokens` tokens of a request have units of its own: the new whole blocks get their names.

        A block that another request computed in the meantime stays without a name.
        """
        names = request.names
        while request.shared < len(names) and (request.shared + 1) * self.tokens <= tokens:
            name = names[request.shared]
            if name in self._users or (True, name) in self._unused:
                return
            self._users[name] = 1
            request.shared += 1
            request.held -= self.units

    def release(self, request: Request, own_units: int) -> None:
        """A request ends. Its own units and its blocks stay until they are needed."""
        if own_units:
            self._nameless += 1
            request.kept = self._nameless
            self._keep((False, self._nameless), own_units)
        given = 0
        for name in reversed(request.names[: request.shared]):
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._keep((True, name), self.units)
                given += self.units
        request.shared = 0
        self._pool.give(given)

    def shared_units(self, request: Request) -> int:
        """The units of the blocks that a request shares."""
        return request.shared * self.units

    def _keep(self, key: tuple[bool, int], units: int) -> None:
        self._unused[key] = units
        self._unused_units += units

    def _trim(self, promised: int) -> None:
        """Forget what the used and the promised units have displaced since the last look."""
        if self._pool.capacity is None:
            return
        excess = promised + self._pool.used + self._unused_units - self._pool.capacity
        while excess > 0:
            key, units = self._unused.popitem(last=False)
            gone = units if key[0] else min(units, excess)
            if gone < units:
                self._unused[key] = units - gone
                self._unused.move_to_end(key, last=False)
            self._unused_units -= gone
            excess -= gone
