"""Prompts' blocks that stay in a replica's cache, so that later requests find them.

Blocks have the names that a trace gives them. A session is one block, larger than any of its turns, of which the cache
has the beginning. A block that running requests use is counted once, among the used units.
A block that no request uses stays until its units are needed; the one that was used longest ago goes first. So do the
whole blocks of answers, which have no names, but take their turn in the queue. A part of a block does not stay.
Whole blocks are freed from the last one to the first.
"""

from __future__ import annotations

from collections import OrderedDict

from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.pool import BlockPool


class PrefixCache:
    """The blocks that stay in the cache of one replica. Named ones have `tokens` tokens and `units` units.

    A preempted request finds its own blocks again with `finds_own`, as far as they are still there. With `merges`,
    blocks that two requests computed at the same time become one.
    """

    def __init__(
        self, pool: BlockPool, tokens: int, units: int, *, finds_own: bool = False, merges: bool = False
    ) -> None:
        self.tokens, self.units, self._finds_own, self._merges = tokens, units, finds_own, merges
        self._pool, self._block_units = pool, units * pool.block_tokens // tokens
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
        self.make_room(promised)
        finds_own = self._finds_own and request.kept
        if not request.names and not finds_own:
            return 0
        blocks = tokens = 0
        for name in request.names:
            units = self.units if name in self._users else self._unused.get((True, name), 0)
            tokens += self._tokens(units)
            if units < self.units:
                break
            blocks += 1
        else:
            if finds_own:
                # Blocks are freed from the last one to the first, so what is left is the beginning.
                tokens += self._tokens(self._unused.get((False, request.kept), 0))
            tokens = max(tokens, request.given_tokens)
        # The last token is always computed, and with it its block (max_cache_hit_length).
        size = self._pool.block_tokens
        request.cached_tokens = min(tokens, (request.target - 1) // size * size, request.findable_tokens)
        request.shared = min(blocks, request.cached_tokens // self.tokens)
        return self.units * sum([name in self._users for name in request.names[: request.shared]])

    def make_room(self, promised: int) -> None:
        """Forget what the used and the promised units have displaced. Needed before units are given back."""
        excess = promised + self._unused_units - self._pool.free
        while excess > 0:
            key, units = self._unused.popitem(last=False)
            gone = min(units, excess)
            if gone < units:
                self._unused[key] = units - gone
                self._unused.move_to_end(key, last=False)
            self._unused_units -= gone
            excess -= gone

    def start(self, request: Request) -> None:
        """A request runs, and uses the blocks that it found."""
        taken = 0
        for name in request.names[: request.shared]:
            if name in self._users:
                self._users[name] += 1
            else:
                self._users[name] = 1
                self._unused_units -= self._unused.pop((True, name))
                taken += self.units
        own_tokens = request.cached_tokens - request.shared * self.tokens
        if own_tokens > 0:
            # Blocks of its own, or a part of a named block.
            request.held = own_tokens // self._pool.block_tokens * self._block_units
            names = request.names
            key = (True, names[request.shared]) if request.shared < len(names) else (False, request.kept)
            if key in self._unused:
                self._unused[key] -= request.held
                self._unused_units -= request.held
        self._pool.take(taken + request.held)

    def add(self, request: Request, tokens: int) -> None:
        """The first `tokens` tokens of a request have units of its own: the new whole blocks get their names.

        A block that another request computed in the meantime stays without a name or, if the cache `merges`, is given
        back for the one with the name.
        """
        names = request.names
        while request.shared < len(names) and (request.shared + 1) * self.tokens <= tokens:
            name = names[request.shared]
            if name in self._users:
                if not self._merges:
                    return
                self.make_room(0)
                self._pool.give(self.units)
            elif (True, name) in self._unused:
                if not self._merges:
                    return
                self._unused_units -= self._unused.pop((True, name))
            self._users[name] = self._users.get(name, 0) + 1
            request.shared += 1
            request.held -= self.units

    def release(self, request: Request, tokens: int) -> None:
        """A request gives its units back. The whole blocks of its first `tokens` tokens stay until they are needed."""
        if not self._unused and not request.names and request.finish is not None:
            return  # nothing finds these blocks, and nothing stands behind them in the queue
        self.make_room(0)
        size = self._pool.block_tokens
        whole = self._pool.units(tokens // size * size) - request.shared * self.units
        if kept := min(request.held, whole):
            if request.is_turn:
                key = True, request.names[0]
                self._unused_units -= self._unused.pop(key, 0)
                request.findable_tokens = max(request.findable_tokens, tokens)
            else:
                self._nameless += 1
                request.kept = self._nameless
                key = False, self._nameless
            self._keep(key, kept)
        given = 0
        for name in reversed(request.names[: request.shared]):
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._keep((True, name), self.units)
                given += self.units
        request.shared = 0
        self._pool.give(given)

    def _tokens(self, units: int) -> int:
        """The tokens in whole blocks of `units` units."""
        return units // self._block_units * self._pool.block_tokens

    def _keep(self, key: tuple[bool, int], units: int) -> None:
        self._unused[key] = units
        self._unused_units += units
