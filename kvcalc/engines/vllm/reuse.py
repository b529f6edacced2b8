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

from kvcalc.engines.drafted_prefixes import PLAIN, Matching
from kvcalc.engines.reuse import OF_HIDDEN_STATES, TIERS, Reuse
from kvcalc.errors import UsageError
from kvcalc.model.drafting import DFLASH, MTP, Speculation
from kvcalc.model.spec import ModelSpec, has_cross_attention, has_states, windows
from kvcalc.releases import Release

_LOOKS_AHEAD = Release.of(0, 33)


class VllmReuse(Reuse):
    """vLLM's tiers, drafts and prefixes."""

    tiers = TIERS
    takes_lmcache = True
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

    def check_drafts(self, asked: Speculation, spec: ModelSpec, settings: Mapping[str, Any]) -> None:
        """If prompts are divided, MTP layers of one module alone draft (PCPManager.validate_config, v1/worker/gpu)."""
        if "prefill-context-parallel-size" in settings and asked.method != MTP:
            raise UsageError(
                f"--speculative {asked}: vLLM does not draft so with --prefill-context-parallel-size",
                f"use --speculative mtp:{asked.num_tokens}",
            )

    def matching(self, asked: Speculation, spec: ModelSpec, release: Release | None, moved: str) -> Matching:
        is_older = release is not None and release < _LOOKS_AHEAD
        has_several = asked.method == MTP and min(spec.num_draft_layers or 1, asked.num_tokens) > 1
        if is_older or moved:
            drops = asked.method in OF_HIDDEN_STATES or (is_older and asked.method == DFLASH)
            if drops and (windows(spec) or has_states(spec)):
                # The block is dropped in the groups of the drafting layers, and the others follow.
                what = "this release" if is_older else "vLLM with another tier or instance"
                raise UsageError(
                    f"--speculative {asked}: which prefixes of {spec.name} {what} finds again is not modelled",
                    "use vLLM 0.33, or leave --speculative out" if is_older else "leave --speculative out",
                )
            return Matching(drops_block=drops, unsent_tokens=asked.num_tokens - 1 if has_several else 0)
        if has_several:
            return Matching(asked.num_tokens)
        return Matching(1) if asked.method in OF_HIDDEN_STATES else PLAIN
