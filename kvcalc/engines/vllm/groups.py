"""How vLLM groups layers. All groups share one pool of blocks, and each group has its own block table.

Source: get_kv_cache_groups and _get_kv_cache_groups_uniform_page_size, core/kv_cache_planning.py, vLLM 0.33.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import lcm

from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.engines.vllm.pages import (
    EVERY_TOKEN,
    FULL,
    MLA,
    RING,
    SLIDING,
    STATE,
    Demand,
    Page,
    need_the_same_tokens,
    unify,
)
from kvcalc.engines.vllm.releases import Rules, rules_of
from kvcalc.model.memo import remembered
from kvcalc.records import NamedTuple


class Group(NamedTuple):
    """Caches that share a block table, as (index in the given list, page). A block has one page of each."""

    layers: tuple[tuple[int, Page], ...]

    @property
    def block_bytes(self) -> int:
        return _summary(self)[0]

    def blocks(self, demand: Demand) -> int:
        """The most blocks of this group that one request may hold."""
        return max((page.blocks(demand) for page in _summary(self)[1]), default=0)

    def only(self, places: set[int]) -> Group:
        """The part on one pipeline stage. It takes as many blocks as the whole group."""
        return Group(tuple(layer for layer in self.layers if layer[0] in places))


@remembered
def _summary(group: Group) -> tuple[int, tuple[Page, ...]]:
    """The bytes of a group's block, and its distinct pages. Cached because every request needs them."""
    return sum(page.bytes for _, page in group.layers), tuple(dict.fromkeys(page for _, page in group.layers))


def group(pages: list[Page], rules: Rules | None = None) -> list[Group] | None:
    """Group the caches with these pages, which are in layer order. None if vLLM cannot hold them together.

    Layers that keep the same tokens are one group. Otherwise all pages get the same size, and every kind of layer is
    split into groups. A group has as many layers as the rarest kind, or as many as the most common kind if that has
    less than 1.5 times as many. `rules` has the differences in older releases.
    """
    rules = rules or rules_of(None)
    if need_the_same_tokens(pages):
        return [Group(tuple(enumerate(pages)))]
    if is_packed(pages):
        return [Group(layers) for layers in pack(pages, rules.packing)]
    unified = unify(pages, pads=rules.pads)
    if unified is None:
        return _all_tokens(pages)
    if not rules.unifies and any(page.block_size != pages[place].block_size for place, page in enumerate(unified)):
        return None
    kinds: dict[Page, list[tuple[int, Page]]] = {}
    for place, page in enumerate(unified):
        kinds.setdefault(page, []).append((place, page))
    counts = [len(alike) for alike in kinds.values()]
    size = max(counts) if max(counts) < min(counts) * rules.padding_ratio else min(counts)
    groups = []
    for alike in kinds.values():
        parts = ceil_div(len(alike), size)
        groups += [Group(tuple(alike[part::parts])) for part in range(parts)]
    return groups


def _all_tokens(pages: list[Page]) -> list[Group] | None:
    """One group for MLA and windows whose pages do not fit together. Windows then keep all tokens."""
    if {page.kind for page in pages} - {FULL, MLA, SLIDING}:
        return None
    promoted = [page._replace(kind=FULL, span=0) if page.kind == SLIDING else page for page in pages]
    return [Group(tuple(enumerate(promoted)))] if need_the_same_tokens(promoted) else None


def is_packed(pages: list[Page]) -> bool:
    """Whether pages of different sizes lie side by side in a block, as they do for compressed entries."""
    return any(page.rate > 1 or page.stride for page in pages)


def block_bytes(groups: list[Group]) -> int:
    """Bytes of one block of the pool, which is as large as the largest group needs."""
    return max(group.block_bytes for group in groups)


def request_blocks(kinds: list[tuple[tuple[Page, ...], int]], demand: Demand) -> int:
    """The most blocks that one request may hold of all groups. `kinds` comes from `kinds_of_groups`."""
    blocks = 0
    for pages, count in kinds:
        blocks += count * (pages[0].blocks(demand) if len(pages) == 1 else max(page.blocks(demand) for page in pages))
    return blocks


def kinds_of_groups(groups: list[Group]) -> list[tuple[tuple[Page, ...], int]]:
    """The distinct pages of the groups that have any, and how many groups have the same pages."""
    return list(Counter(filter(None, (_summary(group)[1] for group in groups))).items())


# Groups of layers whose pages lie side by side in a block, so that pages of different sizes need no padding.
# Source: _get_packed_kv_cache_groups and _approximate_gcd, core/kv_cache_planning.py, vLLM 0.33.0. Before 0.29:
# _get_kv_cache_groups_uniform_groups, _pool_bytes_per_block, _get_kv_cache_config_deepseek_v4 and
# _max_memory_usage_bytes_from_groups, core/kv_cache_utils.py of 0.20.0 to 0.28.0.

# How releases lay out a block, oldest first (`Rules.packing`). In all but the last one, the layers that keep a window
# are padded to the pages of the layers that keep every token. One page of every size is a tuple.
TUPLES, SLOTS, OVERLAID, BUCKETS = "tuples", "slots", "overlaid", "buckets"

Placed = tuple[int, Page]
"""The place of a cache in the model, and its page."""


