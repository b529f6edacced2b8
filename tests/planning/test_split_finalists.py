"""Targets for percentiles with separate instances: the smallest pools that keep to them in `kvcalc simulate`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.planning.plan.finalists import _larger
from kvcalc.planning.plan.planned import PlannedLoad
from tests.test_schema import check

MODEL, LINK = "llama-3.1-8b", "infiniband-400g"
RATE: dict[str, Any] = {"requests_per_second": 20.0, "requests": 600}
LENGTHS = (2048, 300)


def planned(**asked: Any) -> tuple[Any, Any]:
    """The document, and its row with separate instances."""
    document: Any = kvcalc.plan(
        MODEL, ["h100"], input_tokens=LENGTHS[0], output_tokens=LENGTHS[1], disaggregate=True, transfer=LINK, **asked
    )
    check(document, "plan")
    *_, row = [row for row in document["plans"] if row["disaggregated"] or not row["replicas"]]
    return document, row


def simulated(pools: Any, load: dict[str, Any], factor: float) -> dict[str, Any]:
    """The rows of `times` of a simulation of its own, by metric."""
    prefill, decode = pools["prefill"], pools["decode"]
    found = kvcalc.simulate(
        MODEL, "h100", prompt_tokens=LENGTHS[0], answer_tokens=LENGTHS[1], replicas=decode["instances"],
        tensor_parallel_size=decode["tensor_parallel_size"], prefill_replicas=prefill["instances"],
        prefill_tensor_parallel_size=prefill["tensor_parallel_size"], transfer=LINK, step_factor=factor, cold=False,
        **load,
    )  # fmt: skip
    return {times["metric"]: times for times in found["times"]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("load", "confidence"), [(RATE, 80), ({"concurrency": 48, "requests": 600}, 50)], ids=["rate", "clients"]
)
def test_the_pools_are_those_whose_simulated_percentiles_meet_the_targets(
    load: dict[str, Any], confidence: int
) -> None:
    limits = {"max_ttft_seconds": 0.9, "max_tpot_seconds": 0.014}
    document, row = planned(**load, **limits, ttft_percentile=90, tpot_percentile=95, confidence=confidence)
    pools = row["disaggregated"]
    for finalist in document["finalists"]:
        if finalist["disaggregated"] is None:
            continue
        assert (finalist["step_factor"] > 1) == (confidence == 80)
        if finalist["num_devices"] is None:
            continue
        times = simulated(finalist["disaggregated"], {**load, "seed": finalist["seed"]}, finalist["step_factor"])
        ttft, tpot = times["ttft"]["p90_seconds"] * finalist["ttft_factor"], times["tpot"]["p95_seconds"]
        assert (finalist["ttft_p90_seconds"], finalist["tpot_p95_seconds"]) == pytest.approx((ttft, tpot))
        is_met = ttft <= limits["max_ttft_seconds"] and tpot <= limits["max_tpot_seconds"]
        assert finalist["passes"] == (is_met and "other seeds" not in (finalist["reason"] or ""))
        same = all(
            finalist["disaggregated"][role][key] == pools[role][key]
            for role in ("prefill", "decode")
            for key in ("instances", "tensor_parallel_size")
        )
        if same:
            assert finalist["passes"]
            assert (row["simulated_ttft_seconds"], row["simulated_tpot_seconds"]) == pytest.approx((ttft, tpot))
            break
    else:
        pytest.fail("the row is not among the layouts that were simulated")


@pytest.mark.settled
@pytest.mark.long
def test_no_smaller_pools_would_pass() -> None:
    limit = 0.25
    _, row = planned(**RATE, max_ttft_seconds=limit, ttft_percentile=90, confidence=50)
    assert row["num_devices"] == 5
    tried = 0
    for sizes in ((1, 1), (1, 2), (2, 1)):
        for prefills in (1, 2, 3):
            for decodes in (1, 2, 3):
                if prefills * sizes[0] + decodes * sizes[1] < row["num_devices"]:
                    pools = {
                        role: {"instances": number, "tensor_parallel_size": size}
                        for role, number, size in zip(("prefill", "decode"), (prefills, decodes), sizes)
                    }
                    runs = [simulated(pools, {**RATE, "seed": seed}, 1.0)["ttft"] for seed in range(3)]
                    assert max(times["p90_seconds"] for times in runs) > 0.98 * limit, pools
                    tried += 1
    assert tried == 10


def test_a_target_that_one_request_misses_is_named() -> None:
    document, row = planned(**RATE, max_ttft_seconds=0.02, ttft_percentile=50)
    assert "TTFT p50 of requests alone is" in row["reason"]
    alone = [one for one in document["finalists"] if one["disaggregated"] is not None]
    assert {one["disaggregated"]["prefill"]["instances"] for one in alone} == {None}


def test_pools_are_simulated_once_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that the short form chooses are confirmed, and then simulated for their row: the same runs."""
    runs: list[tuple[Any, ...]] = []

    def run_pools(load: PlannedLoad, pools: Any, targets: Any, num_requests: int, step_factor: float) -> Any:
        runs.append((pools.numbers, num_requests, step_factor, load.seed))
        return simulate_pools(load, pools, targets, num_requests, step_factor)

    simulate_pools = PlannedLoad.run_pools
    monkeypatch.setattr(PlannedLoad, "run_pools", run_pools)
    planned(**RATE, max_ttft_seconds=0.9, max_tpot_seconds=0.05, confidence=50, simulate=1)
    assert runs
    assert len(set(runs)) == len(runs)


