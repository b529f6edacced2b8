"""Which backend runs a layer's decode step: every candidate is checked against fp32, timed at the shape, and kept in
the record with its time or the reason why not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcalc.attention.backends import BACKENDS, Backend, Case
from kvcalc.attention.cache import TokenCache
from kvcalc.attention.core import attention_with_weights
from kvcalc.attention.grouped import GroupedAttention
from kvcalc.errors import RunError, UsageError
from kvcalc.measure.build import TORCH_DTYPES, AttentionLayer, make_cache
from kvcalc.measure.storage import Storage
from kvcalc.measure.timing import time_call

# Largest error of an output of unit scale: rounding of inputs' products in each type, with room for other orders of
# summation. The reference is computed in fp32 from the same rounded rows.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}

# Enough tokens for several tiles of any kernel, and no multiple of one; two sequences, so that strides matter.
_TOKENS, _BATCH = 197, 2
# A backend is timed this often, or until it has taken so long.
_REPEATS, _SECONDS_EACH = 5, 0.3


class Choice(NamedTuple):
    """The winner, and for every backend {"name", "seconds", "max_abs_error", "reason"}."""

    backend: Backend
    rows: list[dict[str, Any]]


def check_name(name: str) -> None:
    """Raise UsageError (exit 2) for a backend nobody knows."""
    if name != "auto" and name not in BACKENDS:
        raise UsageError(f"--backend {name[:40]!a}: not a backend", f"auto or one of {', '.join(BACKENDS)}")


def case_of(layer: AttentionLayer, device: torch.device, dtype: torch.dtype, storage: Storage) -> Case:
    """What a backend would be asked to run for `layer`."""
    layout = "paged" if storage.block_size is not None else "growing" if storage.kind == "grow" else "dense"
    stored = TORCH_DTYPES[storage.kv_dtype] if storage.kv_dtype else None
    if isinstance(layer, GroupedAttention):
        return Case(device, dtype, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layout,
                    stored, storage.block_size)  # fmt: skip
    if layer.expands:
        return Case(device, dtype, layer.num_heads, layer.num_heads, layer.nope + layer.rope_width, layer.v_head_dim)
    return Case(device, dtype, layer.num_heads, 1, layer.rank + layer.rope_width, layer.rank, layout, stored,
                storage.block_size, is_latent=True)  # fmt: skip


def choose(layer: AttentionLayer, cache: TokenCache, query: Tensor, storage: Storage, name: str = "auto") -> Choice:
    """Time the backends that can run `layer`'s step over `cache`, and pick the fastest; or the one asked for by `name`.

    `query` is as `layer.attend` takes it. Raises RunError (exit 1) where the one asked for cannot run here or is wrong.
    """
    case = case_of(layer, query.device, query.dtype, storage)
    rows: list[dict[str, Any]] = []
    best: tuple[float, Backend] | None = None
    before = layer.core
    for backend in BACKENDS.values():
        row: dict[str, Any] = {"name": backend.name, "seconds": None, "max_abs_error": None, "reason": None}
        rows.append(row)
        row["reason"] = _why_not(backend, case, name)
        if row["reason"]:
            continue
        try:
            layer.core = backend
            row["max_abs_error"] = error_of(backend, layer, query.device, query.dtype, storage)
            if not row["max_abs_error"] <= TOLERANCES[query.dtype]:
                row["reason"] = f"differs from fp32 by {row['max_abs_error']:.2g}"
                continue
            row["seconds"] = _seconds(layer, cache, query)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            # A kernel library that does not take this shape, device or torch release: its own words.
            row["reason"] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            continue
        finally:
            layer.core = before
        if best is None or row["seconds"] < best[0]:
            best = (row["seconds"], backend)
    if best is None:
        asked = next((row["reason"] for row in rows if row["name"] == name), rows[0]["reason"])
        raise RunError(f"--backend {name} cannot run here: {asked}", "--backend auto picks one that can")
    return Choice(best[1], rows)


def error_of(
    backend: Backend, layer: AttentionLayer, device: torch.device, dtype: torch.dtype, storage: Storage
) -> float:
    """The largest error of `backend` against fp32, over a small cache of the same heads, types and layout.

    Compared with attention over the rows as the cache gives them back: what quantizing loses is not the kernel's.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    cache = make_cache(layer, _BATCH, _TOKENS, dtype, device, storage)
    for tokens in (_TOKENS - 1, 1):
        cache.append(tuple(random(_BATCH, heads, tokens, width) for heads, width in layer.cache_shapes()))
    query = random(*layer.core_query_shape(_BATCH))
    views, scale = cache.views(), None
    if isinstance(layer, GroupedAttention):
        key, value = views
    elif layer.expands:
        key, value = layer.rebuilt(views[0])
    else:
        key, value, scale = views[0], views[0][..., : layer.rank], layer.scale
    reference = attention_with_weights(query.float(), key.float(), value.float(), scale=scale)[0]
    return float((layer.attend(query, cache).float() - reference).abs().max().item())


def _why_not(backend: Backend, case: Case, name: str) -> str | None:
    if name not in ("auto", backend.name):
        return f"not asked for (--backend {name})"
    return (backend.why_not_unasked(case) if name == "auto" else None) or backend.why_not(case)


def _seconds(layer: AttentionLayer, cache: TokenCache, query: Tensor) -> float:
    """The fastest of some calls, after one that sets the kernel up."""
    layer.attend(query, cache)
    taken: list[float] = []
    while len(taken) < _REPEATS and sum(taken) < _SECONDS_EACH:
        taken.append(time_call(query.device, lambda: layer.attend(query, cache)))
    return min(taken)
