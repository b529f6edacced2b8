"""Rotary positions: lengths do not change, and products only depend on the distance."""

from __future__ import annotations

import pytest
import torch

from kvcalc.attention.rope import RotaryEmbedding


def test_a_rotation_keeps_lengths_and_position_zero_changes_nothing() -> None:
    rope, x = RotaryEmbedding(16), torch.randn(2, 3, 5, 16)
    turned = rope(x, 0)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])
    assert not torch.allclose(turned[:, :, 1:], x[:, :, 1:])


def test_products_of_query_and_key_depend_on_their_distance_alone() -> None:
    rope, q, k = RotaryEmbedding(16), torch.randn(1, 16), torch.randn(1, 16)

    def product(i: int, j: int) -> float:
        return float(rope(q, i) @ rope(k, j).T)

    assert product(3, 1) == pytest.approx(product(103, 101), abs=1e-4)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-4)


def test_dimensions_beyond_rope_dim_pass() -> None:
    x = torch.randn(4, 24)
    turned = RotaryEmbedding(8)(x, 0)
    assert torch.equal(turned[:, 8:], x[:, 8:])
    assert not torch.equal(turned[1:, :8], x[1:, :8])


def test_dtype_is_kept_and_odd_widths_are_refused() -> None:
    assert RotaryEmbedding(8)(torch.randn(2, 8, dtype=torch.bfloat16), 0).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="pairs"):
        RotaryEmbedding(7)


def test_angles_are_computed_once_for_the_layers_of_a_step() -> None:
    ropes = [RotaryEmbedding(8), RotaryEmbedding(8), RotaryEmbedding(8, theta=1e6)]
    first, again, other = (rope.rotation(7, 1, torch.bfloat16)[0] for rope in ropes)
    assert again is first
    assert not torch.equal(other, first)
    assert ropes[0].rotation(8, 1, torch.bfloat16)[0] is not first
    assert ropes[0].rotation(7, 1, torch.float32)[0].dtype == torch.float32
    torch.testing.assert_close(
        ropes[0].rotation(0, 9, torch.float32)[1][7], ropes[1].rotation(7, 1, torch.float32)[1][0]
    )
