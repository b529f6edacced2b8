"""Pools on two kinds of device: their limits, why one pair costs more than another, and the power of both pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcalc.planning.plan.disaggregated.platforms import Link, PoolPlatforms, joined_kinds
from kvcalc.planning.plan.disaggregated.rows import _in_order
from kvcalc.planning.plan.disaggregated.split import Busy, describe_energy
from kvcalc.planning.plan.targets import Targets
from kvcalc.planning.plan.traffic import Platform
from kvcalc.question.request_lengths import one_length
from kvcalc.throughput.hardware import find_gpu
from kvcalc.throughput.power import kwh_per_million, mean_watts

H100, H200 = find_gpu("h100"), find_gpu("h200")


def on(prefill: Any, decode: Any, prices: tuple[float | None, float | None]) -> PoolPlatforms:
    first, second = (Platform(gpu, 64, "vllm", True, price) for gpu, price in zip((prefill, decode), prices))
    return PoolPlatforms(first, second, Link(50 << 30, None), (1.0, 1.0), (64, 64, 64))


@pytest.mark.parametrize(
    ("kinds", "devices", "best", "reason"),
    [
        (on(H100, H100, (2.0, 2.0)), (4, 4), (2, 4), "8 devices instead of 6, 16.00 per hour"),
        (on(H100, H100, (None, None)), (4, 4), (2, 4), "8 devices instead of 6"),
        (on(H100, H100, (2.0, 2.0)), (4, 2), (2, 4), None),
        (on(H100, H200, (2.0, 3.0)), (1, 4), (3, 2), "14.00 per hour instead of 12.00"),
        (on(H100, H200, (2.0, 3.0)), (3, 2), (3, 2), None),
        (on(H100, H200, (2.0, 3.0)), (5, 0), (1, 3), "5 devices instead of 4"),
        (on(H100, H200, (2.0, None)), (1, 4), (3, 2), None),
        (on(H100, H200, (None, 3.0)), (3, 3), (3, 2), "6 devices instead of 5"),
    ],
)
def test_why_other_pools_cost_more(
    kinds: PoolPlatforms, devices: tuple[int, int], best: tuple[int, int], reason: str | None
) -> None:
    assert kinds.why_more(devices, (kinds, best)) == reason


@pytest.mark.parametrize("tdp", [True, False])
def test_the_power_of_both_pools(tdp: bool) -> None:
    """Each of 2 prefill instances gets 3 requests per second. Its two stages take 0.5 s for 4 prompts."""
    decode = H200 if tdp else H200._replace(tdp_watts=None)
    asked = []

    def step(batch: float, context: float) -> Any:
        asked.append((batch, context))
        return SimpleNamespace(compute=0.003, seconds=0.012)

    found: Any = SimpleNamespace(
        kinds=SimpleNamespace(prefill=SimpleNamespace(gpu=H100), decode=SimpleNamespace(gpu=decode)),
        numbers=(2, 3),
        prefill=SimpleNamespace(
            shape=SimpleNamespace(num_devices=2), rates=SimpleNamespace(seconds=lambda prompts: prompts / 8, stages=2)
        ),
        decode=SimpleNamespace(
            shape=SimpleNamespace(num_devices=4), speed=SimpleNamespace(model=SimpleNamespace(decode=step))
        ),
    )
    energy = describe_energy(found, Busy(6.0, 4, 0.5, (4, 1)), one_length(1000, 200), 600.0)
    assert asked == [(1.0, 1100.0)]
    if not tdp:
        assert energy == {}
        return
    prefill = mean_watts(H100, 4, 1.0, 3 * 0.5 / 4 / 2)
    decoding = mean_watts(H200, 12, 0.25, 0.5)
    assert prefill is not None
    assert decoding is not None
    assert energy["watts"] == pytest.approx(prefill + decoding)
    assert energy["kwh_per_million_output_tokens"] == pytest.approx(kwh_per_million((prefill + decoding) / 600))


def row_of(devices: int | None, tpot: float | None, tokens: float | None) -> Any:
    return {"fits": devices is not None, "num_devices": devices, "tpot_seconds": tpot, "tokens_per_second": tokens,
            "reason": "it does not fit", "next_mode": None}  # fmt: skip


@pytest.mark.parametrize(
    ("one", "two", "rate", "first", "why"),
    [
        (row_of(4, 0.02, 900.0), row_of(6, 0.01, 999.0), True, 0, "two pools: 6 devices instead of 4"),
        (row_of(6, 0.02, 900.0), row_of(4, 0.03, 800.0), False, 1, "one pool: 6 devices instead of 4"),
        # With a given rate, a shorter TPOT is better, and with clients more tokens.
        (row_of(4, 0.02, 900.0), row_of(4, 0.01, 800.0), True, 1, "same number of devices, TPOT 20 ms, not 10 ms"),
        (row_of(4, 0.02, 900.0), row_of(4, 0.01, 800.0), False, 0, "800 tokens per second, not 900"),
        (row_of(4, 0.02, 900.0), row_of(4, 0.01, 950.0), False, 1, "900 tokens per second, not 950"),
        (row_of(4, 0.02, 900.0), row_of(None, None, None), False, 0, "it does not fit"),
        (row_of(None, None, None), row_of(4, 0.02, 900.0), True, 1, "it does not fit"),
        (row_of(None, None, None), row_of(None, None, None), True, 0, None),
    ],
)  # fmt: skip
def test_one_pool_or_two_whichever_takes_fewer_devices(
    one: Any, two: Any, rate: bool, first: int, why: str | None
) -> None:
    targets = Targets(None, 3.0, None, None) if rate else Targets(8, None, None, None)
    rows = [dict(one), dict(two)]
    found = _in_order(Platform(H100, 8, "vllm"), rows[0], rows[1], targets)  # type: ignore[arg-type]
    assert found == [rows[first], rows[1 - first]]
    assert (found[0]["next_mode"] is None) == (why is None)
    assert why is None or str(found[0]["next_mode"]).endswith(why.partition(": ")[2] or why)
    assert found[1]["next_mode"] is None


def test_only_kinds_that_differ_and_read_each_others_cache_are_joined() -> None:
    a100, h100, h200 = (Platform(find_gpu(name), 8, "vllm") for name in ("a100", "h100", "h200"))
    names = [pair.names for pair in joined_kinds([a100, h100, h100, h200], "infiniband-400g", 16)]
    assert set(names) == {("h100-sxm", "h200-sxm"), ("h200-sxm", "h100-sxm")}
    assert joined_kinds([a100, h100], "infiniband-400g", 16) == joined_kinds([h100, h100], "pcie", 16) == []


@pytest.mark.parametrize(
    ("prices", "weights"),
    [((2.0, 3.0), [(2.0, 3.0), (3.0, 2.0)]), ((None, 3.0), [(1.0, 1.0)] * 2), ((2.0, None), [(1.0, 1.0)] * 2)],
)
def test_pairs_are_compared_by_cost_if_all_kinds_have_a_price(
    prices: tuple[float | None, float | None], weights: list[tuple[float, float]]
) -> None:
    kinds = [Platform(gpu, most, "vllm", True, price) for gpu, most, price in zip((H100, H200), (64, 8), prices)]
    found = joined_kinds(kinds, "infiniband-400g", 40)
    assert [pair.names for pair in found] == [("h100-sxm", "h200-sxm"), ("h200-sxm", "h100-sxm")]
    assert [pair.weights for pair in found] == weights
    assert [pair.most for pair in found] == [(64, 8, 40), (8, 64, 40)]
    assert joined_kinds(kinds, "nvlink", 40) == joined_kinds(kinds[:1], 50 << 30, 40) == []
    # The slower link of both joins them, and connects no more than one box over PCIe.
    (over_pcie, _) = joined_kinds([kind._replace(max_devices=64) for kind in kinds], "pcie", 40)
    assert over_pcie.most == (8, 8, 8)
