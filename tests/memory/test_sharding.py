"""One rank's weights, computed by hand: which weights are split, which are whole, and the widest module."""

from __future__ import annotations

import pytest

from kvcalc.memory.dtypes import DTYPES
from kvcalc.memory.sharding import shard, stage_weights, width_of
from kvcalc.memory.weights import plain_bytes
from kvcalc.model import spec as specs
from kvcalc.model.layout import Layout
from kvcalc.model.resolve import load_model
from kvcalc.model.tensors import ModelWeights

BF16 = DTYPES["bf16"]


def weights_of(name: str) -> ModelWeights:
    found = specs.weights_of(load_model(name))
    assert found is not None
    return found


def bytes_of(weights: ModelWeights) -> int:
    return plain_bytes(weights, BF16)[0]


# Llama-3-8B: 32 layers with q and o of 4096 x 4096, k and v of 1024 x 4096, three matrices of 14336 x 4096 and two
# norms. The embedding and the head are 128256 x 4096 each, and there is one final norm.
Q, KV, MLP, NORM, TABLE = 4096 * 4096, 1024 * 4096, 14336 * 4096, 4096, 128256 * 4096


@pytest.mark.parametrize(("ranks", "kv_parts"), [(1, 1), (2, 2), (8, 8), (16, 8), (32, 8)])
def test_llama_on_a_rank(ranks: int, kv_parts: int) -> None:
    layer = (2 * Q + 3 * MLP) // ranks + 2 * KV // kv_parts + 2 * NORM
    expected = 2 * (32 * layer + 2 * TABLE // ranks + NORM)
    assert bytes_of(shard(weights_of("llama-3-8b"), Layout(ranks))) == expected


def test_what_does_not_divide_is_rounded_up() -> None:
    whole = bytes_of(weights_of("llama-3-8b"))
    share = bytes_of(shard(weights_of("llama-3-8b"), Layout(3)))
    assert whole < 3 * share < 1.001 * whole


def test_mla_keeps_its_down_projections_and_routers_whole() -> None:
    weights = weights_of("deepseek-v3")
    share = shard(weights, Layout(8))
    whole = {w.name: w for block in weights.blocks for w in block.weights}
    part = {w.name: w for block in share.blocks for w in block.weights}
    for name in ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "mlp.gate", "input_layernorm"):
        assert part[name] == whole[name]
    assert part["self_attn.q_b_proj"].rows * 8 == whole["self_attn.q_b_proj"].rows
    assert part["mlp.experts.0.up_proj"].rows * 8 == whole["mlp.experts.0.up_proj"].rows
    assert part["mlp.experts.0.up_proj"].copies == 256


def test_stages_add_up_and_each_end_has_its_table() -> None:
    weights = weights_of("llama-3-8b")
    parts = stage_weights(weights, ((0, 15), (16, 31)))
    assert sum(map(bytes_of, parts)) == bytes_of(weights)
    layers = 2 * 16 * (2 * Q + 2 * KV + 3 * MLP + 2 * NORM)
    assert [bytes_of(part) - layers for part in parts] == [2 * TABLE, 2 * (TABLE + NORM)]


def test_a_tied_table_is_on_both_ends() -> None:
    weights = weights_of("gemma-2-2b")
    layers = 1 + max(number for block in weights.blocks for number in block.numbers)
    ends = stage_weights(weights, ((0, 9), (10, layers - 1)))
    assert sum(map(bytes_of, ends)) == bytes_of(weights) + 2 * weights.embedding.parameters


def test_the_widest_module_of_llama_is_its_mlp() -> None:
    # gate and up together, and the input of down: 3 x 14336 elements per token. The vocabulary is gathered.
    assert width_of(weights_of("llama-3-8b"), 1) == (3 * 14336, 4096, 128256, 32, False, 1)
    assert width_of(weights_of("llama-3-8b"), 4) == (3 * 14336 // 4, 4096, 128256, 32, False, 1)


def test_experts_are_as_wide_as_those_a_token_is_sent_to() -> None:
    # Mixtral: 2 of 8 experts of 14336. gate and up of two experts enter, and two rows are intermediate.
    assert width_of(weights_of("mixtral-8x7b"), 1) == (2 * 2 * 14336 + 2 * 14336, 4096, 32000, 32, True, 1)


def test_experts_give_a_row_for_each_expert_that_a_token_is_sent_to() -> None:
    """These rows are of the hidden size on every rank, so with many ranks they are more than what enters."""
    # On 32 ranks, 1,792 elements enter and 2 x 4,096 leave two experts of Mixtral. Of DeepSeek-V3's, more always leave.
    assert width_of(weights_of("mixtral-8x7b"), 32).module_elements == 2 * 4096 + 2 * 14336 // 32
    assert width_of(weights_of("deepseek-v3"), 1).module_elements == 8 * 7168 + 8 * 2048
    # What 3 ranks do not divide is rounded up.
    assert width_of(weights_of("llama-3-8b"), 3).module_elements == 9558 + 4779


@pytest.mark.parametrize(
    ("replicas", "groups", "copies", "rows"),
    # 256 experts of 2,048 rows on 2 tensor-parallel ranks of each DP rank.
    [(1, 1, 256, 1024), (4, 1, 256, 256), (4, 2, 128, 512), (4, 8, 32, 2048), (2, 4, 64, 2048)],
)
def test_experts_are_spread_over_the_ranks_of_all_dp_ranks(replicas: int, groups: int, copies: int, rows: int) -> None:
    """The groups of ranks share the experts, and the ranks of a group split each. Attention is in every DP rank."""
    share = shard(weights_of("deepseek-v3"), Layout(2, 1, replicas, groups), frozenset({"self_attn.o_proj"}))
    part = {weight.name: weight for block in share.blocks for weight in block.weights}
    experts = part["mlp.experts.0.up_proj"]
    assert (experts.copies, experts.rows) == (copies, rows)
    # 128 heads of 192 elements, and the output of 128 x 128 columns, which is split over all ranks.
    assert part["self_attn.q_b_proj"].rows == 128 * 192 // 2
    assert part["self_attn.o_proj"].parameters == 7168 * 128 * 128 // (2 * replicas)
    assert share.embedding.rows == weights_of("deepseek-v3").embedding.rows // 2


def test_an_empty_last_stage_alone_has_what_stands_after_the_layers() -> None:
    # With two layers and two devices, llama.cpp puts both layers on the first device and the output on the second.
    weights = specs.weights_of(load_model("llama-7b").head(2))
    assert weights is not None
    first, last = stage_weights(weights, ((0, 1), (2, 1)))
    assert [block.prefix for block in last.blocks] == [""]
    assert not any(block.prefix == "" for block in first.blocks)
    assert (first.embedding.rows, last.embedding.rows) == (32_000, 0)
