"""Prefixes in the pools of TensorRT-LLM's KVCacheManagerV2: all blocks, but of a window only those in it."""

from __future__ import annotations

from collections.abc import Callable

from kvcalc.engines.prefixes import InUse, Prefixes, in_use
from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.engines.tensorrt_llm.pools import Layout, Sequences, blocks_of, most_blocks

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
        for kind in self._kinds:
            needed = most_blocks(kind.window, tokens, block)
            found = InUse(shared // block, after)
            if kind.window is not None:
                found = in_use(needed, after, self._kept(kind.window, shared))
            slots[kind.window] = found.shared + (batch - 1) * found.own + after
        # A window that is no shorter than the requests keeps what the other layers keep.
        whole = shared // block + batch * after
        groups = layout.division.groups
        return layout.division.smallest([sum(slots[w] if w else whole for w in group.windows) for group in groups])

    def kept_bytes(self, tokens: int, after: int = 0) -> int:
        own = (tokens - after) // self.block_tokens
        return self.block_tokens * sum(
            min(own, self._kept(kind.window, tokens)) * sum(kind.token_bytes) for kind in self._kinds
        )

    def sent_bytes(self, tokens: int) -> int:
        return self.kept_bytes(round_up(tokens, self.block_tokens))

    def _kept(self, window: int | None, tokens: int) -> int:
        """The blocks of the first `tokens` tokens that the next token reads."""
        return blocks_of(window, Sequences(tokens, tokens), self.block_tokens)
