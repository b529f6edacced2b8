"""TensorRT-LLM: a pool of blocks of every layer's rows, or one for each window; MLA keeps one row for K and V.

Source: KVCacheManager, tensorrt_llm/_torch/pyexecutor/resource_manager.py at commit 001541bad83b. A windowed layer
takes as many blocks as any other: they are allocated one after another (BlockManager, kvCacheManager.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import Dtype, bytes_of, parse_weight_dtype
from kvcalc.memory.engines import Engine, Line
from kvcalc.memory.engines.checkpoint import quantized_cache
from kvcalc.memory.engines.rounding import ceil_div
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.memory.sharding import longer_first
from kvcalc.model.caches import HEADS_CACHES, Cache, CrossAttention, IndexerKeys, LatentAttention
from kvcalc.model.spec import ModelSpec, all_caches, distinct_caches, windows
from kvcalc.notes import Note
from kvcalc.units import parse_count, parse_tokens

VERSION = "001541bad83b"
_DTYPES = ("fp32", "fp16", "bf16", "fp8", "nvfp4")
_WITH_FP8_CACHE = ("fp8", "nvfp4")

# Pipeline stages (Mapping.pp_layers, tensorrt_llm/mapping.py): if layers remain, the first ranks get one more each.
cut = longer_first

# The pool takes a number of KV heads for every layer, 0 where attention is left out or a linear map (NemotronNASModel,
# tensorrt_llm/_torch/models/modeling_nemotron_nas.py; num_kv_heads_per_layer of KVCacheManager).
_HEADS_BY_LAYER = ("nemotron-nas",)


class Settings(NamedTuple):
    """`max_tokens` and `free_gpu_memory_fraction` are None where they are not given: they make a difference then.

    `max_attention_window` is the windows of the layers in turn, again and again; None where there is one pool.
    """

    tokens_per_block: int = 32
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    max_attention_window: tuple[int, ...] | None = None

    def describe(self) -> dict[str, object]:
        """The settings used, by the names of their options."""
        windows = self.max_attention_window
        return {**self._asdict(), "max_attention_window": None if windows is None else list(windows)}


def kv_dtype(
    spec: ModelSpec, asked: str, given: Mapping[str, str], dtype: str | None
) -> tuple[str | Dtype, str | None]:
    """`auto` follows a checkpoint quantized by modelopt, whose kv_cache_quant_algo the engine reads (quant_mode). Those
    that modelopt's fp8 and nvfp4 recipes write say fp8, so that it is fp8 too where such weights are asked for
    (TensorRT-LLM 1.0, performance overview)."""
    if asked.casefold() != "auto":
        return asked, None
    found = quantized_cache(spec.quantization, ("modelopt",))
    if found:
        return found[0], f"the checkpoint's {found[1]} is {found[0]}"
    weights = parse_weight_dtype(dtype)
    if weights is not None and weights.name in _WITH_FP8_CACHE:
        return "fp8", f"modelopt's {weights.name} checkpoints carry an fp8 cache"
    return asked, None


def engine(spec: ModelSpec, given: Mapping[str, str]) -> Engine:
    """The accounting of one pool for all layers: a sequence takes whole blocks, in windowed layers too.

    Raises ModelError (exit 3) for models whose layout is not established, UsageError (exit 2) for options and dtypes it
    does not take.
    """
    settings = _parse(given)
    _refuse(spec)

    def blocks_of(tokens: int) -> int:
        return ceil_div(tokens, settings.tokens_per_block)

    def cache_bytes(cache: Cache, tokens: int, dtype: Dtype) -> int:
        return blocks_of(tokens) * settings.tokens_per_block * _row_bytes(cache, dtype)

    def sequence_bytes(share: ModelSpec, dtype: Dtype, tokens: int) -> int:
        return blocks_of(tokens) * settings.tokens_per_block * _token_bytes(share, dtype)

    def blocks(share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory_bytes: int | None) -> dict[str, Any]:
        token_bytes = _token_bytes(share, dtype)
        pools = _window_pools(share, dtype, settings, tokens, memory_bytes)
        if pools:
            counts = [pool["num_gpu_blocks"] for pool in pools]
            fitting = None if None in counts else min(counts)
        else:
            fitting = _fitting_blocks(settings, token_bytes, memory_bytes)
        return {
            "block_size": settings.tokens_per_block,
            "bytes_per_block": settings.tokens_per_block * token_bytes,
            "request_bytes": sequence_bytes(share, dtype, tokens),
            "num_gpu_blocks": fitting,
            "kv_cache_tokens": None if fitting is None else fitting * settings.tokens_per_block,
            "max_concurrency": None if fitting is None else fitting / blocks_of(tokens),
            "window_pools": pools or None,
        }

    def lines(share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line]:
        stored = whole = layout = 0
        for cache, num_layers in distinct_caches(share):
            held = num_layers * stored_cache_bytes(cache, tokens, dtype)
            needed = num_layers * tokens * _row_bytes(cache, dtype)
            stored += held
            if cache.window is None:
                layout += needed - held
            else:
                whole += needed - held
        rounding = sequence_bytes(share, dtype, tokens) - stored - whole - layout
        named = {
            "stored": stored, "windows kept whole": whole, "another layout or dtype": layout,
            "blocks rounded up": rounding,
        }  # fmt: skip
        return [Line(name, size) for name, size in named.items() if size]

    return Engine(
        "tensorrt-llm", VERSION, cache_bytes, settings.describe(), _notes(spec), sequence_bytes, blocks,
        lambda share, dtype: settings.tokens_per_block, lines,
    )  # fmt: skip


def _parse(given: Mapping[str, str]) -> Settings:
    plain = Settings()
    fraction = None
    if "free-gpu-memory-fraction" in given:
        text = given["free-gpu-memory-fraction"]
        try:
            fraction = float(text)
        except ValueError:
            fraction = 0.0
        if not 0 < fraction < 1:
            raise UsageError(f"--free-gpu-memory-fraction {text[:40]!a}: must be above 0 and below 1")
    return Settings(
        parse_count(given["tokens-per-block"], "--tokens-per-block") if "tokens-per-block" in given
        else plain.tokens_per_block,
        parse_count(given["max-tokens"], "--max-tokens") if "max-tokens" in given else None,
        fraction,
        _parse_windows(given["max-attention-window"]) if "max-attention-window" in given else None,
    )  # fmt: skip


def _parse_windows(text: str) -> tuple[int, ...]:
    return tuple(parse_tokens(part, "--max-attention-window") for part in text.split(","))


def _refuse(spec: ModelSpec) -> None:
    """Models the pool's one head_dim, one row for MLA or one indexer a layer do not describe."""
    caches = all_caches(spec)
    widths = {width for c in caches if isinstance(c, HEADS_CACHES) for width in (c.k_head_dim, c.v_head_dim)}
    has_latent = any(isinstance(cache, LatentAttention) for cache in caches)
    if not caches or (spec.model_type not in _HEADS_BY_LAYER and any(not group.caches for group in spec.layers)):
        raise ModelError(f"{spec.name}: TensorRT-LLM's layout of layers without a cache is not established")
    for cache in caches:
        if isinstance(cache, CrossAttention) or not isinstance(cache, (*HEADS_CACHES, LatentAttention, IndexerKeys)):
            kind = cache.kind.replace("_", " ")
            raise ModelError(f"{spec.name}: TensorRT-LLM's layout of {kind} is not established")
    if len(widths) > 1 or (widths and has_latent):
        raise ModelError(f"{spec.name}: TensorRT-LLM's pool has one head_dim for K and V of all layers, the model more")
    indexed = [any(isinstance(cache, IndexerKeys) for cache in group.caches) for group in spec.layers]
    if any(indexed) and not (all(indexed) and has_latent):
        raise ModelError(f"{spec.name}: TensorRT-LLM's layout of indexers in some layers is not established")


