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

from collections.abc import Callable, Mapping
from typing import Any

from kvcalc.engines.prefixes import PLAIN, Matching, Prefixes, in_use
from kvcalc.engines.reuse import CPU, DISK, Reuse
from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.engines.tensorrt_llm.pools import Layout, Sequences, blocks_of, most_blocks
from kvcalc.errors import UsageError
from kvcalc.model.drafting import EAGLE, MTP, NGRAM, Speculation
from kvcalc.model.spec import ModelSpec, has_states
from kvcalc.releases import Release

_REUSES_DRAFTS = Release.of(1, 3)._replace(phase=-1, of_phase=28)


class TensorrtLlmReuse(Reuse):
    """TensorRT-LLM's tiers, drafts and prefixes."""

    tiers = (CPU, DISK)
    drafts_with_dflash = True

    def check_drafts(self, speculation: Speculation, spec: ModelSpec, settings: Mapping[str, Any]) -> None:
        if has_states(spec):
            raise UsageError(
                f"--speculative {speculation}: the states of drafts are not modelled for {spec.name} in tensorrt-llm",
                "leave --speculative out, or use --engine vllm or sglang",
            )

    def matching(self, speculation: Speculation, spec: ModelSpec, release: Release | None, moved: str) -> Matching:
        if moved:
            raise UsageError(f"{moved}: what tensorrt-llm moves of drafts is not modelled", "leave --speculative out")
        if speculation.method == NGRAM:
            return PLAIN
        if speculation.method not in (MTP, EAGLE):
            return super().matching(speculation, spec, release, moved)
        if release is not None and release < _REUSES_DRAFTS:
            raise UsageError(
                f"--speculative {speculation}: TensorRT-LLM finds no prefixes of the layers "
                "that draft before 1.3.0rc28",
                "use --engine tensorrt-llm@1.3.0rc28 or newer, or leave --speculative out",
            )
        return Matching(min(spec.num_draft_layers or 1, speculation.num_tokens) if speculation.method == MTP else 1)


# Prefixes in the pools of TensorRT-LLM's KVCacheManagerV2: all blocks, but of a window only those in it.

_LONGEST = 1 << 80  # longer than every window


class GroupPrefixes(Prefixes):
    """The blocks of layers with the same window. A prefix is found if the blocks of its last window are still there.

    Blocks that a request's window has left stay in the cache until their memory is needed (block_reuse_config.policy
    all_reusable, llmapi/llm_args.py). `layout` gives the pools for the length of the longest request.
    """

    def __init__(self, layout: Callable[[int], Layout], block: int) -> None:
        self._layout, self._kinds, self.block_tokens = layout, layout(_LONGEST).kinds, block
        self.unit_bytes = self.block_tokens * sum(sum(kind.token_bytes) for kind in self._kinds)

    def batch_bytes(self, shared: int, tokens: int, batch: int) -> int:
        block, slots = self.block_tokens, dict[int | None, int]()
        layout = self._layout(tokens)
        after = ceil_div(tokens, block) - shared // block
        for window in {kind.window for kind in self._kinds} - {None}:
            blocks = in_use(most_blocks(window, tokens, block), after, self._kept(window, shared))
            slots[window] = blocks.shared + (batch - 1) * blocks.own + after
        # A window that is no shorter than the requests keeps what the other layers keep.
        whole = shared // block + batch * after
        groups = layout.division.groups
        return layout.division.smallest([sum(slots[w] if w else whole for w in group.windows) for group in groups])

    def kept_bytes(self, tokens: int, after: int = 0) -> int:
        blocks = (tokens - after) // self.block_tokens
        return self.block_tokens * sum(
            min(blocks, self._kept(kind.window, tokens)) * sum(kind.token_bytes) for kind in self._kinds
        )

    def sent_bytes(self, tokens: int) -> int:
        return self.kept_bytes(round_up(tokens, self.block_tokens))

    def _kept(self, window: int | None, tokens: int) -> int:
        """The blocks of the first `tokens` tokens that the next token reads."""
        return blocks_of(window, Sequences(tokens, tokens), self.block_tokens)
