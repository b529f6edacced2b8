"""How TensorRT-LLM's KVCacheManagerV2 divides a device's memory among pools of slots.

Layers with the same window, or without one, share their pages: a block of tokens of all these layers is one slot. A
slot has one part for each size of its buffers, and each part lies in a pool of its own. Groups of layers whose slots
have the same sizes share pools. The others divide the memory once, at the start, in the proportion that a typical batch
needs, and keep it (enable_kv_pool_rebalance is off by default).

Source: create_storage_config (tensorrt_llm/runtime/kv_cache_manager_v2/_storage/_config.py), ratio_to_slot_count_list
(_storage/_core.py), AttnLifeCycle.get_stale_range (_life_cycle_registry.py), and StorageManager
(cpp/tensorrt_llm/batch_manager/kv_cache_manager_v2/storageManager.cpp), as of autumn 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple
from kvcalc.search import largest_where, smallest_where

STATE = 0
"""The window of layers that keep a state instead of tokens: one slot for each request."""

_MIB = 2**20
_GIB = 2**30
# KvCacheConfig.max_util_for_resume (llmapi/llm_args.py), in percent: a request starts if its pools are not fuller.
RESUMES_BELOW = 95


class Sequences(NamedTuple):
    """`number` sequences with room for `capacity` tokens each, of which `history` are from earlier steps."""

    capacity: int
    history: int = 0
    number: int = 1


class Group(NamedTuple):
    """Layers that share pools. `slot_bytes` has the bytes of a slot in each pool, `windows` the layers' windows.

    A window is None for layers that keep all tokens, and `STATE` for layers with a state.
    """

    slot_bytes: tuple[int, ...]
    windows: tuple[int | None, ...]


class Division:
    """How `groups` divide memory, with blocks of `block` tokens.

    `typical` is the batch that sets the proportion, and `floors` the slots that each group has at least.
    """

    def __init__(
        self, groups: Sequence[Group], block: int, typical: Sequence[Sequences], floors: Sequence[int] | None = None
    ) -> None:
        self.groups, self._block, self._typical = tuple(groups), block, typical
        self.floors = tuple(floors or least_slots(groups, block))
        self._weights: dict[int, list[int]] = {}

    @cached_property
    def sizes(self) -> list[int]:
        """The bytes of a slot of each group."""
        return [sum(group.slot_bytes) for group in self.groups]

    def slots(self, quota: int) -> list[int]:
        """The slots of each group in `quota` bytes, which the engine rounds up to whole pages of memory."""
        return self._slots(self.rounded(quota), page_bytes(quota))

    def rounded(self, quota: int) -> int:
        """The bytes that all pools take together if they may take `quota`."""
        page = page_bytes(quota)
        least = sum(_pages(n, group, page) for n, group in zip(self.floors, self.groups)) * page
        return max(least, round_up(quota, page))

    def smallest(self, needed: Sequence[int]) -> int:
        """The fewest bytes with which every group has at least the slots in `needed`."""
        bytes_needed = [n * size for n, size in zip(needed, self.sizes)]
        guess = sum(bytes_needed)
        if len(self.groups) > 1:
            weights = self._shares(page_bytes(guess))
            guess = max(n * sum(weights) // weight for n, weight in zip(bytes_needed, weights))
        page = page_bytes(guess)
        enough, step = max(1, guess // page), 1
        while not self._holds(enough * page, needed):
            enough, step = enough + step, 2 * step
        # Groups at their floors need less than the guess.
        low = enough - step // 2 - 1 if step > 1 else enough - 2
        if low > 0 and self._holds(low * page, needed):
            low = sum(bytes_needed) // page - 1
        enough = smallest_where(lambda pages: self._holds(pages * page, needed), max(low + 1, 1), enough)
        return self.rounded(enough * page)

    def multiple(self, needed: Sequence[int], typical: int) -> int:
        """The bytes of the fewest typical batches that give every group at least the slots in `needed`.

        `typical` is what the first group takes in a typical batch. The other groups need no more than they take in one.
        Because of rounding, less memory may already give the pools these slots (`smallest`), and slightly more memory
        may not. A larger batch, with another proportion, may then take less than a smaller one.
        """
        page = page_bytes(0)
        while True:
            shares = self._shares(page)
            if needed[0] <= typical:  # the other groups have their floors, and the first group the rest
                quota = _pages(needed[0], self.groups[0], page) * page + sum(shares[1:])
            else:
                quota = round_up(ceil_div(sum(shares) * needed[0], typical), page)
            if page_bytes(quota) <= page:
                break
            page = page_bytes(quota)
        while not self._holds(quota, needed):
            quota += page_bytes(quota)
        return self.rounded(quota)

    def _holds(self, quota: int, needed: Sequence[int]) -> bool:
        return all(has >= needs for has, needs in zip(self.slots(quota), needed))

    def _shares(self, page: int) -> list[int]:
        """The bytes of each group in the typical batch, in whole pages: they set the proportion of the groups."""
        if page not in self._weights:
            self._weights[page] = [
                page * sum(_pages(self._typical_slots(window), group, page) for window in group.windows)
                for group in self.groups
            ]
        return self._weights[page]

    def _typical_slots(self, window: int | None) -> int:
        return sum(each.number * blocks_of(window, each, self._block) for each in self._typical)

    def _slots(self, quota: int, page: int) -> list[int]:
        """Divide the pages. A group that would have no more than its floor has its floor, and the others the rest."""
        shares, left = self._shares(page), quota // page
        active, slots = list(range(len(self.groups))), [0] * len(self.groups)
        while active:
            budget, given, total = left, {}, sum(shares[place] for place in active)
            for place in sorted(active, key=shares.__getitem__):
                given[place] = _fitting(_nearest(budget * shares[place], total), self.groups[place], page)
                budget -= _pages(given[place], self.groups[place], page)
                total -= shares[place]
            pinned = [place for place in active if given[place] <= self.floors[place]]
            for place in pinned or active:
                slots[place] = self.floors[place] if pinned else given[place]
                left -= _pages(slots[place], self.groups[place], page)
            active = [place for place in active if place not in pinned] if pinned else []
        return [_fitting(_pages(n, group, page), group, page) for n, group in zip(slots, self.groups)]


class WindowLayers(NamedTuple):
    """The layers of a share with one window, and the bytes of a token in each of their pools."""

    window: int | None
    num_layers: int
    token_bytes: tuple[int, ...]


class Layout(NamedTuple):
    """The layers by their windows, and how their pools divide the memory."""

    kinds: tuple[WindowLayers, ...]
    division: Division


def check_average(average: int | None, tokens: int) -> None:
    """Raise UsageError (exit 2) for an average length above the longest request's, `tokens`."""
    if average is not None and average > tokens:
        raise UsageError(f"--avg-seq-len {average} is longer than the context of {tokens} tokens")


