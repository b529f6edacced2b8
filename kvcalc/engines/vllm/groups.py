"""How vLLM groups layers. All groups share one pool of blocks, and each group has its own block table.

Source: get_kv_cache_groups and _get_kv_cache_groups_uniform_page_size, core/kv_cache_planning.py, vLLM 0.33.0.
"""

from __future__ import annotations

from collections import Counter

from kvcalc.engines.rounding import ceil_div
from kvcalc.engines.vllm.packed import pack
from kvcalc.engines.vllm.pages import FULL, MLA, SLIDING, Demand, Page, need_the_same_tokens, unify
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
    return any(page.rate > 1 for page in pages)


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