def _row_bytes(cache: Cache, dtype: Dtype) -> int:
    """One token in one layer. nvfp4 halves a byte's worth and keeps a scale in fp8 for each 16 elements.

    An indexer's key is in fp8 with a scale in fp32 for each 128, whatever the cache's dtype.
    """
    if dtype.name not in _DTYPES:
        raise UsageError(f"--kv-dtype {dtype.name}: not a cache dtype of TensorRT-LLM", f"one of {', '.join(_DTYPES)}")
    if isinstance(cache, IndexerKeys):
        return cache.head_dim + cache.head_dim // 128 * 4
    return bytes_of(sum(cache.token_rows()), dtype)


def _token_bytes(spec: ModelSpec, dtype: Dtype) -> int:
    return sum(group.num_layers * _row_bytes(cache, dtype) for group in spec.layers for cache in group.caches)


def _fitting_blocks(settings: Settings, token_bytes: int, memory_bytes: int | None) -> int | None:
    """calculate_max_num_blocks. Memory for the cache is taken whole; the fraction, where it is given, is of what is
    free after the weights are loaded. --max-tokens alone decides alone; with a fraction the smaller one does."""
    tokens: float | None = None
    if memory_bytes is not None:
        fraction = settings.free_gpu_memory_fraction
        tokens = memory_bytes // token_bytes if fraction is None else fraction * memory_bytes / token_bytes
    if settings.max_tokens is not None:
        both = tokens is not None and settings.free_gpu_memory_fraction is not None
        tokens = min(settings.max_tokens, tokens) if both and tokens is not None else settings.max_tokens
    return None if tokens is None else int(tokens // settings.tokens_per_block)


def _window_pools(
    spec: ModelSpec, dtype: Dtype, settings: Settings, tokens: int, memory_bytes: int | None
) -> list[dict[str, Any]]:
    """The pool of every window, smallest first; none where all layers have one (calculate_max_num_blocks_for_vswa).

    Pools share the memory equally, whatever their layers, and max_tokens plays no part. Windows are cut at the context.
    A pipeline stage begins the pattern anew (local_layer_idx of _get_window_size_to_layers).
    Blocks are None without memory, and where it does not hold one sequence: windows are then made smaller.
    """
    pattern = [min(window, tokens) for window in settings.max_attention_window or (tokens,)]
    if len(set(pattern)) == 1:
        return []
    if dtype.name == "nvfp4" or any(isinstance(cache, LatentAttention) for cache in all_caches(spec)):
        raise UsageError("--max-attention-window: pools of windows are not counted in nvfp4, and MLA has one pool")
    rows: dict[int, list[int]] = {}
    for group in spec.layers:
        for number in range(group.first, group.last + 1):
            row = sum(_row_bytes(cache, dtype) for cache in group.caches)
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


def _notes(spec: ModelSpec) -> tuple[Note, ...]:
    if windows(spec):
        text = "TensorRT-LLM takes whole blocks for windows too; --max-attention-window divides the memory by window"
        return (Note("engine", "whole-windows", text),)
    return ()
