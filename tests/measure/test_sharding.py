"""The shares of tensor parallelism add up to the whole layer, in a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvcalc as library
from kvcalc.measure.layers.build import build_layer, make_cache
from kvcalc.measure.layers.sharding import copy_share, share_of_shape, share_of_spec
from kvcalc.measure.verify import small_shape
from kvcalc.memory.dtypes import DTYPES
from kvcalc.memory.kv_cache import stored_bytes
from kvcalc.model.mixers.attention import AttentionShape
from tests.conftest import PLAIN_PRESETS

GROUPED = AttentionShape(num_heads=8, num_kv_heads=8, qk_head_dim=12, v_head_dim=8, hidden_size=32, qkv_bias=True,
                         output_bias=True, rope_dim=8)  # fmt: skip
LATENT = AttentionShape(num_heads=8, num_kv_heads=8, qk_head_dim=12, v_head_dim=8, hidden_size=32, qkv_bias=True,
                        output_bias=True, rope_dim=4, kv_lora_rank=16, q_lora_rank=10, qk_rope_head_dim=4)  # fmt: skip
SHAPES = {
    "mha": GROUPED,
    "gqa": GROUPED._replace(num_kv_heads=4),
    "gqa of two": GROUPED._replace(num_kv_heads=2),
    "mqa": GROUPED._replace(num_kv_heads=1),
    "gated": GROUPED._replace(num_kv_heads=2, output_gate=True),
    "gated by head": GROUPED._replace(num_kv_heads=2, head_gate=True),
    "mla": LATENT,
    "mla, gated": LATENT._replace(output_gate=True),
    "mla, gated by head": LATENT._replace(head_gate=True),
    "mla, plain query": LATENT._replace(q_lora_rank=0),
}


def shares_of(whole: Any, shape: AttentionShape, size: int, window: int | None) -> list[Any]:
    made = []
    for rank in range(size):
        share = build_layer(share_of_shape(shape, size), window, torch.float64).eval()
        copy_share(whole, share, rank, size)
        made.append(share)
    return made


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_the_shares_outputs_add_up_to_the_whole_layers(name: str, size: int, window: int | None) -> None:
    shape = SHAPES[name]
    torch.manual_seed(size)
    whole = build_layer(shape, window, torch.float64).eval()
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    with torch.inference_mode():
        expected = whole(x)
        total = torch.zeros_like(expected)
        for share in shares_of(whole, shape, size, window):
            cache = make_cache(share, (11, 11), torch.float64, torch.device("cpu"))
            total += torch.cat([share(part, cache) for part in x.split([6, 1, 1, 3], dim=1)], dim=1)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-10)


def test_a_bias_is_in_the_sum_once() -> None:
    whole = build_layer(GROUPED, None, torch.float64)
    biases = [share.o_proj.bias for share in shares_of(whole, GROUPED, 4, None)]
    assert torch.equal(biases[0], whole.o_proj.bias)
    assert not any(bias.any() for bias in biases[1:])


def test_a_layer_nobody_knows_how_to_shard_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear"):
        copy_share(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), 0, 2)


@pytest.mark.parametrize("name", PLAIN_PRESETS)
def test_a_ranks_cache_is_what_estimate_says_a_device_holds(name: str) -> None:
    spec = library.load_model(name).head(2)
    heads, kv_heads = spec.attention.num_heads, spec.attention.num_kv_heads
    for size in (n for n in range(1, 9) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)):
        share = share_of_spec(spec, size)
        estimate = library.estimate(spec, context_tokens=64, tensor_parallel_size=size)["kv_cache"]
        assert stored_bytes(share, DTYPES[estimate["dtype"]], 64) == estimate["bytes_per_device"]
        layer = build_layer(share.attention, None, torch.float32, torch.device("meta"))
        rows = tuple(heads * width for heads, width in layer.cache_shapes())
        assert rows == share.layers[0].caches[0].token_rows()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_self_checks_shape_is_shared_as_the_models_is(size: int) -> None:
    for kv_heads in (1, 2, 6, 24):
        if kv_heads % size and size % kv_heads:
            continue
        shape = GROUPED._replace(num_heads=24, num_kv_heads=kv_heads)
        small = small_shape(shape, size)
        assert small.kind == shape.kind
        assert small.num_heads % size == 0
        assert (small.num_kv_heads % size == 0) is (kv_heads % size == 0)
        assert small.num_heads % small.num_kv_heads == 0
