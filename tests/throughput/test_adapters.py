"""LoRA adapters in a step: launches, slots, adapters in use and the bytes that are read."""

from __future__ import annotations

import pytest

from kvcalc.model.spec import weights_of
from kvcalc.throughput.adapters import AdapterKernels, Adapters, adapted_products
from tests.conftest import loaded

KERNELS = AdapterKernels(3, 0.5, 2.0)


def test_every_layer_has_four_adapted_products_and_experts_have_two() -> None:
    """Q, K and V have one input, so they are one product, and so are gate and up."""
    for name, of_layer in (("llama-3.1-8b", 4), ("qwen3-30b-a3b", 4)):
        spec = loaded(name)
        weights = weights_of(spec)
        assert weights is not None
        assert adapted_products(weights) == of_layer * spec.num_layers


def test_slots_cost_whether_or_not_they_are_used_and_adapters_if_requests_use_them() -> None:
    adapters = Adapters(KERNELS, 1, 10, 0.0, ())
    assert adapters.launches == 30
    assert adapters.seconds(1, 1.0) == pytest.approx(10 * (0.5 + 2.0))
    assert adapters.seconds(64, 1.0) == pytest.approx(10 * (0.5 + 2.0))
    # Two requests use the same one of four adapters in a quarter of the steps.
    assert adapters._replace(slots=4).seconds(2, 1.0) == pytest.approx(10 * (4 * 0.5 + 1.75 * 2.0))


def test_an_adapter_in_use_is_read_and_of_its_experts_those_of_its_own_tokens() -> None:
    adapters = Adapters(AdapterKernels(3, 0.0, 0.0), 1, 10, 600.0, ((4, 1, 800.0),))
    assert adapters.seconds(1, 100.0) == pytest.approx(6 + 8 / 4)
    assert adapters.seconds(1000, 100.0) == pytest.approx(6 + 8)
