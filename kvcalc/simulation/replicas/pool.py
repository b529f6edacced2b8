"""The pool of cache blocks: whole units, counted exactly, never more than there are.

A request that holds t tokens holds `table[ceil(t / g)]` units, where g is the tokens in a block. All decoding requests
grow by one token per step, so the ones whose tokens have the same remainder modulo g take their next block in the same
step. The pool keeps the growth for each remainder, and advances many steps at once in O(g).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from heapq import heappop, heappush


class PoolError(RuntimeError):
    """The conservation check failed, which is a defect of the simulation."""


class BlockPool:
    """`capacity` units, or None if memory sets no limit. `table[b]` are the units of a request with b blocks of tokens.

    `steps` counts the tokens that every decoding request has got so far. A decoding request has a key: it holds
    key + steps tokens. `prompt_table` is that of requests whose prompts are computed, if it differs.
    """

    def __init__(
        self, capacity: int | None, block_tokens: int = 1, table: Sequence[int] = (),
        prompt_table: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.capacity, self.block_tokens, self._table = capacity, block_tokens, table
        self.prompt_table, self._prompt_units = prompt_table, prompt_table or table
        # Without a limit, a request needs no units, and very many are free.
        self._most = 2**62 if capacity is None else capacity
        self.free = self._least_free = self._most  # units that nothing holds
        self.steps = 0
        self.changes = 0  # counts what is not the growth of decoding requests
        self._slopes = [0] * block_tokens
        self._growth = 0  # the sum of the slopes
        # The block from which on a request grows by another number of units; none if it always grows by the same.
        self._turns = _turns(table)
        self._even = table.step if isinstance(table, range) else 0  # the units of every block, if they are the same
        self._changes: list[tuple[int, int]] = []  # (step, key) of decoding requests that come to such a block
        self._gone: dict[tuple[int, int], int] = {}  # how many of these requests have left before

    @property
    def used(self) -> int:
        """Units that requests hold."""
        return self._most - self.free

    @property
    def most_used(self) -> int:
        """The most units that requests held at any time."""
        return self._most - self._least_free

    def units(self, tokens: int) -> int:
        """The units of a request that holds `tokens` tokens."""
        return self._table[-(-tokens // self.block_tokens)] if self.capacity is not None else 0

    def prompt_units(self, tokens: int) -> int:
        """The units of a request with a prompt of which `tokens` tokens are computed."""
        return self._prompt_units[-(-tokens // self.block_tokens)] if self.capacity is not None else 0

    def take(self, units: int) -> None:
        """Take units. PoolError if they are not there."""
        self.free -= units
        self.changes += 1
        if self.free < self._least_free:
            self._check()

    def give(self, units: int) -> None:
        """Return units."""
        self.free += units
        self.changes += 1
        if self.free > self._most:
            self._check()

    def enter(self, key: int) -> None:
        """A request begins to decode. It already holds the units of its tokens."""
        if self.capacity is not None:
            self._add(key, 1)

    def leave(self, key: int) -> int:
        """A decoding request stops. Returns the units it holds, which stay taken."""
        if self.capacity is None:
            return 0
        self._add(key, -1)
        return self.units(key + self.steps)

    def growth(self, tokens: int = 1) -> int:
        """The units that the decoding requests take with their next `tokens` tokens."""
        if tokens == 1:
            return self._slopes[-self.steps % self.block_tokens]
        after = copy(self)
        after._slopes, after._changes, after._gone = [*self._slopes], [*self._changes], {**self._gone}
        after._least_free = -(2**62)  # it is only asked about
        after.advance(tokens)
        return self.free - after.free

    def advance(self, steps: int) -> None:
        """All decoding requests grow by `steps` tokens. PoolError if there are too few units."""
        comes_to_change = True
        while comes_to_change:
            comes_to_change = bool(self._changes) and self._changes[0][0] <= self.steps + steps
            part = self._changes[0][0] - self.steps if comes_to_change else steps
            if self._growth:
                g, slopes = self.block_tokens, self._slopes
                rest = part % g
                self.free -= part // g * self._growth
                if rest:
                    # The steps take the slopes of the remainders from the highest one down, and then from the top.
                    high = -self.steps % g
                    low = high + 1 - rest
                    self.free -= sum(slopes[low : high + 1] if low >= 0 else slopes[: high + 1] + slopes[low:])
            self.steps += part
            steps -= part
            if comes_to_change:
                self._turn()
        if self.free < self._least_free:
            self._check()

    def possible_steps(self, most: int) -> int:
        """A number of steps, up to `most`, for which there are units; 0 only if the next step has too few.

        Up to the first step after which a request grows by another number of units. The caller then asks again.
        """
        if self._changes:
            most = min(most, self._changes[0][0] - self.steps)
        g, free = self.block_tokens, self.free
        if (most // g + 1) * self._growth <= free:
            return most
        rounds = min(most // g, free // self._growth)
        steps, free = rounds * g, free - rounds * self._growth
        while steps < most:
            free -= self._slopes[-(self.steps + steps) % g]
            if free < 0:
                break
            steps += 1
        return steps

    def _add(self, key: int, sign: int) -> None:
        self.changes += 1
        if self._even:
            self._slopes[key % self.block_tokens] += sign * self._even
            self._growth += sign * self._even
            return
        block = -(-(key + self.steps) // self.block_tokens)
        slope = sign * (self._table[block + 1] - self._table[block])
        self._slopes[key % self.block_tokens] += slope
        self._growth += slope
        turn = self._turns[block]
        if turn is None:
            return
        # The request has `turn` blocks from the step on in which it holds (turn - 1) x g + 1 tokens.
        change = (turn - 1) * self.block_tokens + 1 - key, key
        if sign > 0:
            heappush(self._changes, change)
        else:
            self._gone[change] = self._gone.get(change, 0) + 1

    def _turn(self) -> None:
        """Requests come to a block from which on they grow by another number of units."""
        while self._changes and self._changes[0][0] == self.steps:
            change = heappop(self._changes)
            if self._gone.get(change):
                self._gone[change] -= 1
                if not self._gone[change]:
                    del self._gone[change]
                continue
            key = change[1]
            block = -(-(key + self.steps) // self.block_tokens)
            before = self._table[block] - self._table[block - 1]
            self._slopes[key % self.block_tokens] -= before
            self._growth -= before
            self._add(key, 1)

    def _check(self) -> None:
        """Conservation: no unit more than there is, and none returned that was not taken."""
        if not 0 <= self.free <= self._most:
            raise PoolError(f"{self.used} of {self.capacity} blocks are held")
        self._least_free = min(self._least_free, self.free)


def _turns(table: Sequence[int]) -> list[int | None]:
    """For every number of blocks, the next number from which on another block takes another number of units, or None.

    Empty for a range: every block takes the same.
    """
    if isinstance(table, range):
        return []
    turns: list[int | None] = [None] * len(table)
    for block in range(len(table) - 3, -1, -1):
        same = table[block + 1] - table[block] == table[block + 2] - table[block + 1]
        turns[block] = turns[block + 1] if same else block + 1
    return turns
