"""The judge of a plan: what is simulated how often, what is missed, and what is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.planning.plan.judge import STATISTICS, Finalist, Judge, Judged
from kvcalc.planning.plan.replicas import OnePool
from kvcalc.planning.plan.targets import Simulated, Targets

pytestmark = pytest.mark.settled

RATE = 10.0


class Known:
    """A simulation with known TTFTs: those of the seeds 0, 1, 2, ... in runs of 1,000 requests, and of long runs.

    The last one stays the same for all later seeds.
    """

    def __init__(self, seconds: list[float], long: list[float], seed: int = 0) -> None:
        self.seconds, self.long, self.seed, self.num_requests, self.trace = seconds, long, seed, None, None

    def seeded(self, more: int) -> Known:
        return Known(self.seconds, self.long, self.seed + more)

    def simulated(self, number: int) -> Simulated:
        later = min(self.seed - len(self.seconds), len(self.long) - 1)
        seconds = self.long[later] if number == 10_000 else self.seconds[self.seed]
        times: Any = {"ttft": {"mean": seconds}, "tpot": {"mean": 0.01}, "e2e": {"mean": 1.0}}
        return Simulated(times, number, 0, 256)


class Layout:
    key, numbers = "a layout", (1,)

    def in_flight(self, simulation: Known, targets: Targets) -> float:
        return 20.0

    def factors(self, targets: Targets) -> dict[str, tuple[float, float, float]]:
        return dict.fromkeys(("ttft", "tpot"), (0.5, 2.0, 1.0))

    def at(self, numbers: tuple[int, ...], targets: Targets, *, is_trace: bool) -> Layout:
        return self

    def run(self, simulation: Known, targets: Targets, number: int, step: float, *, is_alone: bool) -> Any:
        return self, simulation.simulated(number)


@pytest.mark.parametrize(
    ("targets", "num_requests"),
    [(Targets(8, None, max_ttft_seconds=1.0), None), (Targets(None, RATE, max_ttft_seconds=1.0), 1000)],
    ids=["clients", "asked"],
)
def test_a_closed_loop_and_a_number_that_was_asked_for_have_no_long_run(
    targets: Targets, num_requests: int | None
) -> None:
    simulation: Any = Known([0.5, 0.5], [])
    simulation.num_requests = num_requests
    judge = Judge(targets, simulation)
    found: Any = judge.confirm(judge.at(Layout(), (1,)))  # type: ignore[arg-type]
    assert (found.missed, found.judged.seeds, found.judged.simulated.requests) == (None, 2, 1000)


def test_a_run_in_which_requests_can_never_run_is_shown_and_no_long_one_in_its_place() -> None:
    class Refusing(Known):
        def seeded(self, more: int) -> Known:
            return Refusing(self.seconds, self.long, self.seed + more)

        def simulated(self, number: int) -> Simulated:
            return super().simulated(number)._replace(refused=int(self.seed == 1))

    judge = Judge(Targets(None, RATE, max_ttft_seconds=1.0), Refusing([0.5, 0.4], [0.5]))  # type: ignore[arg-type]
    found: Any = judge.confirm(judge.at(Layout(), (1,)))  # type: ignore[arg-type]
    assert (found.missed, found.judged.seeds) == ("1 of 1,000 requests are too long for the cache", 2)


def confirmed(seconds: list[float], long: list[float]) -> Any:
    judge = Judge(Targets(None, RATE, max_ttft_seconds=1.0), Known(seconds, long))  # type: ignore[arg-type]
    found = judge.at(Layout(), (1,))  # type: ignore[arg-type]
    assert found is not None
    return judge.confirm(found)


@pytest.mark.parametrize(
    ("seconds", "long", "missed", "seeds"),
    [
        ([0.5, 0.6], [0.55], None, 3),  # far below the limit: two short runs and a long one
        ([0.9, 0.92, 0.88, 0.89], [0.9], None, 5),
        ([0.5, 0.6], [1.1], "TTFT mean is 1.1 s and the limit is 1 s", 3),  # a queue that grows slowly
        ([0.8, 1.05, 0.75, 0.9], [0.85], None, 5),  # a long run differs less from the others than a short one
        ([0.98, 0.7, 0.99, 0.6], [0.999], "TTFT mean with other seeds is 1.11 s and the limit is 1 s", 8),
        ([1.0, 1.0, 1.0, 1.0], [0.9], None, 5),
        # Where the short runs already say that one in many misses, no long one is needed.
        ([1.0, 0.78, 1.0, 1.0], [0.5], "TTFT mean with other seeds is 1.01 s and the limit is 1 s", 4),
        ([0.9, 1.2, 1.1, 1.3], [0.95], "TTFT mean is 1.3 s and the limit is 1 s", 4),
        ([0.9, 0.9, 0.9, 0.9], [0.95, 0.96], None, 8),  # close to the limit: four long runs
        ([0.9, 0.9, 0.9, 0.9], [0.95, 1.2], "TTFT mean is 1.2 s and the limit is 1 s", 6),
        ([0.6, 0.7], [0.956, 0.967, 1.27], "TTFT mean is 1.27 s and the limit is 1 s", 5),
        ([0.9, 0.9, 0.9, 0.9], [0.99, 0.9], "TTFT mean with other seeds is 1.05 s and the limit is 1 s", 8),
    ],
)
def test_nearly_all_runs_must_meet_the_targets(
    seconds: list[float], long: list[float], missed: str | None, seeds: int
) -> None:
    found = confirmed(seconds, long)
    assert (found.missed, found.judged.seeds) == (missed, seeds)


@pytest.mark.parametrize(
    ("metric", "more", "before", "missed"),
    [
        ("ttft", 0.2, None, "TTFT mean with other seeds is 2.2 s and the limit is 2 s"),
        ("tpot", 0.2, None, "TPOT mean with other seeds is 110 ms and the limit is 100 ms"),
        ("tpot", 0.1, None, None), ("ttft", 0.2, "late", "late"),
    ],
)  # fmt: skip
def test_other_seeds_may_miss_the_target_that_is_closest(
    metric: str, more: float, before: str | None, missed: str | None
) -> None:
    """The mean share of both runs, by their requests, is 0.9, and `more` is how much runs differ."""
    judge = Judge(Targets(None, RATE, 2.0, 0.1), Known([0.5], []))  # type: ignore[arg-type]
    runs = [
        Finalist(Layout(), Judged(Simulated({}, number, 0, 1), missed=before, worst=worst, worst_metric=metric), False)
        for worst, number in ((0.8, 1000), (0.925, 4000))
    ]
    found = judge._with_others(runs[0], runs, more)
    assert (found.missed, found.judged.seeds, found.judged.worst) == (missed, 2, 0.8)


@pytest.mark.parametrize(
    ("percentile", "clients", "in_flight", "number"),
    [
        (99, None, 1.0, 3_000), (95, None, 1.0, 1_000), (None, None, 1.0, 1_000),  # 30 beyond, and at least 1,000
        (99, 8, 1.0, 3_000),  # for clients too
        (99, None, 400.0, 4_000),  # ten times those that run at once
        (None, None, 400.1, 1_601),  # four times for means
        (None, None, 1e6, 50_000),
    ],
)  # fmt: skip
def test_a_run_is_long_enough_for_the_percentile_and_for_many_turnovers(
    percentile: int | None, clients: int | None, in_flight: float, number: int
) -> None:
    targets = Targets(clients, None if clients else RATE, 1.0, ttft_percentile=percentile)
    simulation: Any = Known([0.5], [])
    assert Judge(targets, simulation)._count(in_flight) == number
    simulation.num_requests = 77
    assert Judge(targets, simulation)._count(in_flight) == 77


class Counted(Layout):
    """A layout of some replicas, of which three are enough, and the runs of it."""

    def __init__(self, replicas: int, runs: list[tuple[int, bool]]) -> None:
        self.numbers, self.runs, self.num_devices, self.cost_per_hour = (replicas,), runs, 2 * replicas, None

    def at(self, numbers: tuple[int, ...], targets: Targets, *, is_trace: bool) -> Any:
        return Counted(numbers[0], self.runs) if numbers[0] else None

    def alone(self) -> Counted:
        return Counted(1, self.runs)

    def run(self, simulation: Known, targets: Targets, number: int, step: float, *, is_alone: bool) -> Any:
        self.runs.append((self.numbers[0], is_alone))
        seconds = 1.0 if self.numbers[0] >= 3 or is_alone else 1.1
        times: Any = {name: dict.fromkeys(STATISTICS, seconds) for name in ("ttft", "tpot", "e2e")}
        return self, Simulated(times, number, 0, 256)

    def describe(self, row: dict[str, Any], *, is_alone: bool) -> dict[str, Any]:
        return {"replicas": self.numbers[0], "is_alone": is_alone, **row}


def counting() -> tuple[Judge, Any, list[tuple[int, bool]]]:
    runs: list[tuple[int, bool]] = []
    judge = Judge(Targets(None, RATE, max_ttft_seconds=1.0), Known([0.5], []))  # type: ignore[arg-type]
    return judge, Counted(1, runs), runs


def test_a_layout_is_simulated_once_with_the_same_numbers() -> None:
    judge, layout, runs = counting()
    for _ in range(2):
        judge.at(layout, (2,))
        judge.alone(layout)
        assert judge.at(layout, (0,)) is None, "the short form has an endless queue there"
    assert runs == [(2, False), (1, True)]


@pytest.mark.parametrize("tried", [(1, 5, 3, 2, 4), (2, 3), (4, 2, 3, 1)])
def test_of_the_layouts_that_were_simulated_the_two_beside_the_limit_are_shown(tried: tuple[int, ...]) -> None:
    judge, layout, _ = counting()
    judge.alone(layout)
    for replicas in tried:
        judge.at(layout, (replicas,))
    rows: Any = sorted(judge.describe(), key=lambda row: row["num_devices"] or 0)
    assert [(row["replicas"], row["num_devices"], row["passes"]) for row in rows] == [(2, 4, False), (3, 6, True)]
    assert [row["reason"] for row in rows] == ["TTFT mean is 1.1 s and the limit is 1 s", None]
    assert {row["is_alone"] for row in rows} == {False}


def test_requests_alone_that_miss_a_target_are_shown_without_devices() -> None:
    judge, layout, _ = counting()
    judge = Judge(judge.targets._replace(max_ttft_seconds=0.9), judge.simulation)
    judge.alone(layout)
    (row,) = judge.describe()
    assert (row["num_devices"], row["passes"]) == (None, False)
    assert row["reason"] == "TTFT mean of requests alone is 1 s and the limit is 900 ms"


def test_what_was_simulated_of_a_row_is_told_if_it_was() -> None:
    judge, layout, _ = counting()
    overloaded: Any = Counted(0, [])
    assert judge.describe_limits(overloaded) == {}
    assert judge.describe_limits(layout) == {"simulated_ttft_seconds": 1.1, "simulated_requests": 1000}


@pytest.mark.parametrize(
    ("times", "found", "missed", "worst"),
    [
        ({"ttft": 2.0, "tpot": 0.1, "e2e": 5.0}, {}, None, ("ttft", 1.0)),  # just the limit
        ({"ttft": 2.2, "tpot": 0.25, "e2e": 5.0}, {}, "TPOT p90 is 250 ms and the limit is 100 ms", ("tpot", 2.5)),
        ({"ttft": 2.2, "tpot": 0.1, "e2e": 50.0}, {}, "E2E mean is 50 s and the limit is 10 s", ("e2e", 5.0)),
        ({"ttft": None, "tpot": 0.05, "e2e": 5.0}, {}, None, ("tpot", 0.5)),
        ({"ttft": 2.0, "tpot": 0.1, "e2e": 5.0}, {"refused": 3}, "3 of 1,000 requests are too long for the cache", ()),
        ({"ttft": 2.0, "tpot": 0.1, "e2e": 5.0}, {"backlog_seconds": 0.0}, "overloaded: it does not keep up", ()),
        ({"ttft": 9.0, "tpot": 0.1, "e2e": 5.0}, {"backlog_seconds": 9.0}, "overloaded: it does not keep up", ()),
    ],
)
def test_the_target_that_is_missed_most_is_the_reason(
    times: dict[str, float | None], found: dict[str, Any], missed: str | None, worst: tuple[Any, ...]
) -> None:
    """TTFT is judged at twice the simulated time."""
    targets = Targets(None, RATE, 4.0, 0.1, max_e2e_seconds=10.0, tpot_percentile=90)
    each: Any = {name: {"mean": seconds, "p90": seconds} for name, seconds in times.items()}
    judged = Judged(Simulated(each, 1000, 0, 256)._replace(**found), 1.0, 2.0).against(targets, is_alone=False)
    assert judged.missed == missed or (missed and str(judged.missed).startswith(missed))
    assert not worst or (judged.worst_metric, judged.worst) == worst
    assert judged.is_stuck is bool(found)


# 200 clients with equal lengths come in groups, and the last group waits for the steps of the others.
GROUPS: Any = {"input_tokens": "fixed:500", "output_tokens": "fixed:120", "concurrency": 200, "engine": "tensorrt-llm"}


def test_a_trace_has_one_run_and_what_is_confirmed_is_not_confirmed_again() -> None:
    class Recorded(Known):
        def simulated(self, number: int) -> Simulated:
            return Known(self.seconds, self.long).simulated(number)

    trace: Any = Recorded([0.9, 0.9, 0.9, 0.9], [0.9])
    for seed, is_confirmed in ((None, False), (0, True)):
        trace.seed = seed
        judge = Judge(Targets(None, RATE, max_ttft_seconds=1.0), trace)
        found = judge.at(Layout(), (1,))  # type: ignore[arg-type]
        assert found is not None
        once = judge.confirm(found)
        assert (once is found) is not is_confirmed
        assert judge.confirm(once) is once


def test_a_layout_that_has_no_room_for_a_spare_replica_is_left_out() -> None:
    asked: Any = {"input_tokens": 500, "output_tokens": 100, "requests_per_second": 0.01, "max_ttft_seconds": 1.0}
    best = kvcalc.plan("llama-3.1-8b", ["h100"], ttft_percentile=90, spare_replicas=1, **asked)["best"]
    assert best is not None
    assert (best["replicas"], best["num_devices"]) == (2, 2)


def test_clients_with_equal_answers_may_end_together() -> None:
    """The short form says 230 ms for one replica, and its simulation 579 ms: all prompts come at once."""
    asked: dict[str, Any] = {"engine": "tensorrt-llm", "concurrency": 64}
    found = kvcalc.plan(
        "qwen3-235b-a22b", ["h100"], input_tokens=500, output_tokens=300, max_ttft_seconds=0.5, **asked
    )["best"]
    assert found is not None
    layout: Any = {name: found[name] for name in ("tensor_parallel_size", "data_parallel_size", "replicas")}
    speed = kvcalc.SpeedQuestion(expert_parallel_size=found["expert_parallel_size"])
    simulated = kvcalc.simulate(
        "qwen3-235b-a22b", "h100", prompt_tokens=500, answer_tokens=300, requests=2000, cold=False, speed=speed,
        router="random", **asked, **layout,
    )  # fmt: skip
    (ttft,) = (row for row in simulated["times"] if row["metric"] == "ttft")
    assert ttft["mean_seconds"] is not None
    assert ttft["mean_seconds"] <= 0.5


def test_the_printed_limit_is_that_of_the_simulation() -> None:
    """108 requests fit at full length, and more run while others are shorter."""
    asked: dict[str, Any] = {"input_tokens": 1500, "output_tokens": 300, "max_ttft_seconds": 0.4, "confidence": 50}
    best: Any = kvcalc.plan("gemma-3-27b", ["b200"], concurrency=200, **asked)["best"]
    words = best["vllm"].split()
    assert int(words[words.index("--max-num-seqs") + 1]) == 200


@pytest.mark.parametrize(
    ("targets", "router", "trace", "replicas", "together"),
    [
        (Targets(None, RATE), "random", None, 4, 4),
        (Targets(None, RATE), "random", None, 5, 1),  # requests at random come to each replica at random
        (Targets(500, None), "random", None, 7, 7),
        (Targets(500, None), "random", None, 40, 8),  # a router sends some replicas more clients than others
        (Targets(None, RATE), "round-robin", None, 40, 40), (Targets(None, RATE), "random", "a trace", 40, 40),
    ],
)  # fmt: skip
def test_of_many_replicas_a_few_are_simulated_with_their_share(
    targets: Targets, router: str, trace: str | None, replicas: int, together: int
) -> None:
    one = OnePool(*(None,) * 3, replicas, None)  # type: ignore[arg-type]
    simulation: Any = SimpleNamespace(router=router, trace=trace, num_requests=None)
    assert one.together(simulation, targets) == together
    simulation.num_requests = 100
    assert one.together(simulation, targets) == replicas
    share = targets.of_share(together / replicas)
    if targets.concurrency is None:
        assert share.requests_per_second == RATE * together / replicas
    else:
        assert share.concurrency == 500 * together // replicas


@pytest.mark.nightly  # tests/recorded asks about many such pools
def test_pools_that_a_simulation_finds_too_slow_are_not_taken() -> None:
    """The short form promises 341 ms for three prefill instances of DP ranks, and their simulation misses 500 ms."""
    asked: dict[str, Any] = {"engine": "vllm", "transfer": "infiniband-400g"}
    found: Any = kvcalc.plan(
        "mixtral-8x7b", ["a100-80gb"], input_tokens=3000, output_tokens=120, requests_per_second=25.0,
        max_ttft_seconds=0.5, disaggregate=True, **asked,
    )  # fmt: skip
    (pools,) = (row["disaggregated"] for row in found["plans"] if row["disaggregated"])
    prefill, decode = pools["prefill"], pools["decode"]
    assert prefill["instances"] == 4
    simulated = kvcalc.simulate(
        "mixtral-8x7b", "a100-80gb", prompt_tokens=3000, answer_tokens=120, requests=1000,
        requests_per_second=25.0, seed=7, replicas=decode["instances"], prefill_replicas=prefill["instances"],
        tensor_parallel_size=decode["tensor_parallel_size"], data_parallel_size=decode["data_parallel_size"],
        speed=kvcalc.SpeedQuestion(expert_parallel_size=decode["expert_parallel_size"]),
        prefill_tensor_parallel_size=prefill["tensor_parallel_size"],
        prefill_data_parallel_size=prefill["data_parallel_size"],
        prefill_expert_parallel_size=prefill["expert_parallel_size"], **asked,
    )  # fmt: skip
    (ttft,) = (row for row in simulated["times"] if row["metric"] == "ttft")
    assert ttft["mean_seconds"] is not None
    assert ttft["mean_seconds"] <= 0.5


@pytest.mark.parametrize("limit", [{"max_tpot_seconds": 0.05}, {"max_ttft_seconds": 0.6, "max_tpot_seconds": 0.05}])
def test_the_times_that_are_printed_at_the_estimate_are_those_that_were_judged(limit: dict[str, Any]) -> None:
    """The plan printed a TPOT of 51.2 ms under a limit of 50 ms: that of a shorter run."""
    best = kvcalc.plan(
        "mistral-small-24b", ["h200"], input_tokens=1908, output_tokens=61, concurrency=74, confidence=50,
        engine="vllm", **limit,
    )["best"]  # fmt: skip
    assert best is not None
    assert best["tpot_seconds"] == pytest.approx(best["simulated_tpot_seconds"])
    assert (best["tpot_seconds"] or 1.0) <= 0.05
