"""One layer's cache in vLLM: the tokens per page, and the number of pages that a request needs.

Source: kv_cache_interface.py and core/kv_cache_planning.py, vLLM 0.33.0.
"""

from __future__ import annotations

from kvcalc.engines.rounding import round_up
from kvcalc.records import NamedTuple

FULL, SLIDING, CHUNKED, MLA, STATE, CROSS, RING = "full", "sliding", "chunked", "mla", "state", "cross", "ring"

# Kinds that keep a slot for every token. Layers of these kinds can share a group, whatever their widths.
EVERY_TOKEN = (FULL, MLA)


class Demand(NamedTuple):
    """The most that a request may need.

    `max_in_flight_tokens` is the number of tokens that are scheduled but not yet finished. `state_blocks` is the number
    of states, besides those that a page with a block size has for every block. Each of `token_ranks` decode context
    parallel ranks holds its share of the tokens, but all states.
    """

    max_model_len: int
    max_in_flight_tokens: int
    encoder_tokens: int = 0
    state_blocks: int = 1
    token_ranks: int = 1


class Page(NamedTuple):
    """The page of one layer: `block_size` tokens of `token_bytes` each, or one state (one per block if it has a size).

    `span` is the window or the chunk, in tokens. `width` distinguishes layers with different heads. `padded_bytes` is
    the size of the page if it is padded to the size of another page, else 0. If tokens are compressed, `rate` of them
    make one row of `token_bytes`. `stride` is 0, or the bytes of which a block is a multiple if the kernel reads pages
    of several sizes side by side in a block (KVCacheLayout.BLHNC, block_stride_alignment). A request has one ring, of
    `block_size` tokens (CircularBufferSpec). `is_replicated` is whether every rank holds a whole state (tp_replicated).
    """

    kind: str
    block_size: int
    token_bytes: int
    span: int = 0
    width: tuple[int, ...] = ()
    state_bytes: int = 0
    padded_bytes: int = 0
    rate: int = 1
    stride: int = 0
    is_replicated: bool = False

    @property
    def own_bytes(self) -> int:
        """Bytes of the page without padding."""
        return self.state_bytes if self.kind == STATE else self.block_size // self.rate * self.token_bytes

    @property
    def bytes(self) -> int:
        return self.padded_bytes or self.own_bytes

    def aligned(self, step: int) -> Page:
        """The page padded to a multiple of `step` bytes."""
        return self._replace(padded_bytes=round_up(self.own_bytes, step))

    def tokens(self, demand: Demand) -> int:
        """The most tokens whose rows a request may hold in this layer, before rounding to blocks.

        A chunk holds its earlier tokens and the tokens in flight.
        """
        if self.kind == SLIDING:
            return min(self.span - 1 + demand.max_in_flight_tokens, demand.max_model_len)
        if self.kind == CHUNKED:
            return min(self.span + demand.max_in_flight_tokens, demand.max_model_len)
        if self.kind == RING:
            return self.block_size
        if self.kind in EVERY_TOKEN:
            return -(-demand.max_model_len // demand.token_ranks)
        return demand.encoder_tokens if self.kind == CROSS else demand.max_model_len

    def blocks(self, demand: Demand) -> int:
        """The most pages that one request may hold, which vLLM reserves to admit it.

        A window may begin inside a block, so it needs one more block.
        """
        if self.kind == STATE:
            every_block = -(-demand.max_model_len // self.block_size) if self.block_size else 0
            return every_block + demand.state_blocks
        return -(-self.tokens(demand) // self.block_size) + (self.kind == SLIDING)


def running_blocks(page: Page, demand: Demand) -> int:
    """The most pages that a request with `demand.max_model_len` tokens holds, with this many tokens in flight.

    Blocks that a window has left behind are given back (remove_skipped_blocks, core/single_type_kv_cache_manager.py).
    """
    blocks = page.blocks(demand)
    if page.kind in (SLIDING, CHUNKED):
        return min(blocks, -(-demand.max_model_len // page.block_size))
    return blocks


def need_the_same_tokens(pages: list[Page]) -> bool:
    """Whether layers with these pages can share one block table: same tokens per block, kept for the same time."""
    if len({page.block_size for page in pages}) > 1:
        return False
    kinds = {page.kind for page in pages}
    if kinds <= set(EVERY_TOKEN):
        return True
    if len(kinds) > 1 or CROSS in kinds:
        return len(set(pages)) == 1
    if STATE in kinds:
        return len({(page.bytes, page.is_replicated) for page in pages}) == 1
    return len({page.span for page in pages}) == 1


def unify(pages: list[Page], *, pads: bool = True) -> list[Page] | None:
    """Give all pages the size of the largest page.

    Blocks grow by a whole factor. If that is not possible, the page is padded if `pads` is set. Returns None if it may
    not be padded, or if it is an MLA page, which sparse kernels index by whole rows. States are always padded.
    """
    largest = max(page.bytes for page in pages)
    unified = []
    for page in pages:
        if page.bytes == largest:
            unified.append(page)
        elif page.kind == STATE or (pads and largest % page.bytes and page.kind != MLA):
            unified.append(page._replace(padded_bytes=largest))
        elif largest % page.bytes == 0:
            unified.append(page._replace(block_size=page.block_size * (largest // page.bytes)))
        else:
            return None
    return unified