@pytest.mark.parametrize(("numbers", "metric", "tried"), [
    ((1, 1), "ttft", [(2, 1), (1, 2)]), ((3, 2), "tpot", [(3, 3), (4, 2)]), ((9, 17), "ttft", [(11, 17), (9, 21)]),
])  # fmt: skip
def test_larger_pools_have_a_quarter_more_of_what_is_missed_first(
    numbers: tuple[int, int], metric: str, tried: list[tuple[int, int]]
) -> None:
    asked: list[tuple[int, int]] = []
    judged = SimpleNamespace(worst_metric=metric, worst=2.0, is_stuck=False)

    def at(_: object, numbers: tuple[int, int]) -> Any:
        asked.append(numbers)
        return SimpleNamespace(missed="it", judged=SimpleNamespace(worst=1.99), layout=numbers)

    found: Any = SimpleNamespace(layout=SimpleNamespace(numbers=numbers), judged=judged)
    guess: Any = SimpleNamespace(allows=lambda *_: True)
    judge: Any = SimpleNamespace(at=at)
    larger: Any = _larger(judge, guess, found, None)
    assert asked == tried
    assert larger.layout == tried[0], "if none helps, the first one"


@pytest.mark.parametrize(("capacities", "first"), [((2.0, 5.0), (2, 1)), ((5.0, 2.0), (1, 2))])
def test_pools_that_do_not_keep_up_are_larger_where_they_are_busier(
    capacities: tuple[float, float], first: tuple[int, int]
) -> None:
    """The only limit is on TPOT, which is short while requests wait for a prefill instance."""
    judged = SimpleNamespace(worst_metric="tpot", worst=0.5, is_stuck=True)
    found: Any = SimpleNamespace(layout=SimpleNamespace(numbers=(1, 1)), judged=judged)
    pair = SimpleNamespace(capacities=lambda *numbers: capacities if numbers == (1, 1) else None)
    # Without a dearer layout, one of each kind is allowed.
    guess: Any = SimpleNamespace(allows=lambda _, most: most is None, pair=pair)

    def at(_: object, numbers: tuple[int, int]) -> Any:
        return SimpleNamespace(missed=None, layout=SimpleNamespace(numbers=numbers, weight=sum(numbers)))

    judge: Any = SimpleNamespace(at=at)
    larger: Any = _larger(judge, guess, found, None)
    assert larger.layout.numbers == first


@pytest.mark.parametrize(("meets", "chosen"), [({(5, 2), (4, 3)}, (4, 3)), ({(5, 2)}, (5, 2))])
def test_of_two_kinds_that_both_meet_the_target_the_lighter_one_is_larger(
    meets: set[tuple[int, int]], chosen: tuple[int, int]
) -> None:
    """A prefill instance has ten devices and a decode instance one."""

    def weight(numbers: tuple[int, int]) -> int:
        return 10 * numbers[0] + numbers[1]

    def at(_: object, numbers: tuple[int, int]) -> Any:
        layout = SimpleNamespace(numbers=numbers, weight=weight(numbers))
        missed = None if numbers in meets else "late"
        return SimpleNamespace(missed=missed, layout=layout, judged=SimpleNamespace(worst=1.1))

    judged = SimpleNamespace(worst_metric="ttft", worst=2.0, is_stuck=False)
    found: Any = SimpleNamespace(layout=SimpleNamespace(numbers=(4, 2)), judged=judged)
    guess: Any = SimpleNamespace(allows=lambda numbers, most: most is None or weight(numbers) <= most)
    judge: Any = SimpleNamespace(at=at)
    larger: Any = _larger(judge, guess, found, None)
    assert larger.layout.numbers == chosen