class _Bucket(NamedTuple):
    """Layers that could share a block table, by the size of their pages, in layer order."""

    by_size: dict[int, list[Placed]]

    @property
    def layers(self) -> list[Placed]:
        return sorted(layer for alike in self.by_size.values() for layer in alike)

    @property
    def most_alike(self) -> int:
        """The number of layers with the most common size of page."""
        return max(map(len, self.by_size.values()))

    @property
    def is_balanced(self) -> bool:
        """Whether every size of page has the same number of layers."""
        return len({len(alike) for alike in self.by_size.values()}) == 1

    def parts(self, count: int) -> list[tuple[Placed, ...]]:
        """The layers divided into `count` groups with as many layers of every size."""
        if count == 1:
            return [tuple(self.layers)]
        repeats = list(zip(*self.by_size.values()))
        return [tuple(layer for repeat in repeats[part::count] for layer in repeat) for part in range(count)]


def pack(pages: list[Page], packing: str) -> list[tuple[Placed, ...]]:
    """The groups of these caches, which are in layer order."""
    buckets = _buckets(pages)
    return _by_repeats(buckets) if packing == BUCKETS else _by_tuples(buckets)


def packed_block_bytes(groups: Iterable[Iterable[Page]], packing: str) -> int:
    """Bytes of one block that has room for each of the groups."""
    groups = [list(pages) for pages in groups]
    sizes = [[page.bytes for page in pages] for pages in groups]
    if packing in (BUCKETS, OVERLAID):
        strides = {page.stride for pages in groups for page in pages if page.stride}
        return round_up(max(map(sum, sizes)), lcm(*strides))
    counts = [Counter(alike) for alike in sizes]
    if packing == SLOTS:
        return sum(size * max(count[size] for count in counts) for size in set().union(*counts))
    return tuples_bytes(groups)


def tuples_bytes(groups: Iterable[Iterable[Page]]) -> int:
    """Bytes of as many tuples as the group with the most layers of one size has."""
    groups = [list(pages) for pages in groups]
    sizes = {page.bytes for pages in groups for page in pages if page.kind in EVERY_TOKEN}
    return sum(sizes) * max(max(Counter(page.bytes for page in pages).values(), default=0) for pages in groups)


def _buckets(pages: list[Page]) -> list[_Bucket]:
    """Every layer is in the first bucket in which all layers need the same tokens."""
    buckets: list[_Bucket] = []
    for place, page in enumerate(pages):
        for bucket in buckets:
            if need_the_same_tokens([page, *(alike[0][1] for alike in bucket.by_size.values())]):
                break
        else:
            bucket = _Bucket({})
            buckets.append(bucket)
        bucket.by_size.setdefault(page.bytes, []).append((place, page))
    return buckets


def _by_repeats(buckets: list[_Bucket]) -> list[tuple[Placed, ...]]:
    """A bucket with as many layers of every size is a pattern that repeats. Groups have about as many repeats."""
    balanced = [bucket.most_alike for bucket in buckets if bucket.is_balanced]
    mixed = [bucket.most_alike for bucket in buckets if bucket.is_balanced and len(bucket.by_size) > 1]
    repeats = _approximate_gcd(balanced, max(mixed)) if mixed else 0
    counts = [ceil_div(b.most_alike, repeats) if repeats and b.is_balanced else 1 for b in buckets]
    # States, rings, and windows that need not repeat with a pattern are divided so that they do not make the block
    # larger.
    kinds = [bucket.layers[0][1].kind for bucket in buckets]
    divided = [kind in (STATE, RING) or (not repeats and kind == SLIDING) for kind in kinds]
    kept = max(
        bucket.layers[0][1].bytes if divides else sum(ceil_div(len(a), n) * size for size, a in bucket.by_size.items())
        for bucket, n, divides in zip(buckets, counts, divided)
    )
    groups = []
    for bucket, count, divides in zip(buckets, counts, divided):
        if divides:
            count = max(count, ceil_div(len(bucket.layers), max(kept // bucket.layers[0][1].bytes, 1)))
        groups += bucket.parts(count)
    return groups


def _by_tuples(buckets: list[_Bucket]) -> list[tuple[Placed, ...]]:
    """The layers that keep every token are one group. The others are divided into groups of about as many tuples."""
    whole = next(bucket for bucket in buckets if bucket.layers[0][1].kind in EVERY_TOKEN)
    others = [bucket for bucket in buckets if bucket is not whole]
    tuples = _approximate_gcd([whole.most_alike, *(bucket.most_alike for bucket in others)], whole.most_alike)
    groups = [tuple(whole.layers)]
    for bucket in others:
        padded: dict[int, list[Placed]] = {}
        for size, alike in bucket.by_size.items():
            larger = min(other for other in whole.by_size if other >= size)
            padded.setdefault(larger, []).extend((place, page._replace(padded_bytes=larger)) for place, page in alike)
        groups += _Bucket(padded).parts(ceil_div(max(map(len, padded.values())), tuples))
    return groups


def _approximate_gcd(counts: list[int], least: int) -> int:
    """The number, at least `least`, whose multiples need the least padding of the counts; the largest of several."""
    return min(range(least, max(counts) + 1), key=lambda n: (sum(-count % n for count in counts), -n), default=least)
