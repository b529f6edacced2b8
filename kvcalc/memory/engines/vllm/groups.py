"""How vLLM groups layers: one pool of blocks, of which every group takes its own by its own block table.

Source: get_kv_cache_groups and _get_kv_cache_groups_uniform_page_size, core/kv_cache_planning.py, vLLM 0.33.0.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvcalc.memory.engines.rounding import ceil_div
from kvcalc.memory.engines.vllm.pages import FULL, MLA, SLIDING, Demand, Page, need_the_same_tokens, unify
from kvcalc.memory.engines.vllm.releases import Rules, rules_of
from kvcalc.model.memo import remembered


class Group(NamedTuple):
    """Caches which share a block table: (its place in the list given, its page). A block has one page of each."""

    layers: tuple[tuple[int, Page], ...]

    @property
    def block_bytes(self) -> int:
        return _summary(self)[0]

    def blocks(self, demand: Demand) -> int:
        """Blocks one request may hold of this group at most."""
        return max((page.blocks(demand) for page in _summary(self)[1]), default=0)

    def only(self, places: set[int]) -> Group:
        """The part a pipeline stage holds; it takes as many blocks as the whole."""
        return Group(tuple(layer for layer in self.layers if layer[0] in places))


@remembered
def _summary(group: Group) -> tuple[int, tuple[Page, ...]]:
    """A group's bytes of a block, and its different pages: they are asked for with every request."""
    return sum(page.bytes for _, page in group.layers), tuple(dict.fromkeys(page for _, page in group.layers))


def group(pages: list[Page], rules: Rules | None = None) -> list[Group] | None:
    """Groups of the caches with these pages, in the layers' order; None where vLLM has no way to hold them together.

    Layers that keep as many tokens are one group. Else pages are made one size, and every kind of layer is split into
    groups of as many layers as the rarest kind has: of the commonest, where that has less than half as many again.
    What older releases did otherwise is in `rules`.
    """
    rules = rules or rules_of(None)
    if need_the_same_tokens(pages):
        return [Group(tuple(enumerate(pages)))]
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
    """MLA beside windows that do not fit its pages: windows are then kept whole, as full attention."""
    if {page.kind for page in pages} - {FULL, MLA, SLIDING}:
        return None
    promoted = [page._replace(kind=FULL, span=0) if page.kind == SLIDING else page for page in pages]
    return [Group(tuple(enumerate(promoted)))] if need_the_same_tokens(promoted) else None


def block_bytes(groups: list[Group]) -> int:
    """Bytes of one block of the pool: the largest group's, whichever group takes it."""
    return max(group.block_bytes for group in groups)


def request_blocks(kinds: list[tuple[tuple[Page, ...], int]], demand: Demand) -> int:
    """Blocks one request may hold at most of all groups, given by `kinds_of_groups`."""
    blocks = 0
    for pages, count in kinds:
        blocks += count * (pages[0].blocks(demand) if len(pages) == 1 else max(page.blocks(demand) for page in pages))
    return blocks


def kinds_of_groups(groups: list[Group]) -> list[tuple[tuple[Page, ...], int]]:
    """The different pages of each group that has any, and how many groups have the same."""
    return list(Counter(filter(None, (_summary(group)[1] for group in groups))).items())
