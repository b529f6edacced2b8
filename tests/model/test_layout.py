"""How one replica is split: the devices it takes, the requests of its ranks, and the sizes that ask for it."""

from __future__ import annotations

from itertools import product

import pytest

from kvcalc.model.layout import Layout, LayoutAsked

LAYOUTS = [
    Layout(tensor, stages, dp_ranks, prompt_ranks=prompt_ranks, divides_experts=divides).with_experts(groups)
    for tensor, stages, dp_ranks, prompt_ranks, divides, groups in product(
        (1, 4), (1, 2), (1, 3), (1, 2), (True, False), (None, 1, 2)
    )
]


@pytest.mark.parametrize("layout", [Layout(2, 4, 3, prompt_ranks=5), Layout(30, 4)])
def test_a_replica_takes_the_devices_of_all_its_stages(layout: Layout) -> None:
    assert (layout.ranks, layout.num_devices) == (30, 120)


@pytest.mark.parametrize("dp_ranks", [1, 2, 5, 8])
def test_dp_ranks_divide_the_sequences_as_evenly_as_possible(dp_ranks: int) -> None:
    """Ranks without a sequence are left out, and copies that divide prompts hold the same sequences."""
    layout = Layout(1, 1, dp_ranks, prompt_ranks=2)
    for batch in range(1, 20):
        batches = layout.attention_batches(batch)
        assert sum(number * ranks for number, ranks in batches.items()) == batch
        assert max(batches) == layout.attention_batch(batch)
        assert max(batches) - min(batches) <= 1
        assert sum(batches.values()) == min(batch, dp_ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sizes_that_ask_for_a_layout_lead_to_it(layout: Layout) -> None:
    asked = layout.asked
    copies = asked.sizes._replace(prompt_ranks=layout.prompt_ranks, divides_experts=layout.divides_experts)
    assert copies.with_experts(asked.expert_parallel_size) == layout


def test_experts_are_whole_on_every_device_if_the_attention_is_copied() -> None:
    copied, plain, dense = Layout(2, 4, 3), Layout(2, 4), Layout(2, 4, 3, divides_experts=False)
    assert [layout.default_experts for layout in (copied, plain, dense)] == [6, 1, 1]
    assert [layout.has_whole_copies for layout in (copied, plain, dense)] == [False, False, True]
    assert dense.one_copy == Layout(2, 4, divides_experts=False)
    assert copied.one_copy == copied


def test_sizes_that_nobody_names_are_those_of_the_others() -> None:
    one, other = LayoutAsked(4, None, 2), LayoutAsked(8, 3, None, 16)
    assert one.over(other) == LayoutAsked(4, 3, 2, 16)
    assert LayoutAsked().sizes == Layout()
