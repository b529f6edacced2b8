"""Where the bytes of one request go: what attention stores, then every rounding by its name."""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines import Line
from kvcalc.memory.engines.vllm.groups import Group, block_bytes
from kvcalc.memory.engines.vllm.layers import Layer
from kvcalc.memory.engines.vllm.pages import CHUNKED, CROSS, SLIDING, STATE, Demand, Page
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.model.caches import Cache
from kvcalc.model.memo import remembered


class Plan(NamedTuple):
    """One device's share of a model: its layers, their groups, and the groups' parts on every pipeline stage."""

    layers: list[Layer]
    groups: list[Group]
    stages: list[list[Group]]

    @property
    def largest_stage(self) -> list[Group]:
        return max(self.stages, key=block_bytes)

    @property
    def block_bytes(self) -> int:
        """Of the stage whose blocks are largest: it sets how many there are."""
        return _largest_block(self)


@remembered
def _largest_block(plan: Plan) -> int:
    return block_bytes(plan.largest_stage)


@remembered
def _by_group(plan: Plan) -> list[tuple[Group, Group, list[tuple[Cache, Page, int]]]]:
    """Every group's part on the largest stage, the whole group, and the part's caches and pages with their number."""
    found = []
    for part, whole in zip(plan.largest_stage, plan.groups):
        alike: dict[tuple[type[Cache], Cache, Page], int] = {}
        for place, page in part.layers:
            cache = plan.layers[place].cache
            alike[type(cache), cache, page] = alike.get((type(cache), cache, page), 0) + 1
        found.append((part, whole, [(cache, page, count) for (_, cache, page), count in alike.items()]))
    return found


def account(plan: Plan, dtype: Dtype, demand: Demand) -> list[Line]:
    """Lines which add up to the bytes of one request at full length on the stage with the largest blocks; those of no
    bytes are left out."""
    stored = flight = window = encoder = layout = rounding = states = padding = unequal = 0
    for part, whole, alike in _by_group(plan):
        blocks = whole.blocks(demand)
        unequal += blocks * (plan.block_bytes - part.block_bytes)
        for cache, page, count in alike:
            held = stored_cache_bytes(cache, demand.max_model_len, dtype)
            stored += count * held
            padding += count * blocks * (page.bytes - page.own_bytes)
            if page.kind == STATE:
                layout += count * (page.state_bytes - held)
                states += count * (blocks - 1) * page.state_bytes
                continue
            needed = _tokens(page, demand) * page.token_bytes
            if page.kind in (SLIDING, CHUNKED):
                flight += count * (needed - held)
            elif page.kind == CROSS:
                encoder += count * (needed - held)
            else:
                layout += count * (needed - held)
            spare = page.own_bytes if page.kind == SLIDING else 0
            window += count * spare
            rounding += count * (blocks * page.own_bytes - needed - spare)
    named = {
        "stored": stored,
        "tokens in flight beside windows": flight,
        "the encoder's longest input": encoder,
        "another layout or dtype": layout,
        "blocks rounded up": rounding,
        "windows: one block more": window,
        "states of prefixes and drafts": states,
        "pages padded to one size": padding,
        "blocks as large as the largest group's": unequal,
    }
    return [Line(name, size) for name, size in named.items() if size]


def _tokens(page: Page, demand: Demand) -> int:
    """Tokens whose rows a request may hold in this page's layer, before blocks."""
    if page.kind == SLIDING:
        return min(page.span - 1 + demand.max_in_flight_tokens, demand.max_model_len)
    if page.kind == CHUNKED:
        return min(page.span + demand.max_in_flight_tokens, demand.max_model_len)
    return demand.encoder_tokens if page.kind == CROSS else demand.max_model_len
