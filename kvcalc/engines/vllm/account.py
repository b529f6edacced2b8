"""The parts of one request's bytes: the bytes that attention stores, and every kind of padding by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from math import lcm

from kvcalc.engines.account import Line, lines_of
from kvcalc.engines.rounding import ceil_div
from kvcalc.engines.vllm.groups import (
    BUCKETS,
    SLOTS,
    TUPLES,
    Group,
    block_bytes,
    is_packed,
    kinds_of_groups,
    packed_block_bytes,
    request_blocks,
    tuples_bytes,
)
from kvcalc.engines.vllm.layers import Layer
from kvcalc.engines.vllm.pages import CHUNKED, CROSS, EVERY_TOKEN, RING, SLIDING, STATE, Demand, Page, running_blocks
from kvcalc.engines.vllm.releases import Rules
from kvcalc.memory.curves import SizedCache, sized_cache
from kvcalc.memory.dtypes import Dtype, bytes_of
from kvcalc.model.caches import Cache, CompressedAttention


class Plan:
    """One device's share of a model: its layers, their groups, and the part of each group on every pipeline stage.

    `block_bytes` is the block size of the stage with the largest blocks, which limits the number of blocks.
    `stages_block_bytes` is the sum over all stages. `checked_block_bytes` is what the check before the start counts as
    a block (`Rules.bills`). `of_any_length` has the fields of `Demand` that do not depend on a
    request's length.
    """

    def __init__(
        self, layers: list[Layer], groups: list[Group], stages: list[list[Group]],
        of_any_length: tuple[int, int, int, int], dtype: Dtype, rules: Rules,
    ) -> None:  # fmt: skip
        packing = rules.packing if is_packed([layer.page for layer in layers]) else ""
        self.layers, self.groups, self.dtype, self._packing = layers, groups, dtype, packing
        sizes = [packed_block_bytes(pages_of(stage), packing) if packing else block_bytes(stage) for stage in stages]
        self.block_bytes = max(sizes)
        self.largest_stage = stages[sizes.index(self.block_bytes)]
        self.stages_block_bytes = sum(sizes)
        self.checked_block_bytes = self.block_bytes
        if len(stages) > 1 and rules.bills != "stage":
            of_all_layers = rules.bills == "all layers"
            self.checked_block_bytes = block_bytes(groups) if of_all_layers else len(stages) * self.block_bytes
        elif packing not in ("", BUCKETS):
            self.checked_block_bytes = tuples_bytes(pages_of(self.largest_stage))
        self._of_any_length = of_any_length
        kinds = kinds_of_groups(groups)
        # With decode context parallelism, a block on every rank has the tokens of one block for each rank.
        self.token_ranks = of_any_length[-1]
        self._every_token = [
            (p[0].block_size * self.token_ranks, n) for p, n in kinds if len(p) == 1 and p[0].kind in EVERY_TOKEN
        ]
        self._other_kinds = [(p, n) for p, n in kinds if len(p) > 1 or p[0].kind not in EVERY_TOKEN]
        self._asked = self._blocks = 0

    def demand(self, tokens: int) -> Demand:
        """The most that a request of `tokens` tokens needs."""
        return Demand(tokens, *self._of_any_length)

    def request_blocks(self, tokens: int) -> int:
        """The most blocks of all groups that one request of `tokens` tokens may hold.

        A search for the largest batch asks this many times for one length, so the last answer is kept.
        """
        if tokens != self._asked:
            blocks = request_blocks(self._other_kinds, self.demand(tokens)) if self._other_kinds else 0
            for block_tokens, count in self._every_token:
                blocks += count * -(-tokens // block_tokens)
            self._asked, self._blocks = tokens, blocks
        return self._blocks

    @cached_property
    def gives_back(self) -> bool:
        """Whether a request gives blocks back while it runs."""
        return any(page.kind in (SLIDING, CHUNKED) for pages, _ in self._other_kinds for page in pages)

    def running_blocks(self, tokens: int, in_flight_tokens: int | None) -> int:
        """The blocks of a running request of `tokens` tokens. None in flight: the most tokens that can be, of a prompt.

        `request_blocks` has what vLLM reserves for a request at the start: the most that it may hold at any time.
        """
        demand = self.demand(tokens)
        if in_flight_tokens is not None:
            demand = demand._replace(max_in_flight_tokens=in_flight_tokens)
        blocks = sum([n * max([running_blocks(page, demand) for page in pages]) for pages, n in self._other_kinds])
        return blocks + sum([count * -(-tokens // block_tokens) for block_tokens, count in self._every_token])

    def checked_bytes(self, tokens: int) -> int:
        """The bytes that a stage must have before the engine starts, and that it names if they are not there.

        DeepSeek-V4 before 0.29: whole tuples of pages.
        """
        return self.request_blocks(tokens) * self.checked_block_bytes

    def printed_blocks(self, tokens: int) -> int:
        """The blocks of a request by which the printed concurrency divides.

        Before 0.27, blocks of groups with smaller pages counted as fractions of the first group's blocks.
        """
        if self._packing not in (TUPLES, SLOTS):
            return self.request_blocks(tokens)
        demand = self.demand(tokens)
        needed = sum(whole.blocks(demand) * part.block_bytes for whole, part in zip(self.groups, self.largest_stage))
        return ceil_div(needed, self.largest_stage[0].block_bytes)

    @cached_property
    def pages(self) -> dict[tuple[type[Cache], Cache], list[Page]]:
        """The pages of every distinct cache."""
        distinct: dict[tuple[type[Cache], Cache], dict[tuple[Page, str | None], None]] = {}
        for layer in self.layers:
            distinct.setdefault((type(layer.cache), layer.cache), {})[layer.page, layer.part] = None
        return {key: [page for page, _ in pages] for key, pages in distinct.items()}

    @cached_property
    def block_sizes(self) -> set[int]:
        """The different numbers of tokens per block, over all layers that keep tokens."""
        return {page.block_size for part in self.groups for _, page in part.layers if page.kind not in (STATE, RING)}

    @cached_property
    def even_blocks(self) -> int | None:
        """The blocks that `common_block_tokens` more tokens take, if they are the same at every length; else None."""
        if self._other_kinds:
            return None
        return sum([count * (self.common_block_tokens // tokens) for tokens, count in self._every_token])

    @cached_property
    def common_block_tokens(self) -> int:
        """The number of tokens after which every group has whole blocks."""
        return lcm(*self.block_sizes) * self.token_ranks

    @cached_property
    def by_group(self) -> list[tuple[Group, int, list[tuple[SizedCache, Page, str | None]]]]:
        """For every group: the whole group, how much smaller than a block its part on the largest stage is, and the
        distinct caches, pages and parts of caches of that part."""
        groups = []
        for part, whole in zip(self.largest_stage, self.groups):
            alike: dict[tuple[type[Cache], Cache, Page, str | None], int] = {}
            for place, page in part.layers:
                _, cache, _, held = self.layers[place]
                alike[type(cache), cache, page, held] = alike.get((type(cache), cache, page, held), 0) + 1
            caches = [(sized_cache(cache, n, self.dtype), page, held) for (_, cache, page, held), n in alike.items()]
            groups.append((whole, self.block_bytes - part.block_bytes, caches))
        return groups


def pages_of(groups: Iterable[Group]) -> list[list[Page]]:
    """The pages of every group."""
    return [[page for _, page in group.layers] for group in groups]


# Why a page of this kind has rows for tokens that the formula does not store.
_BESIDE = {
    SLIDING: "in-flight tokens beyond the window", CHUNKED: "in-flight tokens beyond the window",
    CROSS: "longest encoder input",
}  # fmt: skip


# The parts of a compressed cache that hold the compressor's states.
_STATES = ("buffers", "")


def _stored(sized: SizedCache, tokens: int, dtype: Dtype, part: str | None) -> int:
    """The bytes that the formula stores for a cache, or for one part of it."""
    if part == RING:
        return 0
    if part is None or not isinstance(sized.cache, CompressedAttention):
        return sized.stored_bytes(tokens, dtype)
    return bytes_of(dict(sized.cache.stored_parts(tokens)).get(part, 0), dtype)


def account(plan: Plan, tokens: int) -> list[Line]:
    """Lines that add up to the bytes of one request at full length on the stage with the largest blocks."""
    sizes: defaultdict[str, int] = defaultdict(int)
    demand = plan.demand(tokens)
    for whole, smaller, alike in plan.by_group:
        blocks = whole.blocks(demand)
        sizes["blocks padded to the largest group"] += blocks * smaller
        for sized, page, part in alike:
            stored_tokens = page.tokens(demand) if page.kind in EVERY_TOKEN else tokens
            count, held = sized.num_layers, _stored(sized, stored_tokens, plan.dtype, part)
            sizes["stored"] += count * held
            if page.padded_bytes:
                sizes["pages padded to one size"] += count * blocks * (page.bytes - page.own_bytes)
            if page.kind == STATE:
                sizes["different layout or dtype"] += count * (page.state_bytes - held)
                sizes["states for prefixes and drafts"] += count * (blocks - 1) * page.state_bytes
                continue
            needed = ceil_div(page.tokens(demand), page.rate) * page.token_bytes
            beside = "full compressor states in fp32" if part in _STATES else _BESIDE.get(page.kind)
            sizes[beside or "different layout or dtype"] += count * (needed - held)
            spare = page.own_bytes if page.kind == SLIDING else 0
            if spare:
                sizes["one extra block per window"] += count * spare
            sizes["blocks rounded up"] += count * (blocks * page.own_bytes - needed - spare)
    return lines_of(sizes)
