"""SGLang's radix tree: which tokens requests share, and which must stay for a later request.

Source, SGLang 0.5.23: RadixKey.page_aligned (srt/mem_cache/radix_cache.py), create_match_validator of SWAComponent and
MambaComponent (unified_cache/components), mamba_cache_chunk_size (srt/arg_groups/overrides.py).

- Whole pages are found; a page is one token by default.
- A prefix is found up to a node whose last `window` tokens are in the window's pool.
- With recurrent states it is found up to a kept state, which is copied for the request. States are kept at multiples of
  the model's mamba_chunk_size, else of 64 tokens (FLA_CHUNK_SIZE), or of a page if that is larger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines.prefixes import Prefixes, in_use, refuse_encoder_decoder
from kvcalc.memory.engines.rounding import round_up
from kvcalc.memory.engines.sglang import _pools
from kvcalc.memory.sharding import whole_of
from kvcalc.model.spec import ModelSpec

if TYPE_CHECKING:
    from kvcalc.memory.engines.sglang import Sglang

_STATE_TOKENS = 64


class SglangPrefixes(Prefixes):
    """The pools of one device's share."""

    def __init__(self, engine: Sglang, share: ModelSpec, dtype: Dtype) -> None:
        refuse_encoder_decoder(share, "SGLang")
        self._engine, self._share, self._dtype = engine, share, dtype
        self._pools, self._whole = _pools(share, dtype), _pools(whole_of(share), dtype)
        self.block_tokens = engine.page
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

    def kept_bytes(self, tokens: int) -> int:
        pools = self._pools
        return tokens * pools.full + self._window(tokens) * pools.window + (pools.state if tokens else 0)

    def sent_bytes(self, tokens: int) -> int:
        return self.kept_bytes(round_up(tokens, self._engine.page))

    def _window(self, tokens: int) -> int:
        """The tokens in the window's pool of a context. 0 if there is no such pool."""
        return round_up(min(tokens, self._whole.widest_window), self._engine.page)
