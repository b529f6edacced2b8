"""The self-check: on a small shape of the same kind, prefill plus cached decode equals one full causal pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from kvcalc.measure.build import build_layer, make_cache
from kvcalc.model.spec import AttentionShape

TOLERANCE = 1e-4
_TOKENS, _DECODED, _CHUNK, _BATCH = 24, 8, 7, 2


def small_shape(shape: AttentionShape) -> AttentionShape:
    """A shape of the same kind, with the same grouping, biases, positions and low ranks, small enough for one pass."""
    num_kv_heads = {"mha": 8, "mqa": 1}.get(shape.kind, 2)
    v_head_dim = 24 if shape.qk_head_dim == shape.v_head_dim else 16
    rope_dim = 0 if not shape.rope_dim else 24 if shape.rope_dim == shape.qk_head_dim else 8
    small = shape._replace(
        num_heads=8, num_kv_heads=num_kv_heads, hidden_size=64, rope_dim=rope_dim, qk_head_dim=24, v_head_dim=v_head_dim
    )
    if not shape.is_latent:
        return small
    return small._replace(
        num_kv_heads=8, kv_lora_rank=32, q_lora_rank=20 if shape.q_lora_rank else 0, qk_rope_head_dim=8
    )


def verify(shape: AttentionShape, window: int | None, device: torch.device, core: Any, seed: int) -> dict[str, Any]:
    """Run the small shape both ways in fp32 on `device`: the `verified` part of a run.

    `core` is the decode kernel that was timed. A window becomes one short enough for the ring to turn.
    """
    torch.manual_seed(seed)
    layer = build_layer(small_shape(shape), None if window is None else 9, torch.float32, device).eval()
    layer.core = core
    with torch.inference_mode():
        x = torch.randn(_BATCH, _TOKENS, 64, device=device)
        full = layer(x)
        cache = make_cache(layer, _BATCH, _TOKENS, torch.float32, device)
        cuts = [*range(0, _TOKENS - _DECODED, _CHUNK), *range(_TOKENS - _DECODED, _TOKENS + 1)]
        parts = [layer(x[:, a:b], cache) for a, b in pairwise(cuts)]
        error = (torch.cat(parts, dim=1) - full).abs().max().item()
    return {"max_abs_error": error if error == error else None, "tolerance": TOLERANCE, "ok": error <= TOLERANCE}
