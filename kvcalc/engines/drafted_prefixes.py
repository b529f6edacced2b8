"""Prefixes that are found again while tokens are drafted: how much less of them, and what the drafts add."""

from __future__ import annotations

from kvcalc.engines.prefixes import Prefixes
from kvcalc.records import NamedTuple


class Matching(NamedTuple):
    """How drafting changes what is found. The last `unmatched_tokens` of the common tokens only confirm a prefix.

    With `drops_block`, the last step that matches is not used, but it must be in the cache to be matched. A decode
    instance computes the last `unsent_tokens` of a prompt itself.
    """

    unmatched_tokens: int = 0
    drops_block: bool = False
    unsent_tokens: int = 0


PLAIN = Matching()
"""The drafts do not change what is found."""


class DraftedPrefixes(Prefixes):
    """`prefixes` of requests that have `slots` more tokens each for drafts."""

    def __init__(self, prefixes: Prefixes, slots: int, matching: Matching) -> None:
        self._prefixes, self._slots = prefixes, slots
        self._beyond = self.confirming_tokens = prefixes.block_tokens if matching.drops_block else 0
        self._unmatched, self._unsent = matching.unmatched_tokens, matching.unsent_tokens
        self.block_tokens, self.unit_bytes = prefixes.block_tokens, prefixes.unit_bytes
        self.shares_memory = prefixes.shares_memory

    def found(self, tokens: int) -> int:
        return self._prefixes.found(max(tokens - self._beyond - self._unmatched, 0))

    def batch_bytes(self, shared: int, tokens: int, batch: int) -> int:
        return self._prefixes.batch_bytes(shared, tokens + self._slots, batch)

    def kept_bytes(self, tokens: int, after: int = 0) -> int:
        return self._prefixes.kept_bytes(tokens + self._beyond, after) if tokens > after else 0

    def idle_bytes(self, shared: int, tokens: int, count: int) -> int:
        return self._prefixes.idle_bytes(shared, tokens + self._beyond if tokens else 0, count)

    def sent_bytes(self, tokens: int) -> int:
        return self._prefixes.sent_bytes(tokens - self._unsent if tokens > self._unsent else tokens)

    def tier_bytes(self, tokens: int, after: int = 0) -> int:
        return self._prefixes.tier_bytes(tokens + self._beyond, after) if tokens > after else 0

    def loaded_bytes(self, tokens: int) -> int:
        return self._prefixes.loaded_bytes(tokens)


class JointPrefixes(Prefixes):
    """The prefix cache of a model, and that of a draft model with a pool of its own for the same tokens."""

    def __init__(self, own: Prefixes, drafts: Prefixes) -> None:
        self._both = own, drafts
        self.block_tokens, self.shares_memory = own.block_tokens, own.shares_memory
        self.unit_bytes = own.unit_bytes + drafts.unit_bytes

    def batch_bytes(self, shared: int, tokens: int, batch: int) -> int:
        return sum(prefixes.batch_bytes(shared, tokens, batch) for prefixes in self._both)

    def kept_bytes(self, tokens: int, after: int = 0) -> int:
        return sum(prefixes.kept_bytes(tokens, after) for prefixes in self._both)

    def idle_bytes(self, shared: int, tokens: int, count: int) -> int:
        return sum(prefixes.idle_bytes(shared, tokens, count) for prefixes in self._both)

    def sent_bytes(self, tokens: int) -> int:
        return sum(prefixes.sent_bytes(tokens) for prefixes in self._both)

    def tier_bytes(self, tokens: int, after: int = 0) -> int:
        return sum(prefixes.tier_bytes(tokens, after) for prefixes in self._both)

    def loaded_bytes(self, tokens: int) -> int:
        return sum(prefixes.loaded_bytes(tokens) for prefixes in self._both)
