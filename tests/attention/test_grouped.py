"""The grouped module compared with torch's own, with itself in one pass, and as cross-attention."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from kvcalc.attention.cache import TokenCache
from kvcalc.attention.grouped import GroupedAttention
from tests.attention.padding import padding_mask

CPU = torch.device("cpu")
WIDTH, HEADS, TOKENS = 48, 6, 20


def module(**options: object) -> GroupedAttention:
    torch.manual_seed(1)
    return GroupedAttention(WIDTH, HEADS, **options).eval()  # type: ignore[arg-type]


def inputs(tokens: int = TOKENS, batch: int = 2) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(batch, tokens, WIDTH)


def cache_of(layer: GroupedAttention, tokens: int = TOKENS, batch: int = 2) -> TokenCache:
    return TokenCache(batch, layer.cache_shapes(), tokens, layer.window, torch.float32, CPU)


def twin(layer: GroupedAttention, bias: bool) -> nn.MultiheadAttention:
    """torch.nn.MultiheadAttention with the same weights."""
    torch_layer = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True).eval()
    with torch.no_grad():
        torch_layer.in_proj_weight.copy_(torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)]))
        torch_layer.out_proj.weight.copy_(layer.o_proj.weight)
        if bias:
            for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
                linear.bias.copy_(torch.randn_like(linear.bias))
            torch_layer.in_proj_bias.copy_(torch.cat([p.bias for p in (layer.q_proj, layer.k_proj, layer.v_proj)]))
            torch_layer.out_proj.bias.copy_(layer.o_proj.bias)
    return torch_layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_mha_is_torchs_own_with_the_same_weights(bias: bool, causal: bool, padded: bool) -> None:
    layer = module(qkv_bias=bias, output_bias=bias, causal=causal)
    oracle, x = twin(layer, bias), inputs()
    lengths = torch.tensor([TOKENS, 13])
    padding = padding_mask(lengths, TOKENS) if padded else None
    above = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1) if causal else None
    expected, _ = oracle(
        x,
        x,
        x,
        attn_mask=above,
        key_padding_mask=None if padding is None else padding[:, 0, 0],
    )
    torch.testing.assert_close(layer(x, mask=padding), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("window", [None, 1, 5, 19, 20, 64])
@pytest.mark.parametrize(
    "options",
    [{}, {"rope_dim": 8}, {"rope_dim": 4, "qkv_bias": True}, {"v_head_dim": 12}, {"output_gate": True}],
    ids=str,
)
@torch.no_grad()
def test_prefill_plus_cached_decode_is_one_full_pass(
    num_kv_heads: int, window: int | None, options: dict[str, object]
) -> None:
    layer = module(num_kv_heads=num_kv_heads, window=window, **options)
    x, full = inputs(), module(num_kv_heads=num_kv_heads, window=window, **options)(inputs())
    for cuts in ([0, 9, *range(10, 21)], [0, 3, 4, 11, 20], [0, 19, 20], list(range(21))):
        cache = cache_of(layer)
        parts = [layer(x[:, a:b], cache) for a, b in pairwise(cuts)]
        torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_gqa_with_as_many_groups_as_heads_is_mha() -> None:
    mha, gqa = module(), module(num_kv_heads=HEADS)
    torch.testing.assert_close(gqa(inputs()), mha(inputs()))


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@torch.no_grad()
def test_gqa_is_mha_with_repeated_heads(num_kv_heads: int) -> None:
    gqa, mha = module(num_kv_heads=num_kv_heads), module()
    mha.q_proj, mha.o_proj = gqa.q_proj, gqa.o_proj
    for name in ("k_proj", "v_proj"):
        heads = getattr(gqa, name).weight.view(num_kv_heads, -1, WIDTH)
        getattr(mha, name).weight.copy_(heads.repeat_interleave(HEADS // num_kv_heads, dim=0).flatten(0, 1))
    torch.testing.assert_close(gqa(inputs()), mha(inputs()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
@torch.no_grad()
def test_padding_with_cached_length(window: int | None) -> None:
    """Left-padded sequences: the padding stays masked while the cache grows, and a row of padding gives zeros."""
    layer, x = module(num_kv_heads=2, window=window), inputs()
    hidden = torch.zeros(2, 1, 1, TOKENS, dtype=torch.bool)
    hidden[1, ..., :4] = True
    full = layer(x, mask=hidden)
    cache = cache_of(layer)
    parts = [layer(x[:, :9], cache, mask=hidden[..., :9])]
    parts += [layer(x[:, t : t + 1], cache, mask=hidden[..., : t + 1]) for t in range(9, TOKENS)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=1e-4)
    assert torch.equal(full[1, :4], torch.zeros(4, WIDTH))
    alone = layer(x[1:, 4:]) if window is None else None
    if alone is not None:
        torch.testing.assert_close(full[1:, 4:], alone, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_cross_attention_reads_the_encoder_and_caches_it_once() -> None:
    layer, oracle = module(causal=False), twin(module(causal=False), bias=False)
    decoder, encoder = inputs(3), torch.randn(2, 11, WIDTH)
    padding = padding_mask(torch.tensor([11, 7]), 11)
    expected, _ = oracle(decoder, encoder, encoder, key_padding_mask=padding[:, 0, 0])
    torch.testing.assert_close(layer(decoder, source=encoder, mask=padding), expected, atol=1e-6, rtol=1e-5)
    cache = cache_of(layer, tokens=11)
    torch.testing.assert_close(layer(decoder, cache, mask=padding, source=encoder), expected, atol=1e-6, rtol=1e-5)
    again = layer(decoder, cache, mask=padding, source=encoder[:, :0])
    torch.testing.assert_close(again, expected, atol=1e-6, rtol=1e-5)
    assert cache.length == 11


def test_dropout_acts_in_training_only() -> None:
    layer, x = module(dropout=0.5), inputs()
    assert torch.equal(layer(x), layer(x))
    layer.train()
    torch.manual_seed(0)
    first = layer(x)
    assert not torch.allclose(first, layer(x))


@torch.no_grad()
def test_a_gate_of_zero_halves_the_output() -> None:
    gated, plain = module(output_gate=True), module()
    assert gated.gate_proj is not None
    gated.gate_proj.weight.zero_()
    plain.load_state_dict({name: w for name, w in gated.state_dict().items() if not name.startswith("gate_proj")})
    torch.testing.assert_close(gated(inputs()), plain(inputs()) / 2)


@torch.no_grad()
def test_the_output_projection_mixes_heads() -> None:
    layer = module()
    layer.o_proj.weight.zero_()
    assert torch.equal(layer(inputs()), torch.zeros(2, TOKENS, WIDTH))


def test_sizes_that_do_not_divide_are_errors() -> None:
    with pytest.raises(ValueError, match="num_kv_heads 4 does not divide"):
        GroupedAttention(48, 6, 4)
    with pytest.raises(ValueError, match="num_heads 6 does not divide hidden_size 512"):
        GroupedAttention(512, 6)
    assert GroupedAttention(512, 6, head_dim=64).o_proj.in_features == 384


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_what_the_formula_counts(bias: bool) -> None:
    from kvcalc.measure.layers.build import build_layer
    from kvcalc.model.mixers.attention import Attention, AttentionShape

    shape = AttentionShape(6, 2, 8, 12, 48, qkv_bias=bias, output_bias=bias)
    matrices = sum(p.numel() for p in build_layer(shape, None).parameters() if p.dim() == 2)
    assert matrices == Attention(shape).parameters
    vectors = sum(p.numel() for p in build_layer(shape, None).parameters() if p.dim() == 1)
    assert vectors == (6 * 8 + 2 * 8 + 2 * 12 + 48 if bias else 0)


@torch.no_grad()
def test_attend_is_the_core_of_a_decode_step() -> None:
    layer, x = module(num_kv_heads=2, rope_dim=8), inputs()
    cache = cache_of(layer)
    layer(x, cache)
    query = torch.randn(layer.core_query_shape(2))
    key, value = (t.repeat_interleave(3, dim=1) for t in cache.views())
    expected = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1) @ value
    torch.testing.assert_close(layer.attend(query, cache), expected, atol=1e-6, rtol=1e-5)
