"""Power and energy: what they follow from, and where they are not known."""

from __future__ import annotations

import math
from typing import Any

import pytest

import kvcalc
from kvcalc.throughput.hardware import find_devices, find_gpu, own_gpu
from kvcalc.throughput.power import energy_per_token
from tests.documents import estimate

H100 = find_gpu("h100")


def energy(compute_share: float, rate: float = 100.0, devices: int = 1, gpu: str = "h100") -> Any:
    found = energy_per_token(find_gpu(gpu), devices, compute_share, rate, (1.0, 1.0))
    assert found is not None
    return found


def test_a_step_bound_by_operations_draws_the_tdp() -> None:
    assert H100.tdp_watts == 700
    assert energy(1.0).watts == pytest.approx(700)
    assert energy(0.0).watts == pytest.approx(700 * (0.11 + 0.89 * 0.73))
    assert energy(0.0).watts < energy(0.5).watts < energy(1.0).watts
    assert energy(1.0, devices=4).watts == pytest.approx(2800)


def test_energy_is_power_times_time() -> None:
    found = energy(1.0, rate=350.0)
    assert found.joules_per_token == pytest.approx(2.0)
    # A kWh is 3.6 million joules.
    assert found.kwh_per_million_tokens == pytest.approx(2.0 / 3.6)


def test_the_range_has_the_power_and_the_time() -> None:
    alone = energy(0.5)
    assert alone.low_joules_per_token < alone.joules_per_token < alone.high_joules_per_token
    timed = energy_per_token(H100, 1, 0.5, 100.0, (0.8, 1.3))
    assert timed is not None
    assert timed.low_joules_per_token < alone.low_joules_per_token
    assert timed.high_joules_per_token > alone.high_joules_per_token
    # Independent errors add up as the legs of a triangle, so the range is narrower than the product.
    high = math.log(timed.high_joules_per_token / timed.joules_per_token)
    assert high < math.log(alone.high_joules_per_token / alone.joules_per_token) + math.log(1.3)


def test_another_kind_of_device_has_a_wider_range() -> None:
    def width(gpu: str) -> float:
        found = energy(0.5, gpu=gpu)
        return float(found.high_joules_per_token / found.low_joules_per_token)

    assert width("h200") == pytest.approx(width("h100"))
    assert width("rtx-4090") == pytest.approx(width("b200"))
    assert width("h100") < width("b200")


def test_without_a_tdp_it_is_not_known() -> None:
    own = own_gpu(None, 80 * 10**9, 3 * 10**12, 10**15)
    assert energy_per_token(own, 1, 0.5, 100.0, (1.0, 1.0)) is None


def ask(**more: Any) -> dict[str, Any]:
    found: dict[str, Any] = estimate(
        kvcalc.load_model("llama-3.1-70b"), devices=find_devices("h100x4"), engine="vllm", **more
    )["throughput"]
    return found


def test_the_document_has_the_energy_of_a_step() -> None:
    found = ask(context_tokens=2048, batch_size=64)
    part = found["energy"]
    assert part["joules_per_token"] == pytest.approx(part["watts"] * found["decode_step_seconds"] / 64)
    assert 4 * 0.7 * 700 < part["watts"] < 4 * 700
    assert part["kwh_per_million_tokens"] == pytest.approx(part["joules_per_token"] / 3.6)


def test_serving_counts_the_prompts() -> None:
    from kvcalc.question.question import SpeedQuestion

    found = ask(speed=SpeedQuestion(1, 2000, 200, 64))
    part, serving = found["energy"], found["serving"]
    assert part["joules_per_token"] == pytest.approx(part["watts"] / serving["tokens_per_second"])
    longer = ask(speed=SpeedQuestion(1, 200, 2000, 64))["energy"]
    assert longer["joules_per_token"] < part["joules_per_token"]
    assert longer["watts"] < part["watts"]


def test_larger_batches_need_less_energy_per_token() -> None:
    each = [ask(context_tokens=2048, batch_size=batch)["energy"]["joules_per_token"] for batch in (1, 8, 64)]
    assert each == sorted(each, reverse=True)


def test_plan_and_compare_have_it(kvcalc: Any) -> None:
    load = ("--input-tokens", "2k", "--output-tokens", "500", "--concurrency", "32")
    row = kvcalc("plan", "llama-3.1-8b", *load, "--gpu", "h100", "--json").json["best"]
    assert row["kwh_per_million_output_tokens"] == pytest.approx(row["watts"] / row["tokens_per_second"] / 3.6)
    rows = kvcalc("compare", "llama-3.2-1b", "llama-3.1-8b", "--gpu", "h200", "--json").json["models"]
    assert rows[0]["joules_per_token"] < rows[1]["joules_per_token"]


def test_the_table_shows_it(kvcalc: Any) -> None:
    shown = kvcalc("estimate", "llama-3.1-8b", "--gpu", "h100", "--engine", "vllm", "--format", "human").out
    assert "kWh per million" in shown
    own = ("--gpu-memory", "80GB", "--gpu-bandwidth", "3TB/s", "--flops", "900T")
    assert "kWh" not in kvcalc("estimate", "llama-3.1-8b", *own, "--format", "human").out


def test_a_power_limit_lowers_the_rates_more_the_lower_it_is() -> None:
    card = find_gpu("rtx-3090")
    assert own_gpu(card, None, None, None, power_limit_watts=350)._replace(source=card.source) == card
    at_280, at_250, at_200 = (own_gpu(card, None, None, None, power_limit_watts=watts) for watts in (280, 250, 200))
    assert at_280.bandwidth_bytes_per_second == round(card.bandwidth_bytes_per_second * 0.961)
    assert at_280.flops_per_second["fp16"] == round(card.flops_per_second["fp16"] * 0.95)
    assert at_280.tdp_watts == 280
    for less, more in ((at_200, at_250), (at_250, at_280)):
        assert less.bandwidth_bytes_per_second < more.bandwidth_bytes_per_second
        assert all(rate < more.flops_per_second[dtype] for dtype, rate in less.flops_per_second.items())
    # Multiplying loses more than reading, so prompts lose more than answers.
    for limited in (at_280, at_250, at_200):
        read = limited.bandwidth_bytes_per_second / card.bandwidth_bytes_per_second
        assert limited.flops_per_second["fp16"] / card.flops_per_second["fp16"] < read


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "rtx-3090", "--power-limit", "100W"), "known for 151 to 350 W"),
        (("--gpu", "rtx-3090", "--power-limit", "400"), "known for 151 to 350 W"),
        (("--gpu", "24GB", "--power-limit", "200W"), "needs a device with a known TDP"),
        (("--power-limit", "200W"), "--power-limit needs a device"),
        (("--gpu", "rtx-3090", "--power-limit", "half"), "not a power"),
    ],
)
def test_a_power_limit_without_a_known_loss_is_refused(kvcalc: Any, words: tuple[str, ...], message: str) -> None:
    refused = kvcalc("estimate", "llama-3-8b", *words)
    assert refused.status == 2
    assert message in refused.err


def test_a_prompt_is_slower_with_a_power_limit(kvcalc: Any) -> None:
    asked = ("estimate", "llama-3.1-8b", "--gpu", "rtx-3090", "--dtype", "int4", "--context", "4096", "--json")
    usual, less = (
        kvcalc(*asked, *more).json["throughput"]["prefill_seconds"] for more in ((), ("--power-limit", "220W"))
    )
    assert less > 1.2 * usual
