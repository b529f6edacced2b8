"""SGLang's tiers of memory (HiCache), and its drafts.

Source, SGLang 0.5.23:

- HiCache keeps pages of the device's pools (HostKVCache, srt/mem_cache/pool_host/base.py), and copies them when they
  are computed (write_through). --hicache-size is in GB for each device. MLA is kept once
  (srt/mem_cache/mla_host_dedup.py). --hicache-storage-backend has the other tiers.
- With MTP and EAGLE, the keys of the radix tree are pairs of tokens, so one token less is found
  (RadixKey.maybe_to_bigram_view, mem_cache/radix_cache.py). Not so with recurrent states (UnifiedTreeCore.is_eagle,
  unified_cache/unified_tree_core.py). HiCache keeps the rows of the drafts for the tokens of the model (PoolName.DRAFT,
  hybrid_cache/hybrid_pool_assembler.py of mem_cache), and a prefill instance sends them (PrefillBootstrapQueue,
  disaggregation/prefill.py).
- A step checks the token before the drafted ones with them. N-grams are drafted in trees of 10 branches
  (speculative_ngram_max_bfs_breadth).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any

from kvcalc.engines.prefixes import PLAIN, Matching, Prefixes, in_use, refuse_encoder_decoder
from kvcalc.engines.reuse import OF_HIDDEN_STATES, TIERS, Reuse, is_latent
from kvcalc.engines.rounding import round_up
from kvcalc.engines.sglang.pools import pools_of
from kvcalc.engines.sglang.states import DRAFTING_REQUESTS
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.sharding import whole_of
from kvcalc.model.drafting import Speculation
from kvcalc.model.spec import ModelSpec, has_states
from kvcalc.notes import Note
from kvcalc.releases import Release

if TYPE_CHECKING:
    from kvcalc.engines.sglang.engine import Sglang


class SglangReuse(Reuse):
    """SGLang's tiers, drafts and prefixes."""

    tiers = TIERS
    keeps_one_copy = True
    copies_at_once = True
    draft_option = "speculative-num-draft-tokens"
    checked_more = 1
    ngram_settings: Mapping[str, str] = {"speculative-eagle-topk": "10"}
    drafts_with_dflash = True

    def tier_copies(self, spec: ModelSpec, share: ModelSpec, ranks: int) -> int:
        copies = super().tier_copies(spec, share, ranks)
        if copies > 1 and is_latent(spec):
            raise ModelError(
                f"{spec.name}: --offload with drafts that are not MLA is not modelled for SGLang on several devices",
                "leave --speculative out",
            )
        return copies

    def check_drafts(self, speculation: Speculation, spec: ModelSpec, settings: Mapping[str, Any]) -> None:
        if settings.get("attn-cp-size", "1") != "1":
            raise UsageError(f"--speculative {speculation}: not modelled with --attn-cp-size", "leave one of them out")

    def draft_notes(self, settings: Mapping[str, str]) -> tuple[Note, ...]:
        if "max-running-requests" in settings:
            return ()
        text = f"SGLang runs at most {DRAFTING_REQUESTS} requests if it drafts (set --max-running-requests)"
        return (Note("speculative", "running-limit", text),)

    def matching(self, speculation: Speculation, spec: ModelSpec, release: Release | None, moved: str) -> Matching:
        return Matching(1) if speculation.method in OF_HIDDEN_STATES and not has_states(spec) else PLAIN


# SGLang's radix tree: which tokens requests share, and which must stay for a later request.
# Source, SGLang 0.5.23: RadixKey.page_aligned (srt/mem_cache/radix_cache.py), create_match_validator of SWAComponent
# and MambaComponent (unified_cache/components), mamba_cache_chunk_size (srt/arg_groups/overrides.py).
# - Whole pages are found; a page is one token by default.
# - A prefix is found up to a node whose last `window` tokens are in the window's pool.
# - With recurrent states it is found up to a kept state, which is copied for the request. States are kept at multiples
#   of the model's mamba_chunk_size, else of 64 tokens (FLA_CHUNK_SIZE), or of a page if that is larger.

_STATE_TOKENS = 64


class SglangPrefixes(Prefixes):
    """The pools of one device's share."""

    def __init__(self, engine: Sglang, share: ModelSpec, dtype: Dtype) -> None:
        refuse_encoder_decoder(share, "SGLang")
        self._engine, self._share, self._dtype = engine, share, dtype
        self._pools, self._whole = pools_of(share, dtype), pools_of(whole_of(share), dtype)
        self.block_tokens, self.unit_bytes = engine.page, engine.page * self._pools.full
        if self._whole.state:
            stated = engine.spec.stated.get("mamba_chunk_size")
            chunk = stated if isinstance(stated, int) else _STATE_TOKENS
            self.block_tokens = max(chunk, engine.page)

    def batch_bytes(self, shared: int, tokens: int, batch: int) -> int:
        needed = round_up(tokens, self._engine.page)
        windows = in_use(self._window(tokens), needed - shared, self._window(shared))
        full = shared + batch * (needed - shared)
        pools = self._engine.sized_pools(self._whole, full, windows.shared + batch * windows.own)
        return self._engine.rows_bytes(self._share, self._dtype, tokens, batch, *pools)

    def kept_bytes(self, tokens: int, after: int = 0) -> int:
        pools, rows = self._pools, tokens - after
        if rows <= 0:
            return 0
        return rows * pools.full + min(self._window(tokens), rows) * pools.window + pools.state

    def idle_bytes(self, shared: int, tokens: int, count: int) -> int:
        private = tokens - shared
        full, windows = shared + count * private, self._window(shared) + count * min(self._window(tokens), private)
        pools = self._engine.sized_pools(self._whole, full, windows)
        return self._engine.rows_bytes(self._share, self._dtype, tokens, count, *pools)

    def tier_bytes(self, tokens: int, after: int = 0) -> int:
        """HiCache divides its memory among the pools like the device's (_split_hicache_size, hybrid_pool_assembler.py).

        So the memory must be large enough for the pool that is full first.
        """
        pools, ratio = self._whole, self._engine.ratio
        if pools.state:
            raise ModelError(
                f"{self._share.name}: how HiCache divides its memory between tokens and states depends on the server",
                "leave --offload out",
            )
        kept = max(tokens - after, 0)
        window = min(self._window(tokens), kept)
        if not pools.window:
            return kept * self._pools.full
        if not pools.full:
            return window * self._pools.window
        rows = max(kept, ceil(window / ratio))
        return ceil(rows * (self._pools.full + ratio * self._pools.window))

    def sent_bytes(self, tokens: int) -> int:
        return self.kept_bytes(round_up(tokens, self._engine.page))

    def _window(self, tokens: int) -> int:
        """The tokens in the window's pool of a context. 0 if there is no such pool."""
        return round_up(min(tokens, self._whole.widest_window), self._engine.page)
