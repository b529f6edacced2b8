"""The layers of a model on several devices, as llama.cpp divides them: what each device holds, and whether it fits.

The devices have the same memory, but not the same layers, so each has its own room for the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcalc.records import NamedTuple
from kvcalc.server.capacity import PoolShrinkage, largest_batch, longest_context
from kvcalc.server.case import Case

if TYPE_CHECKING:
    import kvcalc.documents as documents


class Room(NamedTuple):
    """One device: a case with its layers, the bytes of its weights, and its memory for the cache.

    `pool_at` is the memory for the cache by context and batch, and `pool_shrinkage` as in `capacity`.
    """

    case: Case
    weights_bytes: int
    pool_bytes: int
    pool_at: Callable[[int, int], int]
    pool_shrinkage: PoolShrinkage | None

    def kv_bytes(self, tokens: int, sequences: int) -> int:
        """The bytes of the cache on this device."""
        return self.case.cache_bytes(tokens, sequences)

    def holds(self, tokens: int, sequences: int) -> bool:
        """Whether that many sequences of `tokens` tokens fit on this device."""
        return not sequences or self.case.needed_bytes(tokens, sequences) <= self.pool_at(tokens, sequences)

    def free_bytes(self) -> int:
        """The free memory. It may be negative."""
        return self.pool_bytes - self._kv_bytes()

    def _kv_bytes(self) -> int:
        return self.kv_bytes(self.case.workload.context_tokens, self.case.workload.batch_size)

    def describe(self, number: int) -> documents.DeviceShare:
        """A row of `fit.devices`. A device without layers may have the output."""
        layers = self.case.share.layers
        return {
            "device": number,
            "first_layer": min((group.first for group in layers), default=None),
            "last_layer": max((group.last for group in layers), default=None),
            "weights_bytes": self.weights_bytes,
            "kv_cache_bytes": self._kv_bytes(),
            "free_bytes": self.free_bytes(),
            "fits": self.free_bytes() >= 0,
        }


def largest_batch_of(rooms: tuple[Room, ...], tokens: int) -> int | None:
    """The most sequences of `tokens` tokens that fit on every device. None if memory sets no limit."""
    least = None
    for room in rooms:
        # One try is enough if the limit of the other devices fits here too.
        if least is not None and room.holds(tokens, least):
            continue
        found = largest_batch(room.case, room.pool_bytes, tokens, room.pool_shrinkage)
        least = found if least is None or (found is not None and found < least) else least
    return least


def longest_context_of(rooms: tuple[Room, ...], margin: int = 0) -> int | None:
    """The longest context that leaves `margin` bytes free on every device. None if memory sets no limit."""
    least = None
    for room in rooms:
        found = longest_context(room.case, room.pool_bytes - margin, room.pool_shrinkage, at_most=least)
        least = found if least is None or (found is not None and found < least) else least
    return least


def memory_of_devices(case: Case, rooms: tuple[Room, ...]) -> Callable[[int, int], int]:
    """The memory, by context and batch, in which the largest cache of a device fits if all of them fit."""

    def at(tokens: int, sequences: int) -> int:
        largest = case.cache_bytes(tokens, sequences)
        return largest + min(room.pool_at(tokens, sequences) - room.kv_bytes(tokens, sequences) for room in rooms)

    return at
