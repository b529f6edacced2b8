"""TensorRT-LLM's tiers of memory, and its drafts.

- A tier keeps blocks of the device's pool; host_cache_size and disk_cache_size are for each device
  (llmapi/llm_args.py). A block moves there when it is evicted (secondary blocks, kvCacheManager.h).
- A layer that drafts reads the tokens after a position: one with EAGLE and MTP, or as many as are drafted if several
  MTP modules follow each other (draft_prompt_lookahead, _torch/speculative/interface.py). So many tokens at the end of
  a match are not used (reuse_match_backoff, runtime/kv_cache_manager_v2/_config.py), and the cache of the drafts keeps
  the same prefix (NVIDIA/TensorRT-LLM#18093). N-grams change nothing. What a draft model or DFlash reads is not
  established.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.engines.drafted_prefixes import PLAIN, Matching
from kvcalc.engines.reuse import CPU, DISK, Reuse
from kvcalc.errors import UsageError
from kvcalc.model.drafting import EAGLE, MTP, NGRAM, Speculation
from kvcalc.model.spec import ModelSpec, has_states
from kvcalc.releases import Release

_REUSES_DRAFTS = Release.of(1, 3)._replace(phase=-1, of_phase=28)


class TensorrtLlmReuse(Reuse):
    """TensorRT-LLM's tiers, drafts and prefixes."""

    tiers = (CPU, DISK)
    drafts_with_dflash = True

    def check_drafts(self, asked: Speculation, spec: ModelSpec, settings: Mapping[str, Any]) -> None:
        if has_states(spec):
            raise UsageError(
                f"--speculative {asked}: the states of drafts are not modelled for {spec.name} in tensorrt-llm",
                "leave --speculative out, or use --engine vllm or sglang",
            )

    def matching(self, asked: Speculation, spec: ModelSpec, release: Release | None, moved: str) -> Matching:
        if moved:
            raise UsageError(f"{moved}: what tensorrt-llm moves of drafts is not modelled", "leave --speculative out")
        if asked.method == NGRAM:
            return PLAIN
        if asked.method not in (MTP, EAGLE):
            return super().matching(asked, spec, release, moved)
        if release is not None and release < _REUSES_DRAFTS:
            raise UsageError(
                f"--speculative {asked}: TensorRT-LLM finds no prefixes of the layers that draft before 1.3.0rc28",
                "use --engine tensorrt-llm@1.3.0rc28 or newer, or leave --speculative out",
            )
        return Matching(min(spec.num_draft_layers or 1, asked.num_tokens) if asked.method == MTP else 1)
