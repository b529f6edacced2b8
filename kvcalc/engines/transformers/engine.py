"""Hugging Face Transformers: the bytes of the tensors in `past_key_values`.

Source: cache_utils.py of Transformers 5.24.0, and tensor sizes counted on the meta device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcalc.engines.reserve import Reserve, ReserveInputs

from collections.abc import Mapping
from functools import partial

from kvcalc.engines.account import PoolFigures
from kvcalc.engines.engine import Engine
from kvcalc.engines.options import SettingsReader
from kvcalc.errors import ModelError
from kvcalc.memory.dtypes import DTYPES, Dtype
from kvcalc.memory.kv_cache import sequence_bytes, state_bytes, stored_cache_bytes
from kvcalc.model.caches import (
    HEADS_CACHES,
    Cache,
    CompressedAttention,
    CrossAttention,
    FullAttention,
    IndexerKeys,
    RecurrentState,
)
from kvcalc.model.spec import ModelSpec, all_caches, windows

# Types whose convolutions keep the inputs before the current one, and not also the current one.
_EARLIER_INPUTS = ("rwkv", "zaya")
_COUNTED_INDEXERS = ("minimax_m3_vl_text",)
_COUNTER_BYTES = 8
_POSITION_BYTES = 3 * 8


class Transformers(Engine):
    """Counts a dynamic (the default) or static cache, as `settings["cache"]` says.

    - A windowed layer of a dynamic cache keeps the last window - 1 tokens; the next token's own row completes the
      window (DynamicSlidingWindowLayer.update). A static layer allocates the whole window (StaticSlidingWindowLayer).
    - Falcon's new architecture repeats K and V for all query heads before the cache (FalconAttention._split_heads).
    - GPT-Neo's local layers keep all tokens and mask them (GPTNeoSelfAttention).
    - Chunked attention is stored as a window with the chunk's length.
    - A convolution keeps its inputs for the whole kernel, including the current one (LinearAttentionLayer). RWKV shifts
      by one token and keeps one (RwkvModel).
    - The window of compressed attention also keeps one token less. DeepSeek-V4's layers with only a window keep two
      copies of the tensor that serves as both K and V.
    - After a prefill, a windowed layer keeps a view. Until the next token, the storage of the whole prefill stays
      allocated (`storage_bytes`).
    - The index keys of Dots3-Note are in fp32. Qwen4-Exp's indexers also keep three positions of 64 bits per token,
      once for all layers (Qwen4ExpTextModel). CPM-Ant's cache begins with its learned prompt.
    - ZAYA's convolutions keep only the inputs before the current one.
    - A static indexer of MiniMax-M3 has a counter of 64 bits besides its keys, once for the batch
      (MiniMaxM3VLSparseStaticCacheLayer), and so has xLSTM's cache. The counters of other layers are single numbers.
    - MLA is stored as the latent and the rotary key, like in the formula.

    A static cache has the length of the context. Raises ModelError (exit 3) for a dynamic window of 1 token, whose
    slice from minus zero keeps all tokens, and for caches that Transformers does not have. Raises UsageError (exit 2)
    for an unknown kind of cache.
    """

    name = "transformers"

    def __init__(self, spec: ModelSpec, settings: Mapping[str, str], stages: int, release: str | None) -> None:
        super().__init__(spec, settings, stages, release)
        kind = SettingsReader("transformers", settings).choice("cache", "a kind of cache")
        self.is_dynamic = kind == "dynamic"
        self.settings = {"cache": kind}
        if self.is_dynamic and 1 in windows(spec):
            raise ModelError(f"{spec.name}: Transformers' cache with a window of 1 token is not modelled")
        if not spec.in_transformers:
            raise ModelError(
                f"{spec.name}: Transformers {self.version} has no class that reads a {spec.model_type} config like "
                "this one",
                "count with --engine logical",
            )
        _refuse_unheld(spec, kind)

    def reserve(self, question: ReserveInputs) -> Reserve:
        """`generate` prefills all sequences at once.

        It computes only the last token's logits (logits_to_keep = 1), and also holds them in fp32. The only reserve is
        a CUDA context with cuBLAS and PyTorch's rounding of blocks: 0.4 to 0.6 GiB on A100 and H100.
        """
        from kvcalc.engines.reserve import ACTIVATION, Held, Reserve

        batch = question.batch_size
        layers = question.step_activations(batch * question.context_tokens)
        logits = batch * question.width.vocab_size * (2 + 4)
        held = [Held(ACTIVATION, "prefill activations", layers + logits), *question.driver(512)]
        return Reserve(held, {}, varies=True)

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype, in_view: bool = True) -> int:
        """Bytes one sequence takes in one layer's cache.

        With `in_view`, a windowed layer counts only its window, not the prefill of which it is a view.
        """
        model_type = self.spec.model_type
        if isinstance(cache, RecurrentState):
            return state_bytes(cache, cache.conv_kernel - (model_type in _EARLIER_INPUTS), dtype)
        if isinstance(cache, IndexerKeys):
            dtype = self._index_dtype(dtype)
            counter = _COUNTER_BYTES if model_type in _COUNTED_INDEXERS and not self.is_dynamic else 0
            return stored_cache_bytes(cache, tokens, dtype) + counter
        if model_type == "cpmant":
            prompt = self.spec.stated.get("prompt_length")
            tokens += prompt if isinstance(prompt, int) else 0
        if isinstance(cache, CompressedAttention):
            held = stored_cache_bytes(cache._replace(window=cache.window - 1), tokens, dtype)
            return held if cache.compress_rate else 2 * held
        is_whole = model_type == "gpt_neo" or (self.is_dynamic and not in_view)
        if is_whole and cache.window is not None and isinstance(cache, HEADS_CACHES):
            cache = FullAttention(cache.num_kv_heads, cache.k_head_dim, cache.v_head_dim)
        if self.is_dynamic and in_view and cache.window is not None:
            tokens = min(tokens, cache.window - 1)
        return stored_cache_bytes(self._repeated(cache), tokens, dtype)

    def entry_sizes(self, cache: Cache, dtype: Dtype) -> tuple[int, ...]:
        if isinstance(cache, CompressedAttention) and not cache.compress_rate:
            row, *others = super().entry_sizes(cache, dtype)
            return (2 * row, *others)
        used = self._index_dtype(dtype) if isinstance(cache, IndexerKeys) else dtype
        return super().entry_sizes(self._repeated(cache), used)

    def _index_dtype(self, dtype: Dtype) -> Dtype:
        return DTYPES["fp32"] if self.spec.model_type == "dots3_note_text" else dtype

    def _repeated(self, cache: Cache) -> Cache:
        """The cache with the heads that the model keeps: Falcon repeats K and V."""
        if self.spec.model_type == "falcon" and isinstance(cache, FullAttention) and cache.num_kv_heads > 1:
            return cache._replace(num_kv_heads=self.spec.attention.num_heads)
        return cache

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        total = super().held_bytes(share, dtype, tokens, batch)
        model_type = self.spec.model_type
        if model_type == "qwen4_exp_text":
            total += batch * tokens * _POSITION_BYTES
        if model_type == "xlstm":
            total += _COUNTER_BYTES
        if model_type in _COUNTED_INDEXERS and not self.is_dynamic:
            indexers = (g.num_layers for g in share.layers if any(isinstance(c, IndexerKeys) for c in g.caches))
            total -= (batch - 1) * _COUNTER_BYTES * sum(indexers)
        return total

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> PoolFigures:
        if any(isinstance(cache, CompressedAttention) for cache in all_caches(share)):
            return PoolFigures(None, {"storage_bytes": None})  # views of views are not modelled
        count = partial(self.cache_bytes, in_view=False)
        return PoolFigures(None, {"storage_bytes": batch * sequence_bytes(share, dtype, tokens, count)})


def _refuse_unheld(spec: ModelSpec, kind: str) -> None:
    """Raise ModelError for a model that this kind of cache does not support, or that is not modelled."""
    if spec.model_type == "recurrent_gemma":
        raise ModelError(f"{spec.name}: Transformers keeps the states of recurrent_gemma outside its cache")
    if kind == "dynamic":
        return
    if spec.model_type in ("unlimited_ocr_text", "cpmant"):
        raise ModelError(f"{spec.name}: Transformers' static cache of {spec.model_type} is not modelled")
    for cache in all_caches(spec):
        if isinstance(cache, CompressedAttention) or (isinstance(cache, CrossAttention) and cache.encoder_tokens):
            raise ModelError(f"{spec.name}: Transformers' static cache of {spec.model_type} is not modelled")
