"""How layers, weights and widths are divided over devices, on models small enough to count by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.memory.sharding import (
    Bounds,
    bounds_of,
    longer_before_last,
    longer_first,
    longer_last,
    shard,
    stage_weights,
    stages_of,
    whole_of,
    width_of,
)
from kvcalc.model.layout import Layout
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import (
    EMBEDDING,
    HEAD,
    Block,
    ModelWeights,
    Weight,
    experts,
    gated_mlp,
    linear,
    lookup,
    norm,
    other,
    replicated,
    router,
    unread,
)

CUTS = (longer_before_last, longer_first, longer_last)


@pytest.mark.parametrize("cut", CUTS)
@given(layers=st.integers(1, 300), stages=st.integers(1, 300))
def test_a_cut_gives_every_layer_to_one_stage_and_no_stage_two_more_than_another(
    cut: Callable[[int, int], list[int]], layers: int, stages: int
) -> None:
    sizes = cut(layers, stages)
    assert (len(sizes), sum(sizes)) == (stages, layers)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("layers", "before_last", "first"),
    [(8, [2, 2, 2, 2], [2, 2, 2, 2]), (9, [2, 2, 3, 2], [3, 2, 2, 2]), (10, [2, 3, 3, 2], [3, 3, 2, 2]),
     (11, [3, 3, 3, 2], [3, 3, 3, 2])],
)  # fmt: skip
def test_layers_that_remain_go_where_the_cut_says(layers: int, before_last: list[int], first: list[int]) -> None:
    assert longer_before_last(layers, 4) == before_last
    assert longer_first(layers, 4) == first
    assert longer_last(layers, 4) == first[::-1]


def test_bounds_are_first_and_last_layers_and_an_empty_stage_ends_before_it_begins() -> None:
    assert bounds_of([3]) == ((0, 2),)
    assert bounds_of([2, 0, 3]) == ((0, 1), (2, 1), (2, 4))


@pytest.mark.parametrize("bounds", [((0, 25),), ((0, 4), (5, 5), (6, 25)), ((0, 14), (15, 14), (15, 25))])
@pytest.mark.parametrize("name", ["gemma-2-2b", "gpt-3"])
def test_the_stages_of_a_model_are_its_layers_in_order(name: str, bounds: Bounds) -> None:
    spec = load_model(name)
    # Groups of identical layers are cut at the end of a stage: 26 single layers, or 96 layers of one kind.
    bounds = (*bounds[:-1], (bounds[-1][0], spec.num_layers - 1))

    def layers(share: ModelSpec) -> list[tuple[int, object]]:
        return [(number, group.caches) for group in share.layers for number in range(group.first, group.last + 1)]

    stages = stages_of(spec, bounds)
    assert [layer for stage in stages for layer in layers(stage)] == layers(spec)
    assert [stage.num_layers for stage in stages] == [last - first + 1 for first, last in bounds]
    assert [whole_of(stage) for stage in stages] == [spec] * len(bounds)
    assert whole_of(spec) is spec


# Four layers of width 8 with a dense MLP of 20, and a vocabulary of 101. The second and fourth layer have more weights.
EMBED = Weight("embed", 101, 8, EMBEDDING)
LAYER = Block("layers.{}.", range(4), (norm("norm", 8), *gated_mlp("mlp", 8, 20)))
SECOND = Block("layers.{}.", (1, 3), (replicated("attn.down", 8, 3),))
END = Block("", (0,), (norm("last_norm", 8), Weight("head", 101, 8, HEAD)))
MODEL = ModelWeights(EMBED, False, (LAYER, SECOND, END))


def held(weights: ModelWeights) -> dict[tuple[str, int], int]:
    """The rows of every weight in every layer."""
    return {
        (block.prefix + weight.name, number): weight.rows
        for block in weights.blocks
        for number in block.numbers
        for weight in block.weights
    }


def test_a_rank_holds_its_part_of_split_weights_rounded_up_and_all_of_whole_ones() -> None:
    share = shard(MODEL, Layout(3))
    assert share.embedding == EMBED._replace(rows=34)
    rows = {"norm": 8, "mlp.gate_proj": 7, "mlp.up_proj": 7, "mlp.down_proj": 3}
    expected = {(f"layers.{{}}.{name}", number): size for name, size in rows.items() for number in range(4)}
    expected |= {("layers.{}.attn.down", number): 3 for number in (1, 3)}
    assert held(share) == expected | {("last_norm", 0): 8, ("head", 0): 34}
    assert not share.tied
    assert shard(ModelWeights(EMBED, True, ()), Layout(2)).tied
    assert shard(MODEL, Layout(1)) is MODEL


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_holds_its_own_layers_and_the_ends_their_tables(tied: bool) -> None:
    model = ModelWeights(EMBED, tied, (LAYER, SECOND, END))
    first, middle, last = stage_weights(model, ((0, 0), (1, 2), (3, 3)))
    assert {number for _, number in held(first)} == {0}
    assert {number for _, number in held(middle)} == {1, 2}
    assert ("layers.{}.attn.down", 1) in held(middle)
    assert ("layers.{}.attn.down", 2) not in held(middle)
    # A block without a layer on this stage is dropped.
    assert [len(part.blocks) for part in (first, middle, last)] == [1, 2, 3]
    assert held(last).keys() == {key for key in held(model) if key[1] == 3} | {("last_norm", 0), ("head", 0)}
    # A tied embedding is on the first and the last stage.
    assert [part.embedding.rows for part in (first, middle, last)] == [101, 0, 101 if tied else 0]
    assert [part.tied for part in (first, middle, last)] == [tied] * 3
    (only,) = stage_weights(model, ((0, 3),))
    assert (held(only), only.embedding) == (held(model), EMBED)


def width(*weights: Weight, size: int = 1, numbers: tuple[int, ...] = (0, 1)) -> tuple[object, ...]:
    return width_of(ModelWeights(EMBED, False, (Block("layers.{}.", numbers, weights), END)), size)


def test_a_module_is_as_wide_as_all_that_enters_and_what_stands_in_the_middle() -> None:
    # Gate and up enter with 20 each, and down takes 20. Weights outside the layers, and weights that are not matrices,
    # do not count.
    assert width(*gated_mlp("mlp", 8, 20)) == (40 + 20, 8, 101, 2, False, 1)
    beside = (norm("n", 999), router("r", 8, 999), other("o", 999, 8), lookup("t", 999, 8))
    assert width(*gated_mlp("mlp", 8, 20), *beside) == (60, 8, 101, 2, False, 1)
    # Inputs and intermediate values are split separately, each rounded up.
    assert width(*gated_mlp("mlp", 8, 20), size=3)[0] == 14 + 7
    # The vocabulary and the hidden size are gathered.
    assert width(*gated_mlp("mlp", 8, 20), size=3)[1:3] == (8, 101)


def test_modules_follow_one_another_so_that_the_widest_counts() -> None:
    attention = (linear("attn.q", 8, 30), linear("attn.k", 8, 10), linear("attn.v", 8, 10), linear("attn.o", 30, 8))
    assert width(*gated_mlp("mlp", 8, 20), *attention)[0] == 50 + 30
    assert width(*attention, *gated_mlp("mlp", 8, 20))[0] == 50 + 30
    # Of two matrices inside a module, the wider input counts.
    assert width(linear("attn.q", 8, 30), linear("attn.a", 12, 5), linear("attn.b", 7, 5))[0] == 30 + 12
    # Only intermediate values, or only inputs.
    assert width(linear("attn.a", 12, 5))[0] == 12
    assert width(linear("attn.q", 8, 30))[0] == 30
    # An encoder is not part of a decode step.
    big = unread(Block("encoder.{}.", (0,), gated_mlp("mlp", 8, 999)))
    model = ModelWeights(EMBED, False, (big, Block("layers.{}.", (0,), gated_mlp("mlp", 8, 20))))
    assert width_of(model, 1).module_elements == 60


def test_experts_are_as_many_as_a_token_is_sent_to_and_give_out_a_row_each() -> None:
    routed = experts(gated_mlp("mlp.experts.0", 8, 20), 6, 2)
    assert width(*routed) == (2 * 40 + 2 * 20, 8, 101, 2, True, 1)
    # On eight ranks, 10 elements enter and two rows of 8 go out (16), with 5 intermediate elements.
    assert width(*routed, size=8)[0] == 2 * 8 + 5
    # Also if a token is sent to only one expert.
    assert width(*experts(gated_mlp("mlp.experts.0", 8, 20), 6, 1), size=8)[0] == 8 + 3
    assert width(*experts(gated_mlp("mlp.experts.0", 8, 20), 2, 1), size=8)[:5:4] == (8 + 3, True)
    # A module without experts has no separate output.
    assert width(*gated_mlp("mlp", 8, 20), size=8)[0] == 5 + 3
    # A model has experts if any of its layers has.
    mixed = ModelWeights(EMBED, False, (Block("a.{}.", (0,), routed), Block("a.{}.", (1,), gated_mlp("mlp", 8, 20))))
    assert width_of(mixed, 1).has_experts


def test_layers_are_counted_by_their_numbers() -> None:
    assert width(*gated_mlp("mlp", 8, 20), numbers=(0, 4))[3] == 5
    model = ModelWeights(EMBED, False, (Block("a.{}.", (0, 6), ()), Block("a.{}.", (2,), ()), Block("a.{}.", (), ())))
    assert width_of(model, 1) == (0, 8, 101, 7, False, 1)
    for block in (END, Block("a.{}.", (), ())):
        assert width_of(ModelWeights(EMBED, False, (block,)), 1).num_layers == 0
