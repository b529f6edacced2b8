"""MLA: absorbed decode over latents equals rebuilt keys and values, and only the latent is cached."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvcalc.attention.cache import TokenCache
from kvcalc.attention.latent import MultiHeadLatentAttention
from kvcalc.measure.layers.build import build_layer
from kvcalc.model.mixers.attention import Attention, AttentionShape

CPU = torch.device("cpu")
WIDTH, HEADS, TOKENS = 48, 4, 20


def module(**options: object) -> MultiHeadLatentAttention:
    torch.manual_seed(1)
    return MultiHeadLatentAttention(WIDTH, HEADS, 32, 16, 8, 12, **options).eval()  # type: ignore[arg-type]


def inputs() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(2, TOKENS, WIDTH)


def by_definition(layer: MultiHeadLatentAttention, x: torch.Tensor) -> torch.Tensor:
    """The paper's equations, computed for each token and head."""
    down = layer.kv_down(x)
    latent, key_rope = layer.kv_norm(down[..., :32]), layer.rope(down[..., 32:], 0)
    query = layer.q_proj(x).view(2, TOKENS, HEADS, 24)
    up = layer.kv_up(latent).view(2, TOKENS, HEADS, 28)
    heads = []
    for h in range(HEADS):
        q = torch.cat((query[:, :, h, :16], layer.rope(query[:, :, h, 16:], 0)), dim=-1)
        k = torch.cat((up[:, :, h, :16], key_rope), dim=-1)
        scores = (q @ k.transpose(-1, -2) / 24**0.5).masked_fill(
            torch.ones(TOKENS, TOKENS).triu(1).bool(), float("-inf")
        )
        heads.append(scores.softmax(-1) @ up[:, :, h, 16:])
    out: torch.Tensor = layer.o_proj(torch.cat(heads, dim=-1))
    return out


@pytest.mark.parametrize("q_lora_rank", [0, 20])
@torch.no_grad()
def test_one_pass_is_the_papers_equations(q_lora_rank: int) -> None:
    layer = module(q_lora_rank=q_lora_rank)
    torch.testing.assert_close(layer(inputs()), by_definition(layer, inputs()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"q_lora_rank": 20}, {"qkv_bias": True, "output_bias": True}, {"window": 5}, {"window": 1}], ids=str
)
@torch.no_grad()
def test_absorbed_decode_is_one_full_pass(options: dict[str, object]) -> None:
    layer, x = module(**options), inputs()
    full = layer(x)
    for cuts in ([0, 9, *range(10, 21)], [0, 3, 4, 11, 20], list(range(21))):
        cache = TokenCache(2, layer.cache_shapes(), TOKENS, layer.window, torch.float32, CPU)
        parts = [layer(x[:, a:b], cache) for a, b in pairwise(cuts)]
        torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_padding_with_cached_length() -> None:
    layer, x = module(), inputs()
    hidden = torch.zeros(2, 1, 1, TOKENS, dtype=torch.bool)
    hidden[1, ..., :4] = True
    cache = TokenCache(2, layer.cache_shapes(), TOKENS, None, torch.float32, CPU)
    parts = [layer(x[:, :9], cache, mask=hidden[..., :9])]
    parts += [layer(x[:, t : t + 1], cache, mask=hidden[..., : t + 1]) for t in range(9, TOKENS)]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x, mask=hidden), atol=1e-5, rtol=1e-4)
    assert torch.equal(parts[0][1, :4], torch.zeros(4, WIDTH))


def test_one_latent_and_one_rotary_key_are_kept_for_all_heads() -> None:
    assert module().cache_shapes() == ((1, 32 + 8),)


@pytest.mark.parametrize("q_lora_rank", [0, 20])
def test_parameters_are_what_the_formula_counts(q_lora_rank: int) -> None:
    shape = AttentionShape(
        HEADS, HEADS, 24, 12, WIDTH, rope_dim=8, kv_lora_rank=32, q_lora_rank=q_lora_rank, qk_rope_head_dim=8
    )
    matrices = sum(p.numel() for p in build_layer(shape, None).parameters() if p.dim() == 2)
    assert matrices == Attention(shape).parameters
