"""The bytes of the cache that one decode step reads, as an engine stores it.

An engine says how it stores each cache (`Engine.entries`): the bytes of one entry, with the engine's own types, scales
and layers that keep another type. The model says which entries a step reads (`caches.read_entries`). What an engine
only reserves is not read: padding, spare slots, and tokens beyond a window.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcalc.memory.curves import Curve, Tokens, curve_of
from kvcalc.model.caches import Cache, CompressedAttention, most_read, read_entries
from kvcalc.records import NamedTuple


class Entries(NamedTuple):
    """A cache of `num_layers` layers. `sizes` are the bytes of one entry in each part (`caches.read_entries`)."""

    cache: Cache
    num_layers: int
    sizes: tuple[int, ...]

    def bytes_at(self, tokens: int) -> int:
        """Bytes that one step of one sequence reads in all these layers."""
        counts = read_entries(self.cache, tokens)
        return self.num_layers * sum([size * count for size, count in zip(self.sizes, counts)])


class Reads(NamedTuple):
    """The caches of a share of a model. `curve` is None if the bytes are not linear between caps."""

    entries: tuple[Entries, ...]
    curve: Curve | None

    def bytes_at(self, tokens: Tokens) -> Tokens:
        """Bytes that one step of one sequence of `tokens` tokens reads.

        A mean number of tokens gives the mean bytes if there is a curve, else it is rounded down.
        """
        if self.curve is not None:
            return self.curve.bytes_at(tokens)
        return sum([each.bytes_at(max(1, int(tokens))) for each in self.entries])


def reads_of(entries: Iterable[Entries]) -> Reads:
    """The reads of caches, with their curve."""
    reads = tuple(entries)
    if any(isinstance(each.cache, CompressedAttention) for each in reads):
        return Reads(reads, None)
    return Reads(reads, curve_of((each.cache, each.bytes_at(1), most_read(each.cache)) for each in reads))
