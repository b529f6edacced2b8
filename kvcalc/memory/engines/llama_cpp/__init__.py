"""llama.cpp: one cache of cells for a context, in types of their own for K and V, and states in fp32.

Source: llama-context.cpp, llama-kv-cache.cpp, llama-kv-cache-iswa.cpp and llama-memory-recurrent.cpp as they stand in
llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import Dtype, pair, parse_dtype
from kvcalc.memory.engines import Engine, Line
from kvcalc.memory.engines.llama_cpp import deepseek_v4
from kvcalc.memory.engines.llama_cpp.account import account
from kvcalc.memory.engines.llama_cpp.architectures import layers_of
from kvcalc.memory.engines.llama_cpp.cells import Cells, cells_for
from kvcalc.memory.engines.llama_cpp.settings import NO_V, VERSION, Settings, parse_settings
from kvcalc.model.caches import Cache, LatentAttention
from kvcalc.model.spec import ModelSpec, all_caches
from kvcalc.notes import Note

# kv_cache_types, common/arg.cpp.
_TYPES = ("fp32", "fp16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def cut(num_layers: int, stages: int) -> list[int]:
    """Layers are split over devices of one size (--split-mode layer, the default) as evenly as one more would be: the
    output counts as a layer, the last (get_layer_buft_list, llama-model.cpp)."""
    devices = [number * stages // (num_layers + 1) for number in range(num_layers)]
    return [devices.count(device) for device in range(stages)]


def kv_dtype(spec: ModelSpec, asked: str, given: Mapping[str, str], dtype: str | None) -> tuple[Dtype, str | None]:
    """The types of K and V: --cache-type-k and --cache-type-v, else --kv-dtype for both, else f16 for any model."""
    plain = "fp16" if asked.casefold() == "auto" else asked
    k, v = (parse_dtype(given.get(f"cache-type-{name}", plain), f"--cache-type-{name}") for name in ("k", "v"))
    for used in (k, v):
        if used.name not in _TYPES:
            raise UsageError(f"--kv-dtype {used.name}: not a cache type of llama.cpp", f"one of {', '.join(_TYPES)}")
    default = asked.casefold() == "auto" and not {"cache-type-k", "cache-type-v"} <= set(given)
    return pair(k, v), "f16 is llama.cpp's default, whatever the model's type" if default else None


def engine(spec: ModelSpec, given: Mapping[str, str]) -> Engine:
    """The accounting of a context with a slot for each sequence (or more: --parallel), every slot as long as --context.

    Slots have streams of cells of their own; with --kv-unified they share one. Raises ModelError (exit 3) for models
    llama.cpp does not run or whose layout is not established, UsageError (exit 2) for what it refuses itself.
    """
    settings = parse_settings(given)
    if spec.model_type in deepseek_v4.MODEL_TYPES:
        return deepseek_v4.engine(spec, settings, lambda share, dtype: _check_types(share, dtype, settings))
    layers_of(spec, settings)

    def cells(share: ModelSpec, tokens: int, batch: int) -> Cells:
        return cells_for(settings, tokens, batch, layers_of(share, settings).window)

    def pool(share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line]:
        _check_types(share, dtype, settings)
        return account(layers_of(share, settings), cells(share, tokens, batch), dtype, settings.transposes_v)

    def cache_bytes(cache: Cache, tokens: int, dtype: Dtype) -> int:
        alone = layers_of(spec, settings).only(cache)
        return sum(line.bytes for line in account(alone, cells(spec, tokens, 1), dtype, settings.transposes_v))

    def blocks(share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory_bytes: int | None) -> dict[str, Any]:
        made = cells(share, tokens, batch)
        return {
            "n_ctx": made.n_ctx, "n_ctx_seq": made.cells, "n_seq_max": made.slots, "n_stream": made.streams,
            "window_cells": made.window_cells if layers_of(share, settings).window else None,
        }  # fmt: skip

    return Engine(
        "llama.cpp", VERSION, cache_bytes, settings.describe(), _notes(spec, settings), blocks=blocks, pool=pool,
        growth_tokens=lambda share, dtype: settings.padding, splits_heads=False,
    )  # fmt: skip


def _check_types(spec: ModelSpec, dtype: Dtype, settings: Settings) -> None:
    """What llama_init_from_model refuses."""
    v = dtype.v or dtype
    if v.block_elements > 1 and settings.transposes_v:
        raise UsageError(f"--cache-type-v {v.name}: llama.cpp keeps a quantized V with --flash-attn on alone")
    if (
        dtype.v
        and not settings.is_before(NO_V)
        and any(isinstance(cache, LatentAttention) for cache in all_caches(spec))
    ):
        raise UsageError("--cache-type-v: llama.cpp has one type for K and V where V is a view of K (MLA)")


def _notes(spec: ModelSpec, settings: Settings) -> tuple[Note, ...]:
    if any(isinstance(cache, LatentAttention) for cache in all_caches(spec)) and not settings.is_before(NO_V):
        text = "llama.cpp before January 2026 keeps the latent once more as V: --before-pull 19067 counts it"
        return (Note("engine", "latent-twice", text),)
    return ()
