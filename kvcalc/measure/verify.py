"""The self-check: on a small shape of the same kind, prefill plus cached decode must equal one full causal pass.

It checks the modules and their caches, with plain attention in fp32. Kernels are checked at the shape, length and dtype
at which they are timed (`kvcalc.measure.choose`); those for GPUs do not run fp32.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kvcalc.attention.backends import Backend
from kvcalc.attention.latent import MultiHeadLatentAttention
from kvcalc.attention.recurrent import RecurrentMixer, StateCache, StateShape
from kvcalc.measure.layers.build import build_layer, make_cache
from kvcalc.measure.layers.stack import Request
from kvcalc.measure.layers.storage import Storage
from kvcalc.model.mixers.attention import AttentionShape

if TYPE_CHECKING:
    import kvcalc.documents as documents

TOLERANCE = 1e-4
_TOKENS, _DECODED, _CHUNK, _BATCH = 24, 8, 7, 2
_CUTS = [*range(0, _TOKENS - _DECODED, _CHUNK), *range(_TOKENS - _DECODED, _TOKENS + 1)]


def small_shape(shape: AttentionShape, size: int = 1) -> AttentionShape:
    """A small shape of the same kind, with the same grouping, biases, positions and low ranks.

    Its heads can be split over `size` ranks. KV heads are divided or replicated in the same way as in `shape`.
    """
    heads = 8 if size == 1 else 4 * size
    grouped = 2 * size if shape.num_kv_heads % size == 0 else shape.num_kv_heads
    num_kv_heads = {"mha": heads, "mqa": 1}.get(shape.kind, grouped)
    v_head_dim = 24 if shape.qk_head_dim == shape.v_head_dim else 16
    rope_dim = 0 if not shape.rope_dim else 24 if shape.rope_dim == shape.qk_head_dim else 8
    small = shape._replace(
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        hidden_size=64,
        rope_dim=rope_dim,
        qk_head_dim=24,
        v_head_dim=v_head_dim,
    )
    if not shape.is_latent:
        return small
    return small._replace(
        num_kv_heads=heads, kv_lora_rank=32, q_lora_rank=20 if shape.q_lora_rank else 0, qk_rope_head_dim=8
    )


def verify(shape: AttentionShape, window: int | None, request: Request) -> documents.RunVerified:
    """Run the small shape in both ways, in fp32 on the request's device. Returns the `verified` part of a run.

    A window is replaced by one so short that the ring wraps around. With several ranks, each rank does the full pass
    with the whole layer and decodes with its share. The largest error counts.
    """
    group, storage, device = request.group, request.storage, request.device
    torch.manual_seed(request.seed)
    small, span = small_shape(shape, group.size), None if window is None else 9
    layer = build_layer(small, span, torch.float32, device).eval()
    share = group.share_of(layer, small, span)
    share.core = Backend()
    if isinstance(share, MultiHeadLatentAttention):
        share.expands = storage.mla == "expanded"
    with torch.inference_mode():
        x = group.same(torch.randn(_BATCH, _TOKENS, 64, device=device))
        full = layer(x)
        cache = make_cache(share, (_TOKENS,) * _BATCH, torch.float32, device, _small_storage(storage))
        parts = [share(x[:, a:b], cache) for a, b in pairwise(_CUTS)]
        errors = group.gather((torch.cat(parts, dim=1) - full).abs().max().item())
    # max() would lose a NaN that is not first.
    error = next((e for e in errors if e != e), max(errors))
    return _checked(error)


def verify_state(shape: StateShape, request: Request) -> documents.RunVerified:
    """The self-check of a recurrent layer: all tokens at once, against pieces whose last tokens come one by one."""
    torch.manual_seed(request.seed)
    device = request.device
    small = shape
    if shape.kind in ("linear", "delta"):
        heads, key_heads = (4, 2) if shape.heads != shape.key_heads else (4, 4)
        small = shape._replace(
            channels=2 * key_heads * 8 + heads * 6, heads=heads, key_heads=key_heads, k_width=8, v_width=6
        )
    elif shape.kind == "selective":
        small = shape._replace(channels=32, k_width=min(shape.k_width, 8))
    layer = RecurrentMixer(64, small, device).eval()
    with torch.inference_mode():
        x = torch.randn(_BATCH, _TOKENS, 64, device=device)
        outputs = []
        for cuts in ([0, _TOKENS], _CUTS):
            cache = StateCache(_BATCH, small, torch.float32, torch.float32, device)
            outputs.append(torch.cat([layer(x[:, a:b], cache) for a, b in pairwise(cuts)], dim=1))
        return _checked((outputs[0] - outputs[1]).abs().max().item())


def _small_storage(storage: Storage) -> Storage:
    """The timed layout, with blocks so small that the small cache has several of them.

    It is always in fp32, because the error of 8-bit types is not part of this check.
    """
    if storage.kind == "none":
        return Storage()
    return storage._replace(kv_dtype=None, scales="row", block_size=None if storage.block_size is None else 4)


def _checked(error: float) -> documents.RunVerified:
    return {"max_abs_error": error if error == error else None, "tolerance": TOLERANCE, "ok": error <= TOLERANCE}
