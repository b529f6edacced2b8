"""Pools on two kinds of device: their limits, why one pair costs more than another, and the power of both pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.planning.cases.lengths import one_length
from kvcalc.planning.plan.disaggregated.platforms import Link, PoolPlatforms
from kvcalc.planning.plan.disaggregated.split import describe_energy
from kvcalc.planning.plan.traffic import Platform
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


def test_points_have_no_more_devices_of_a_kind_than_there_are() -> None:
    document: Any = kvcalc.plan(
        "qwen3-32b", ["h100", kvcalc.find_devices("h200x2")], disaggregate=True, transfer="infiniband-400g",
        input_tokens=4096, output_tokens=300, requests_per_second=10.0, with_front=True, max_ttft_seconds=1.0,
        prices={"h100-sxm": 4.0, "h200-sxm": 3.0},
    )  # fmt: skip
    layouts = [point["layout"] for point in document["pareto"] if "+" in point["gpu"]]
    # `4 x tp 1 prefill on h100-sxm`: four instances of one device.
    parts = [part.split() for layout in layouts for part in layout.split(" + ")]
    used = [int(words[0]) * int(words[3]) for words in parts if words[-1] == "h200-sxm"]
    assert set(used) == {2}


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
        match=SimpleNamespace(
            prefills=2, decodes=3, times=SimpleNamespace(requests_per_second=6.0, prompts=4, decoding=0.5)
        ),
        prefill=SimpleNamespace(
            shape=SimpleNamespace(devices=2), rates=SimpleNamespace(seconds=lambda prompts: prompts / 8, stages=2)
        ),
        decode=SimpleNamespace(
            shape=SimpleNamespace(devices=4), speed=SimpleNamespace(model=SimpleNamespace(decode=step))
        ),
        tokens_per_second=600.0,
    )
    energy = describe_energy(found, one_length(1000, 200))
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
