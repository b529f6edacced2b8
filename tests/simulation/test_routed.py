"""Routers: which replica gets a request, and what that does to the times."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

import kvcalc
from kvcalc.question.fields import ROUTERS
from kvcalc.simulation import routed, together
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.mixed import MixedReplica
from kvcalc.simulation.replicas.pool import BlockPool
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.server import Server
from kvcalc.simulation.results import Outcome, describe_times
from kvcalc.simulation.routed import PrefixAware, fleet_of
from tests.simulation import supply_of
from tests.simulation.cases import SCHEDULES, PieceTimes

LOAD: dict[str, Any] = {"prompt_tokens": "lognormal:2000,0.8", "answer_tokens": "lognormal:250,0.8"}
LOADS: list[dict[str, Any]] = [{"requests_per_second": 50.0}, {"concurrency": 300}]


def simulated(**asked: Any) -> dict[str, Any]:
    document: Any = kvcalc.simulate(
        "llama-3.1-8b", "h100x4", tensor_parallel_size=1, **{**LOAD, "requests": 1000, **asked}
    )
    return dict(document)


def times(document: dict[str, Any], metric: str = "ttft") -> dict[str, float]:
    (found,) = (row for row in document["times"] if row["metric"] == metric)
    return {name: seconds for name, seconds in found.items() if name != "metric"}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_request_is_answered_once(router: str, load: dict[str, Any], engine: str) -> None:
    found = simulated(router=router, engine=engine, **load)
    assert found["results"]["requests"] == found["load"]["requests"] == 1000
    assert found["load"]["router"] == router
    assert found["hardware"]["replicas"] == 4


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("router", ["round-robin", "random"])
def test_replicas_that_know_nothing_of_each_other_may_run_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, router: str, engine: str
) -> None:
    """What the simulation of all replicas at once finds if it is used although it is not needed."""
    alone = simulated(router=router, engine=engine, requests_per_second=40.0)

    def together(supply: Any, number: int, make: Any, router: str, seed: int, block: Any, clients: Any) -> Any:
        return routed.Routed(supply, number, make, routed._KINDS[router](number, seed, block), clients)

    monkeypatch.setattr("kvcalc.simulation.play.fleet_of", together)
    both = simulated(router=router, engine=engine, requests_per_second=40.0)
    for metric in ("ttft", "tpot", "e2e"):
        assert times(both, metric) == pytest.approx(times(alone, metric), rel=1e-9)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_client_sends_its_next_request_when_it_has_the_answer(monkeypatch: pytest.MonkeyPatch, router: str) -> None:
    """The client gets an answer by the host time of the request later than the engine has it."""
    served: list[Request] = []

    def describe(outcome: Outcome) -> Any:
        served.extend(outcome.requests)
        return describe_times(outcome)

    monkeypatch.setattr("kvcalc.planning.answers.simulate.describe_times", describe)
    simulated(router=router, concurrency=12, requests=60)
    assert all(request.lag > 0 for request in served)
    ends = {(request.finish or 0.0) + request.lag for request in served}
    arrivals = sorted(request.arrival for request in served)
    assert arrivals[:12] == [0.0] * 12
    assert set(arrivals[12:]) < ends


def test_a_replica_with_an_answer_that_goes_on_gets_no_other_request() -> None:
    """The first answer goes on, and every other one ends before the next request arrives."""

    def make(arrivals: Arrivals) -> Server:
        # No step takes more than 2.3 seconds, and 2,000 of them take more than 800.
        return MixedReplica(Rules(SCHEDULES["vllm"], 100, 4), PieceTimes(Random(2)), BlockPool(None), arrivals)

    for router, numbers in (("least-loaded", [1, 8]), ("round-robin", [4, 5])):
        requests = [Request(0, 0.0, 10, 2000), *(Request(n, 100.0 * n, 10, 2) for n in range(1, 9))]
        fleet = fleet_of(supply_of(requests), 2, make, router)
        fleet.run(None)
        assert sorted(rank.finished for rank in fleet.ranks) == numbers
        assert max(request.finish or 0.0 for request in requests[1:]) < (requests[0].finish or 0.0)


def test_blocks_are_added_up_and_progress_is_told_while_replicas_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, list[tuple[int, int]]] = {}
    for every in (1, 2):
        monkeypatch.setattr(together, "_RECOUNT_EVERY", every)
        checked: list[int] = []

        class Counted(MixedReplica):
            def check(self, checked: list[int] = checked) -> None:
                checked.append(self.finished)

        def make(arrivals: Arrivals, kind: type[MixedReplica] = Counted) -> Server:
            return kind(Rules(SCHEDULES["vllm"], 100, 4), PieceTimes(Random(2)), BlockPool(None), arrivals)

        requests = [Request(number, 0.25 * number, 10, 2 + number) for number in range(9)]
        found = told.setdefault(every, [])
        fleet_of(supply_of(requests), 2, make, "least-loaded").run(None, lambda *done, found=found: found.append(done))
        assert len(checked) == 2 * (len(found) + 1)
    assert told[2] == told[1][1::2]
    assert told[1] == sorted(told[1])
    assert (told[1][0], told[1][-1]) == ((0, 9), (9, 9))


def test_random_waits_longest() -> None:
    """Requests at random come in groups that others do not have to wait for: 4 of 5 seeds at least."""
    worse = 0
    for seed in range(5):
        each = {
            name: times(simulated(router=name, requests_per_second=44.0, seed=seed))["p99_seconds"]
            for name in ("round-robin", "random", "least-loaded")
        }
        worse += each["random"] > max(each["round-robin"], each["least-loaded"])
    assert worse >= 4


def test_one_replica_needs_no_router() -> None:
    asked: dict[str, Any] = {"requests_per_second": 8.0, "requests": 200, "replicas": 1}
    first, *others = [times(simulated(router=router, **asked)) for router in ROUTERS]
    assert all(other == first for other in others)


def test_a_prefix_aware_router_finds_more_of_the_prompts(tmp_path: Path) -> None:
    """Conversations of their own, whose turns share all blocks but the last one."""
    rows = [
        {
            "timestamp": 1000 * (turn * 40 + talk * 1.0), "input_length": 512 * (turn + 2), "output_length": 64,
            "hash_ids": [1000 * talk + block for block in range(turn + 2)],
        }
        for turn in range(8) for talk in range(37)
    ]  # fmt: skip
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    cached = {}
    for router in ROUTERS:
        found: Any = kvcalc.simulate("llama-3.1-8b", "h100x4", tensor_parallel_size=1, trace=str(file), router=router)
        cached[router] = found["results"]["cached_tokens"]
    assert cached["prefix-aware"] > 1.5 * max(cached["round-robin"], cached["random"])


def test_the_rules_of_the_prefix_aware_router() -> None:
    router = PrefixAware(3, 0, 100)

    def chosen(names: tuple[int, ...], tokens: int) -> int:
        place = router.choose(Request(0, 0.0, tokens, 1, 0, names))
        router.unfinished[place] += 1
        return place

    first = chosen((1, 2, 3), 300)
    assert chosen((1, 2, 4, 5), 410) == first  # 200 of 410 tokens
    assert chosen((1, 6, 7, 8, 9), 500) != first  # 100 of 500: to the one that was sent least
    router.unfinished = [0, 0, 0]
    router.unfinished[first] = 65
    assert chosen((1, 2, 3), 300) != first  # too far from equal


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--router", "randm"), "--router 'randm': not a router"),
        (("--router", "random", "--prefill-replicas", "1", "--transfer-bandwidth", "nvlink"), "get requests in turn"),
    ],
)
def test_what_is_refused(kvcalc: Any, options: tuple[str, ...], words: str) -> None:
    asked = ("simulate", "llama-3.1-8b", "--gpu", "h100x4", "--tp", "1", "--requests-per-second", "2")
    result = kvcalc(*asked, "--input-tokens", "100", "--output-tokens", "10", *options)
    assert result.status == 2
    assert words in result.err


def test_the_screen_names_the_router(kvcalc: Any) -> None:
    asked = (
        "simulate",
        "llama-3.1-8b",
        "--gpu",
        "h100x4",
        "--tp",
        "1",
        "--requests-per-second",
        "20",
        "--format",
        "human",
    )
    lengths = ("--input-tokens", "500", "--output-tokens", "50", "--requests", "100")
    assert "random router" in kvcalc(*asked, *lengths, "--router", "random").out
    assert "router" not in kvcalc(*asked, *lengths).out
