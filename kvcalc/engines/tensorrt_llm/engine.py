"""TensorRT-LLM: one pool of blocks with rows for every layer, or one pool per window. MLA keeps one row for K and V.

Source: KVCacheManager, tensorrt_llm/_torch/pyexecutor/resource_manager.py at commit 001541bad83b. A windowed layer
takes as many blocks as any other layer, because blocks are allocated one after another (BlockManager,
kvCacheManager.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.engines.account import BlockPool, Line, PoolFigures, PoolLimit, lines_of
from kvcalc.engines.checkpoint import quantized_cache
from kvcalc.engines.declarations import unread_types
from kvcalc.engines.engine import Engine, Resolved, not_established
from kvcalc.engines.place import ANYWHERE, Place
from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.engines.tensorrt_llm.settings import STEP_TOKENS, Settings, parse_settings
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.memory.dtypes import Dtype, bytes_of, parse_weight_dtype
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.memory.sharding import longer_first
from kvcalc.model.caches import SELF_ATTENTION_CACHES, Cache, IndexerKeys, LatentAttention
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, all_caches, distinct_caches, latent_of, windows
from kvcalc.notes import Note
from kvcalc.releases import Release

if TYPE_CHECKING:
    from kvcalc.engines.prefixes import Prefixes

_DTYPES = ("fp32", "fp16", "bf16", "fp8", "nvfp4")
_WITH_FP8_CACHE = ("fp8", "nvfp4")

# Types for which the pool has a number of KV heads per layer. It is 0 if a layer has no attention, or a linear map in
# its place (NemotronNASModel, tensorrt_llm/_torch/models/modeling_nemotron_nas.py; num_kv_heads_per_layer of
# KVCacheManager).
_HEADS_BY_LAYER = ("nemotron-nas",)

_WITHOUT_CLASS = ("gemma3n_text",)


class TensorrtLlm(Engine):
    """Counts one pool for all layers. A sequence takes whole blocks, also in windowed layers.

    Raises ModelError (exit 3) for models whose layout is not modelled, and UsageError (exit 2) for options and dtypes
    that TensorRT-LLM does not support.
    """

    name = "tensorrt-llm"
    unread = unread_types("tensorrt-llm")
    _default_running: int = 2048
    has_pools = False  # whether the memory is divided among several pools, as requests of --avg-seq-len need it

    def __init__(self, spec: ModelSpec, settings: Mapping[str, str], stages: int, release: str | None) -> None:
        super().__init__(spec, settings, stages, release)
        self.chosen = parse_settings(settings)
        self.block = self.chosen.tokens_per_block
        self.settings = self.chosen._asdict()
        self.check_model()
        if windows(spec):
            text = "allocates whole blocks for windows too; --max-attention-window splits the memory by window"
            self.notes = (Note("engine", "whole-windows", f"TensorRT-LLM {text}"),)
        if self.chosen.avg_seq_len is not None and not self.has_pools:
            text = f"--avg-seq-len changes nothing: TensorRT-LLM has one pool for {spec.name} in this release"
            self.notes = (*self.notes, Note("engine", "one-pool", text))

    def check_model(self) -> None:
        """Raise ModelError (exit 3) or UsageError (exit 2) if the layout of the model is not modelled."""
        _refuse(self.spec)
        if self._has_window_pools and latent_of(self.spec) is not None:
            raise UsageError("--max-attention-window: MLA has one pool", "give one window, or leave it out")

    @classmethod
    def prompt_settings(
        cls, settings: Mapping[str, str], prompt_tokens: int, is_complete: bool = False
    ) -> Mapping[str, str]:
        """A prompt that is not divided must fit into a step, in a busy server beside the tokens of other requests.

        Source: test_max_num_token_check (tests/unittest/llmapi/test_llm.py).
        """
        chosen = parse_settings(settings)
        given = chosen.step_tokens if is_complete else chosen.max_num_tokens
        if chosen.enable_chunked_prefill or (given is not None and prompt_tokens <= given):
            return settings
        if given is not None:
            raise LayoutError(
                f"--max-num-tokens {given}: TensorRT-LLM refuses prompts of {prompt_tokens:,} tokens, because it "
                "does not divide them",
                f"--max-num-tokens {prompt_tokens}, or --enable-chunked-prefill",
            )
        needed = prompt_tokens + (chosen.max_batch_size or cls._default_running)
        return {**settings, "max-num-tokens": str(needed)} if needed > STEP_TOKENS else settings

    @property
    def _has_window_pools(self) -> bool:
        return len(set(self.chosen.max_attention_window or ())) > 1

    @staticmethod
    def context_limits(spec: ModelSpec, release: Release | None) -> tuple[int | None, int | None]:
        return spec.longest_context, spec.longest_context

    @staticmethod
    def cut(num_layers: int, stages: int) -> list[int]:
        """Remaining layers go to the first ranks, one each (Mapping.pp_layers, tensorrt_llm/mapping.py)."""
        return longer_first(num_layers, stages)

    @staticmethod
    def kv_dtype(
        spec: ModelSpec, dtype_name: str, settings: Mapping[str, str], dtype: str | None, place: Place = ANYWHERE
    ) -> Resolved:
        """`auto` follows a checkpoint quantized by modelopt: the engine reads its kv_cache_quant_algo (quant_mode).

        Checkpoints from modelopt's fp8 and nvfp4 recipes name fp8. So `auto` is also fp8 if such weights are requested
        (TensorRT-LLM 1.0, performance overview).
        """
        if dtype_name.casefold() != "auto":
            return dtype_name, None
        published = quantized_cache(spec.quantization, ("modelopt",))
        if published:
            return published[0], f"the checkpoint's {published[1]} is {published[0]}"
        weights = parse_weight_dtype(dtype)
        if weights is not None and weights.name in _WITH_FP8_CACHE:
            return "fp8", f"modelopt's {weights.name} checkpoints use an fp8 cache"
        return dtype_name, None

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        return round_up(tokens, self.block) * row_bytes(cache, dtype)

    def entry_sizes(self, cache: Cache, dtype: Dtype) -> tuple[int, ...]:
        return (row_bytes(cache, dtype),)

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        if self._has_window_pools and dtype.name == "nvfp4":
            raise UsageError("--max-attention-window: window pools are not modelled for nvfp4", "give one window")
        return batch * round_up(tokens, self.block) * token_bytes(share, dtype)

    def prefixes(self, share: ModelSpec, dtype: Dtype, whole: bool = False) -> Prefixes:
        if self.chosen.max_attention_window is not None:
            raise ModelError("tensorrt-llm: reused blocks of several windows (--max-attention-window) are not modelled")
        from kvcalc.engines.prefixes import BlockPrefixes

        return BlockPrefixes(self.block, token_bytes(share, dtype))

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return self.block

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> PoolFigures:
        each = token_bytes(share, dtype)
        pools = _window_pools(share, dtype, self.chosen, tokens, memory)
        counts = [pool["num_gpu_blocks"] for pool in pools] or [_fitting_blocks(self.chosen, each, memory)]
        figures = BlockPool(self.block, self.block * each, self.held_bytes(share, dtype, tokens, 1))
        if None not in counts:
            fitting = min(counts)
            figures = BlockPool(*figures[:3], fitting, fitting * self.block, fitting / ceil_div(tokens, self.block))
        return PoolFigures(figures, {"window_pools": pools or None})

    def pool_limit(self, share: ModelSpec, dtype: Dtype) -> PoolLimit | None:
        if self.chosen.max_tokens is None or self.has_pools or self._has_window_pools:
            return None
        tokens = self.chosen.max_tokens // self.block * self.block
        return PoolLimit("max-tokens", tokens * token_bytes(share, dtype))

    def lookahead_tokens(self, num_tokens: int, *, is_longest: bool, by_ngrams: bool) -> int:
        """A step is prepared while the last one runs, so requests may grow by the drafted tokens of both.

        One less for layers or a model that draft in the same engine (max_seq_len in create_py_executor,
        py_executor_creator.py; get_num_extra_kv_tokens, _torch/speculative/utils.py).
        """
        return 2 * num_tokens if by_ngrams else 3 * num_tokens - 1

    def lines(self, share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line]:
        sizes = dict.fromkeys(("stored", "windows kept whole", "different layout or dtype"), 0)
        for cache, num_layers in distinct_caches(share):
            held = num_layers * stored_cache_bytes(cache, tokens, dtype)
            beside = "different layout or dtype" if cache.window is None else "windows kept whole"
            sizes["stored"] += held
            sizes[beside] += num_layers * tokens * row_bytes(cache, dtype) - held
        return lines_of({**sizes, "blocks rounded up": self.held_bytes(share, dtype, tokens, 1) - sum(sizes.values())})


def _refuse(spec: ModelSpec) -> None:
    """Raise ModelError for a model that does not fit into the pool.

    KVCacheManager's pool has one head_dim, one row for MLA, and one indexer per layer. A head_dim per layer needs
    KVCacheManagerV2, which TensorRT-LLM takes for Gemma 4 (`tensorrt_llm_groups`).
    """
    if spec.model_type in _WITHOUT_CLASS:
        raise ModelError(f"{spec.name}: TensorRT-LLM has no class for {spec.model_type} (_torch/models)")
    caches = all_caches(spec)
    rows = {(c.k_head_dim, c.v_head_dim) for c in caches if isinstance(c, SELF_ATTENTION_CACHES)}
    if len(rows) > 1:
        raise not_established(spec, "TensorRT-LLM", "head dims that differ between layers (KVCacheManagerV2)")
    has_latent = latent_of(spec) is not None
    if not caches or (spec.model_type not in _HEADS_BY_LAYER and any(not group.caches for group in spec.layers)):
        raise not_established(spec, "TensorRT-LLM", "layers without a cache")
    for cache in caches:
        if not isinstance(cache, (*SELF_ATTENTION_CACHES, LatentAttention, IndexerKeys)):
            raise not_established(spec, "TensorRT-LLM", cache.kind)
    if any(k != v for k, v in rows) or (rows and has_latent):
        raise ModelError(f"{spec.name}: TensorRT-LLM has one head_dim for K and V of all layers; the model has several")
    indexed = [any(isinstance(cache, IndexerKeys) for cache in group.caches) for group in spec.layers]
    if any(indexed) and not (all(indexed) and has_latent):
        raise not_established(spec, "TensorRT-LLM", "indexers in some layers")


def row_bytes(cache: Cache, dtype: Dtype) -> int:
    """Bytes of one token in one layer. nvfp4 has 4 bits per element and an fp8 scale per 16 elements.

    An indexer's key is always in fp8, with an fp32 scale per 128 elements.
    """
    if dtype.name not in _DTYPES:
        raise UsageError(f"--kv-dtype {dtype.name}: not a cache dtype of TensorRT-LLM", f"one of {', '.join(_DTYPES)}")
    if isinstance(cache, IndexerKeys):
        return cache.head_dim + cache.head_dim // 128 * 4
    return bytes_of(sum(cache.token_rows()), dtype)


def cache_buffers(cache: Cache, dtype: Dtype) -> list[int]:
    """The bytes of one token in each buffer of a layer: K, V, and with nvfp4 the scales of each."""
    if dtype.name == "nvfp4":
        return [size for row in cache.token_rows() for size in (row // 2, row // 16)]
    return [bytes_of(row, dtype) for row in cache.token_rows()]


def quota_of(settings: Settings, memory: int | None, of_tokens: int | None) -> int | None:
    """The bytes that KVCacheManagerV2 may take of `memory`, or for --max-tokens. None if neither is known.

    As in `_fitting_blocks`, the smaller of the two decides only if a fraction of the memory is given too.
    """
    fraction = settings.free_gpu_memory_fraction
    if memory is None or (of_tokens is not None and fraction is None):
        return of_tokens
    offered = int(memory * (fraction or 1))
    return offered if of_tokens is None else min(offered, of_tokens)


@remembered
def token_bytes(spec: ModelSpec, dtype: Dtype) -> int:
    """Bytes of one token in all layers."""
    return sum(group.num_layers * row_bytes(cache, dtype) for group in spec.layers for cache in group.caches)


def _fitting_blocks(settings: Settings, token_bytes: int, memory_bytes: int | None) -> int | None:
    """The number of blocks that fit (calculate_max_num_blocks).

    Without a fraction, the cache takes all of the memory. A given fraction applies to the memory that is free after the
    weights are loaded. If only --max-tokens is given, it decides. With a fraction, the smaller of the two decides.
    """
    tokens: float | None = settings.max_tokens
    fraction = settings.free_gpu_memory_fraction
    if memory_bytes is not None and (tokens is None or fraction is not None):
        fitting = memory_bytes // token_bytes if fraction is None else fraction * memory_bytes / token_bytes
        tokens = fitting if tokens is None else min(tokens, fitting)
    return None if tokens is None else int(tokens // settings.tokens_per_block)


def _window_pools(
    spec: ModelSpec, dtype: Dtype, settings: Settings, tokens: int, memory_bytes: int | None
) -> list[dict[str, Any]]:
    """The pool of every window, smallest first. Empty if all layers have the same window.

    Source: calculate_max_num_blocks_for_vswa. The pools share the memory equally, regardless of their layers, and
    max_tokens is ignored. Windows are limited to the context. Each pipeline stage restarts the pattern (local_layer_idx
    of _get_window_size_to_layers). Blocks are None if the memory is not known, or does not hold one sequence. In that
    case TensorRT-LLM makes the windows smaller.
    """
    pattern = [min(window, tokens) for window in settings.max_attention_window or (tokens,)]
    if len(set(pattern)) == 1:
        return []
    rows: dict[int, list[int]] = {}
    for group in spec.layers:
        for number in range(group.first, group.last + 1):
            row = sum(row_bytes(cache, dtype) for cache in group.caches)
            rows.setdefault(pattern[(number - spec.layers[0].first) % len(pattern)], []).append(row)
    block, fraction = settings.tokens_per_block, settings.free_gpu_memory_fraction
    memory = int(memory_bytes * (fraction or 1)) if memory_bytes is not None else 0
    holds_one = sum(window * sum(layers) for window, layers in rows.items()) < memory
    return [
        {
            "window": window,
            "num_layers": len(rows[window]),
            "bytes_per_block": block * sum(rows[window]),
            "num_gpu_blocks": int(memory * (1.0 / len(rows)) / sum(rows[window]) // block) if holds_one else None,
        }
        for window in sorted(rows)
    ]