def page_bytes(quota: int) -> int:
    """The bytes of a page of memory, of which pools are made: 2 MiB, or up to 32 MiB from 16 GiB on."""
    return 2 * _MIB << min(4, max(0, (quota // _GIB).bit_length() - 1))


def pooled(buffers: Iterable[tuple[int, Sequence[int]]]) -> tuple[int, ...]:
    """The bytes in each pool, of (layers, bytes of one in each of its buffers). Buffers of one size share a pool."""
    sizes: dict[int, int] = {}
    for count, of_layer in buffers:
        for size in of_layer:
            sizes[size] = sizes.get(size, 0) + count * size
    return tuple(sorted(sizes.values(), reverse=True))


def blocks_of(window: int | None, sequences: Sequences, block: int) -> int:
    """The slots that one of `sequences` holds: all blocks but those that its window has left."""
    if window == STATE:
        return 1
    blocks = ceil_div(sequences.capacity, block)
    return blocks if window is None else blocks - max(0, (sequences.history + 1 - window) // block)


def most_blocks(window: int | None, tokens: int, block: int) -> int:
    """The most slots that a running sequence holds until it has `tokens` tokens.

    While a window slides, it may begin and end in the middle of a block (swaFloorBlocks).
    """
    if window == STATE:
        return 1
    blocks = ceil_div(tokens, block)
    return blocks if window is None else min(blocks, (window + block - 2) // block + 1)


def least_slots(groups: Sequence[Group], block: int, batches: Sequence[Sequence[Sequences]] = ()) -> list[int]:
    """The slots that each group has at least: one window, or what any of `batches` takes, with room to grow.

    Source: computePoolGroupMinSlotsFromConstraints (storageManager.cpp).
    """
    windows = [window for group in groups for window in group.windows if window]
    largest = max((most_blocks(window, 2 * window + block, block) for window in windows), default=1)
    slots = []
    for group in groups:
        least = sum(
            1 if window == STATE else largest if window is None else most_blocks(window, 2 * window + block, block)
            for window in group.windows
        )
        grows = STATE not in group.windows
        for batch in batches:
            taken = sum(each.number * blocks_of(window, each, block) for window in group.windows for each in batch)
            least = max(least, ceil_div(taken * 100, RESUMES_BELOW) if grows else taken)
        slots.append(least)
    return slots


def _nearest(numerator: int, denominator: int) -> int:
    """The quotient rounded to the nearest whole number, a half to the even one, exactly."""
    whole, rest = divmod(numerator, denominator)
    return whole + (2 * rest > denominator or (2 * rest == denominator and whole % 2 == 1))


def _pages(slots: int, group: Group, page: int) -> int:
    return sum([ceil_div(slots * size, page) for size in group.slot_bytes])


def _fitting(pages: int, group: Group, page: int) -> int:
    """The most slots whose pools take at most `pages` pages together."""
    most = pages * page // sum(group.slot_bytes)
    if len(group.slot_bytes) == 1:
        return most
    return largest_where(lambda slots: _pages(slots, group, page) <= pages, 0, most)
