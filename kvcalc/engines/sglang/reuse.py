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
from typing import Any

from kvcalc.engines.drafted_prefixes import PLAIN, Matching
from kvcalc.engines.reuse import OF_HIDDEN_STATES, TIERS, Reuse, is_latent
from kvcalc.engines.sglang.profile import DRAFTING_REQUESTS
from kvcalc.errors import ModelError, UsageError
from kvcalc.model.drafting import Speculation
from kvcalc.model.spec import ModelSpec, has_states
from kvcalc.notes import Note
from kvcalc.releases import Release


class SglangReuse(Reuse):
    """SGLang's tiers, drafts and prefixes."""

    tiers = TIERS
    takes_lmcache = True
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
                f"{spec.name}: --offload with drafts that are no MLA is not modelled for SGLang on several devices",
                "leave --speculative out",
            )
        return copies

    def check_drafts(self, asked: Speculation, spec: ModelSpec, settings: Mapping[str, Any]) -> None:
        if settings.get("attn-cp-size", "1") != "1":
            raise UsageError(f"--speculative {asked}: not modelled with --attn-cp-size", "leave one of them out")

    def draft_notes(self, settings: Mapping[str, str]) -> tuple[Note, ...]:
        if "max-running-requests" in settings:
            return ()
        text = f"SGLang runs at most {DRAFTING_REQUESTS} requests if it drafts (set --max-running-requests)"
        return (Note("speculative", "running-limit", text),)

    def matching(self, asked: Speculation, spec: ModelSpec, release: Release | None, moved: str) -> Matching:
        return Matching(1) if asked.method in OF_HIDDEN_STATES and not has_states(spec) else PLAIN
