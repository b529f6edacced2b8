"""vLLM's prefix cache: which blocks requests share, and which must stay for a later request.

Source, vLLM 0.33.0: find_longest_cache_hit and get_num_skipped_tokens of the managers in
v1/core/single_type_kv_cache_manager.py, resolve_kv_cache_block_sizes (v1/core/kv_cache_utils.py), and for other
instances and tiers get_exchange_clipped_blocks (nixl/base_scheduler.py) and get_sliding_window_size_in_chunks
(offloading/config.py) of distributed/kv_transfer/kv_connector/v1.

- Only full blocks are found, up to the last multiple of the least common multiple of all groups' blocks. A model with
  states has blocks of hundreds of tokens (mamba cache mode `align`).
- Full attention needs all blocks of the prefix (FullAttentionManager). A windowed layer needs only the blocks with the
  last `window - 1` tokens before the end (SlidingWindowManager); a request frees blocks that its window has left. A
  chunked layer needs the blocks of the chunk in which the prefix ends, and a recurrent layer the state at its end.
- Blocks that no running request uses stay cached until their memory is needed (BlockPool.free_blocks).
"""

from __future__ import annotations

from kvcalc.engines.prefixes import InUse, Prefixes, in_use
from kvcalc.engines.rounding import ceil_div
from kvcalc.engines.vllm.account import Plan
from kvcalc.engines.vllm.groups import kinds_of_groups
from kvcalc.engines.vllm.pages import CHUNKED, CROSS, EVERY_TOKEN, SLIDING, STATE, Page, running_blocks


class VllmPrefixes(Prefixes):
    """The blocks of a plan. Each has `block_bytes` bytes on the devices that are counted."""

    def __init__(self, plan: Plan, block_bytes: int) -> None:
        self._plan, self.unit_bytes = plan, block_bytes
        self._kinds = [(pages[0], pages, count) for pages, count in kinds_of_groups(plan.groups)]
        self.block_tokens = plan.common_block_tokens

    def batch_bytes(self, shared: int, tokens: int, batch: int) -> int:
        demand, blocks = self._plan.demand(tokens), 0
        for page, pages, count in self._kinds:
            needed = max(page.blocks(demand) for page in pages)
            found = self._in_use(page, needed, shared, tokens)
            blocks += count * (found.shared + batch * found.own)
        return blocks * self.unit_bytes

    def running_blocks(self, shared: int, tokens: int, in_flight_tokens: int) -> InUse:
        """The blocks of requests that decode and have `tokens` tokens each. Their first `shared` are kept once.

        Blocks of the prefix that a window has left are free for others.
        """
        demand = self._plan.demand(tokens)._replace(max_in_flight_tokens=in_flight_tokens)
        once = own = 0
        for page, pages, count in self._kinds:
            found = self._in_use(page, max(running_blocks(page, demand) for page in pages), shared, tokens)
            once, own = once + count * found.shared, own + count * found.own
        return InUse(once, own)

    def kept_bytes(self, tokens: int, after: int = 0) -> int:
        return self._bytes(
            [min(self._kept(page, tokens), self._after(page, tokens, after)) for page, _, _ in self._kinds]
        )

    def sent_bytes(self, tokens: int) -> int:
        return self._bytes([self._sent(page, tokens) for page, _, _ in self._kinds])

    def tier_bytes(self, tokens: int, after: int = 0) -> int:
        return self._bytes(
            [min(self._in_tier(page, tokens), self._after(page, tokens, after)) for page, _, _ in self._kinds]
        )

    def _bytes(self, blocks: list[int]) -> int:
        return self.unit_bytes * sum(count * each for (_, _, count), each in zip(self._kinds, blocks))

    def _tokens_of(self, page: Page) -> int:
        """The tokens of a block. States have no tokens of their own unless there is one for every block."""
        if page.kind == STATE:
            return page.block_size or self.block_tokens
        return page.block_size * (self._plan.token_ranks if page.kind in EVERY_TOKEN else 1)

    def _in_use(self, page: Page, needed: int, shared: int, tokens: int) -> InUse:
        size = self._tokens_of(page)
        if page.kind in EVERY_TOKEN or (page.kind == STATE and page.block_size):
            return InUse(shared // size, needed - shared // size)
        if page.kind in (SLIDING, CHUNKED):
            return in_use(needed, ceil_div(tokens, size) - shared // size, self._kept(page, shared))
        return InUse(0, needed)

    def _kept(self, page: Page, tokens: int) -> int:
        """The blocks that a hit of `tokens` tokens needs."""
        size = self._tokens_of(page)
        if page.kind == SLIDING:
            return min(tokens // size, ceil_div(page.span - 1, size))
        if page.kind == CHUNKED:
            return tokens // size - tokens // page.span * page.span // size
        if page.kind in (STATE, CROSS):
            return min(tokens, 1)
        return tokens // size

    def _after(self, page: Page, tokens: int, after: int) -> int:
        """The most blocks after the first `after` tokens."""
        if page.kind in (STATE, CROSS):
            return int(tokens > after)
        size = self._tokens_of(page)
        return tokens // size - after // size

    def _sent(self, page: Page, tokens: int) -> int:
        """The blocks that a decode instance gets. A window may begin inside a block, so one more is sent."""
        size = self._tokens_of(page)
        blocks = ceil_div(tokens, size)
        if page.kind == SLIDING:
            return min(blocks, ceil_div(page.span, size) + 1)
        return min(tokens, 1) if page.kind in (STATE, CROSS) else blocks

    def _in_tier(self, page: Page, tokens: int) -> int:
        """The blocks that the CPU's tier keeps."""
        size = self._tokens_of(page)
        if page.kind in (SLIDING, CHUNKED):
            return min(tokens // size, ceil_div(page.span, size))
        return self._kept(page, tokens)
