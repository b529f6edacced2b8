"""vLLM's tiers of memory, and its drafts.

Source, vLLM 0.33.0:

- --kv-offloading-size: a chunk is one block of all devices, rounded up to a page of 4,096 bytes (CPUOffloadingSpec,
  v1/kv_offload/cpu/spec.py; mmap.PAGESIZE). Devices that all have the same rows (MLA) keep one copy
  (replicated_layout, offloading/config.py of distributed/kv_transfer/kv_connector/v1). Other tiers are behind the CPU's
  (v1/kv_offload/tiering). A block is copied when it is computed (prepare_store, v1/kv_offload/cpu/manager.py).
- A hidden state of the last token is needed to draft with MTP or EAGLE layers. Before 0.33, the last block that
  matches is computed again (drop_eagle_block of find_longest_cache_hit, v1/core/single_type_kv_cache_manager.py), also
  for DFlash. Since 0.33, the hash of a block also has the tokens after it that the drafter reads: one, or as many as
  are drafted if several MTP modules follow each other (num_hash_lookahead_tokens and num_prefill_lookahead_tokens,
  config/vllm.py). Not so with a KV connector, which --kv-offloading-size and separate prefill instances use: the block
  is computed again. A tier keeps and a prefill instance sends the blocks of all layers, those that draft included. The
  tier too needs one block more for a hit, and does not load it (is_eagle_group, offloading/scheduler.py). With several
  MTP modules, the decode instance computes the last drafted tokens less one itself (_prefill_backoff,
  nixl/base_scheduler.py; both in distributed/kv_transfer/kv_connector/v1). Draft models and n-grams change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.engines.prefixes import PLAIN, InUse, Matching, Prefixes, in_use
from kvcalc.engines.reuse import OF_HIDDEN_STATES, TIERS, Reuse
from kvcalc.engines.rounding import ceil_div
from kvcalc.engines.vllm.account import Plan
from kvcalc.engines.vllm.groups import kinds_of_groups
from kvcalc.engines.vllm.pages import CHUNKED, CROSS, EVERY_TOKEN, RING, SLIDING, STATE, Page, running_blocks
from kvcalc.engines.vllm.states import keeps_states
from kvcalc.errors import UsageError
from kvcalc.model.drafting import DFLASH, MTP, Speculation
from kvcalc.model.spec import ModelSpec, has_cross_attention, windows
from kvcalc.releases import Release

_LOOKS_AHEAD = Release.of(0, 33)


class VllmReuse(Reuse):
    """vLLM's tiers, drafts and prefixes."""

    tiers = TIERS
    keeps_one_copy = True
    copies_at_once = True
    tier_page_bytes = 4096
    draft_option = "num-speculative-tokens"
    drafts_with_dflash = True

    def check_hits(self, option: str, spec: ModelSpec) -> None:
        """Prefix caching is off for encoder-decoders (vllm/config/scheduler.py)."""
        if has_cross_attention(spec):
            raise UsageError(
                f"{option}: vLLM has no prefix cache for encoder-decoders like {spec.name}", "leave it out"
            )

    def check_drafts(self, speculation: Speculation, spec: ModelSpec, settings: Mapping[str, Any]) -> None:
        """If prompts are divided, MTP layers of one module alone draft (PCPManager.validate_config, v1/worker/gpu)."""
        if "prefill-context-parallel-size" in settings and speculation.method != MTP:
            raise UsageError(
                f"--speculative {speculation}: vLLM does not support this with --prefill-context-parallel-size",
                f"use --speculative mtp:{speculation.num_tokens}",
            )

    def matching(self, speculation: Speculation, spec: ModelSpec, release: Release | None, moved: str) -> Matching:
        is_older = release is not None and release < _LOOKS_AHEAD
        has_several = speculation.method == MTP and min(spec.num_draft_layers or 1, speculation.num_tokens) > 1
        if is_older or moved:
            drops = speculation.method in OF_HIDDEN_STATES or (is_older and speculation.method == DFLASH)
            if drops and (windows(spec) or keeps_states(spec)):
                # The block is dropped in the groups of the drafting layers, and the others follow.
                what = "this release" if is_older else "vLLM with another tier or instance"
                raise UsageError(
                    f"--speculative {speculation}: which prefixes of {spec.name} {what} finds again is not modelled",
                    "use vLLM 0.33, or leave --speculative out" if is_older else "leave --speculative out",
                )
            return Matching(drops_block=drops, unsent_tokens=speculation.num_tokens - 1 if has_several else 0)
        if has_several:
            return Matching(speculation.num_tokens)
        return Matching(1) if speculation.method in OF_HIDDEN_STATES else PLAIN


# vLLM's prefix cache: which blocks requests share, and which must stay for a later request.
# Source, vLLM 0.33.0: find_longest_cache_hit and get_num_skipped_tokens of the managers in
# v1/core/single_type_kv_cache_manager.py, resolve_kv_cache_block_sizes (v1/core/kv_cache_utils.py), and for other
# instances and tiers get_exchange_clipped_blocks (nixl/base_scheduler.py) and get_sliding_window_size_in_chunks
# (offloading/config.py) of distributed/kv_transfer/kv_connector/v1.
# - Only full blocks are found, up to the last multiple of the least common multiple of all groups' blocks. A model with
#   states has blocks of hundreds of tokens (mamba cache mode `align`).
# - Full attention needs all blocks of the prefix (FullAttentionManager). A windowed layer needs only the blocks with
#   the last `window - 1` tokens before the end (SlidingWindowManager); a request frees blocks that its window has left.
#   A chunked layer needs the blocks of the chunk in which the prefix ends, and a recurrent layer the state at its end.
# - Blocks that no running request uses stay cached until their memory is needed (BlockPool.free_blocks).


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
            in_use = self._in_use(page, needed, shared, tokens)
            blocks += count * (in_use.shared + batch * in_use.own)
        return blocks * self.unit_bytes

    def running_blocks(self, shared: int, tokens: int, in_flight_tokens: int) -> InUse:
        """The blocks of requests that decode and have `tokens` tokens each. Their first `shared` are kept once.

        Blocks of the prefix that a window has left are free for others.
        """
        demand = self._plan.demand(tokens)._replace(max_in_flight_tokens=in_flight_tokens)
        once = private = 0
        for page, pages, count in self._kinds:
            in_use = self._in_use(page, max(running_blocks(page, demand) for page in pages), shared, tokens)
            once, private = once + count * in_use.shared, private + count * in_use.own
        return InUse(once, private)

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
        if page.kind in (STATE, CROSS, RING):
            return min(tokens, int(page.kind != RING))
        return tokens // size

    def _after(self, page: Page, tokens: int, after: int) -> int:
        """The most blocks after the first `after` tokens."""
        if page.kind in (STATE, CROSS, RING):
            return int(tokens > after)
        size = self._tokens_of(page)
        return tokens // size - after // size

    def _sent(self, page: Page, tokens: int) -> int:
        """The blocks that a decode instance gets. A window may begin inside a block, so one more is sent."""
        size = self._tokens_of(page)
        blocks = ceil_div(tokens, size)
        if page.kind == SLIDING:
            return min(blocks, ceil_div(page.span, size) + 1)
        return min(tokens, 1) if page.kind in (STATE, CROSS, RING) else blocks

    def _in_tier(self, page: Page, tokens: int) -> int:
        """The blocks that the CPU's tier keeps."""
        size = self._tokens_of(page)
        if page.kind in (SLIDING, CHUNKED):
            return min(tokens // size, ceil_div(page.span, size))
        return self._kept(page, tokens)
