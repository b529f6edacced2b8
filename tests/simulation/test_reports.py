"""What is said about a trace's busiest minute and about the state over time, against counting one by one."""

from __future__ import annotations

from random import Random
from statistics import mean, pstdev
from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.planning.answers.simulate import describe_load, simulate
from kvcalc.question.lengths import lengths_of
from kvcalc.question.question import Question
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.load import Load, check_load
from kvcalc.simulation.loads.recorded import Recording
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.mixed import MixedReplica
from kvcalc.simulation.replicas.pool import BlockPool
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.timeline import Sample, TokenGaps
from kvcalc.simulation.results import Limits, Outcome, describe_results, describe_timeline, is_good, percentile
from kvcalc.traces.request import TraceRequest
from tests.simulation.cases import SCHEDULES, PieceTimes, make_case


def arrived(at: float) -> TraceRequest:
    return TraceRequest(at, 100, 10, None, None, 1)


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_busiest_minute_is_that_with_the_most_arrivals(seed: int, scale: float) -> None:
    draw = Random(seed)
    # Quiet hours with some minutes in which many requests arrive.
    arrivals = sorted(
        draw.choice((600.0, 3000.0, 3030.0)) + draw.uniform(0, 60) if draw.random() < 0.5 else draw.uniform(0, 7200)
        for _ in range(300)
    )
    recording = Recording("a trace", scale, [arrived(at) for at in arrivals], [])
    times = [at / scale for at in arrivals]
    most = max(sum(end - 60 < at <= end for at in times) for end in times)
    assert recording.peak_requests_per_second == most / 60 > 2 * recording.requests_per_second


def test_a_short_trace_has_its_mean_rate() -> None:
    recording = Recording("a trace", 1.0, [arrived(float(at)) for at in range(11)], [])
    assert (recording.duration_seconds, recording.peak_requests_per_second) == (10.0, 1.0)


@pytest.mark.parametrize("capacity", [None, 200])
def test_the_state_over_time_counts_every_request_once(capacity: int | None) -> None:
    draw = Random(2)
    requests = [Request(n, 0.5 * n, draw.randrange(1, 50), draw.randrange(1, 40)) for n in range(40)]
    replica = MixedReplica(
        Rules(SCHEDULES["vllm"], 100, 4), PieceTimes(draw), BlockPool(capacity, 1, range(210)), Arrivals(requests)
    )
    replica.run()
    rows: Any = describe_timeline([replica])
    assert [row["seconds"] for row in rows] == [pytest.approx(replica.now * n / 60) for n in range(1, 61)]
    for row in rows:
        here = [one for one in requests if one.arrival <= row["seconds"] and (one.finish or 0.0) > row["seconds"]]
        assert row["waiting_requests"] + row["running_requests"] <= len(here) + 4  # those of the step that ends
        assert row["running_requests"] <= 4
        assert (row["used_blocks"] is None) is (capacity is None)
        assert capacity is None or 0 <= row["used_blocks"] <= replica.pool.most_used <= capacity
    assert any(row["waiting_requests"] for row in rows)
    assert any(row["running_requests"] for row in rows)


@pytest.mark.parametrize(("first", "last", "steps"), [(1.0, 1.0, 9), (1.0, 1.004, 50), (0.2, 0.5, 400), (3.0, 7.0, 6)])
def test_a_run_of_steps_is_counted_like_its_steps(first: float, last: float, steps: int) -> None:
    """Their seconds rise evenly. A percentile is exact to 1 % (of the classes) and 0.5 % (of a part of the run)."""
    run, single = TokenGaps(), TokenGaps()
    run.add_run(first, last, steps, 3)
    seconds = [first + (last - first) * step / max(steps - 1, 1) for step in range(steps)]
    for each in seconds:
        single.add(each, 3)
    assert run.tokens == single.tokens == 3 * steps
    assert run.longest == single.longest == last
    for share in (0.1, 0.35, 0.5, 0.8, 1.0):
        # Of a few steps, a part is as long as the distance of two.
        rel = 0.016 + 0.5 * (last - first) / steps
        assert run.percentile(share) == pytest.approx(single.percentile(share), rel=min(rel, 0.35))
    run.add_run(1.0, 2.0, 5, 0)
    assert run.tokens == 3 * steps


def test_a_row_of_the_state_over_time_is_the_last_state_before_it_of_all_replicas() -> None:
    """Two replicas in 60 seconds, which is 60 rows. One ends earlier, and its last state stays."""
    replicas: Any = [
        SimpleNamespace(now=now, pool=SimpleNamespace(capacity=10), timeline=SimpleNamespace(samples=samples))
        for now, samples in (
            (60.0, [Sample(30.0, 3, 2, 7), Sample(45.5, 1, 4, 9)]), (40.0, [Sample(20.0, 0, 1, 2)]),
        )
    ]  # fmt: skip
    rows = [tuple(row.values()) for row in describe_timeline(replicas)]
    assert rows[18:20] == [(19.0, 0, 0, 0), (20.0, 0, 1, 2)]
    assert rows[28:30] == [(29.0, 0, 1, 2), (30.0, 3, 3, 9)]
    assert rows[44:46] == [(45.0, 3, 3, 9), (46.0, 1, 5, 11)]
    assert rows[59] == (60.0, 1, 5, 11)
    for replica in replicas:
        replica.pool.capacity = None
    assert {row["used_blocks"] for row in describe_timeline(replicas)} == {None}


def test_results_are_counted_from_the_requests() -> None:
    """Replicas with preemptions, a late first arrival and requests that find a part of their prompts."""
    preempted = found_tokens = waited = 0
    for seed in range(60):
        case = make_case(seed)
        case.replica.run()
        requests, replica = case.requests, case.replica
        outcome = Outcome(requests, 0, len(requests), [replica], is_steady=False)
        found = describe_results(outcome, Limits(), Load())
        first, ends = min(one.arrival for one in requests), [(one.finish or 0.0) + one.lag for one in requests]
        seconds = max(ends) - first
        assert found["duration_seconds"] == pytest.approx(seconds)
        assert found["requests_per_second"] == pytest.approx(len(requests) / seconds)
        assert found["tokens_per_second"] == pytest.approx(sum(one.answer_tokens for one in requests) / seconds)
        assert found["preemptions"] == sum(one.preemptions for one in requests)
        assert found["preempted_requests"] == len([one for one in requests if one.preemptions])
        assert found["cached_tokens"] == sum(one.found_tokens for one in requests)
        waits = sum((one.started or 0.0) - one.arrival for one in requests)
        assert found["mean_waiting_requests"] == pytest.approx(waits / seconds)
        assert 0 < found["busy_share"] <= 1.000001
        half = describe_results(outcome._replace(ranks=[replica, replica]), Limits(), Load())
        assert half["busy_share"] == pytest.approx(found["busy_share"])
        if replica.pool.capacity is not None:
            assert found["most_used_blocks"] == half["most_used_blocks"] == replica.pool.most_used
        assert (found["good_requests"], found["goodput_requests_per_second"]) == (None, None)
        longest = max(one.first_token - one.arrival + one.lag for one in requests if one.first_token is not None)
        for limit, number in ((longest, len(requests)), (0.0, 0)):
            good = describe_results(outcome, Limits(max_ttft_seconds=limit), Load())
            assert good["good_requests"] == number
            assert good["goodput_requests_per_second"] == pytest.approx(number / seconds)
        preempted += found["preemptions"] > found["preempted_requests"] > 0
        found_tokens += found["cached_tokens"] > 0
        waited += waits > 0
    assert min(preempted, found_tokens, waited) > 0


def test_a_percentile_lies_between_the_two_nearest_values() -> None:
    """As in numpy.percentile: of 5 values, 0.9 is 0.6 of the way from the fourth to the fifth."""
    values = [1.0, 2.0, 3.0, 4.0, 9.0]
    found = [percentile(values, share) for share in (0.0, 0.25, 0.5, 0.9, 0.99, 1.0)]
    assert found == pytest.approx([1.0, 2.0, 3.0, 4 + 0.6 * 5, 4 + 0.96 * 5, 9.0])
    assert [percentile([5.0], share) for share in (0.0, 0.5, 1.0)] == [5.0] * 3


def test_no_mean_is_above_the_longest_time() -> None:
    """All tokens take as long. The sum of their times is rounded up."""
    words: Any = {
        "prompt_tokens": "fixed:1500",
        "answer_tokens": "fixed:2",
        "requests": 40,
        "seed": 55,
        "concurrency": 1,
    }
    found: Any = kvcalc.simulate("gpt-oss-120b", kvcalc.find_devices("mi300x"), engine="vllm", **words)
    for row in found["times"]:
        assert row["mean_seconds"] <= row["max_seconds"]
        assert row["p50_seconds"] <= row["p99_seconds"] <= row["max_seconds"]


@pytest.mark.parametrize(("model", "gpus", "dp"), [("llama-3.1-8b", "h100", 1), ("deepseek-v3", "h200x8", 8)])
def test_requests_take_as_long_if_only_sums_are_kept(model: str, gpus: str, dp: int) -> None:
    devices = kvcalc.find_devices(gpus)
    question = Question(kvcalc.load_model(model), engine="vllm", data_parallel_size=dp, devices=devices)
    load = Load(lengths_of(500, "prompt"), lengths_of(40, "answer"), requests_per_second=10.0, num_requests=100)
    known, brief = simulate(question, load), simulate(question, load, is_detailed=False)
    assert brief["results"] == known["results"]
    differ = [row["metric"] for row, other in zip(brief["times"], known["times"]) if row != other]
    assert differ == ["itl"]
    assert brief["times"][2]["mean_seconds"] is None


def test_a_million_requests_are_simulated_and_no_more() -> None:
    load = Load(lengths_of(10, "prompt"), lengths_of(5, "answer"), concurrency=2, num_requests=1_000_000)
    check_load(load)
    with pytest.raises(UsageError, match="1,000,001: too many to simulate"):
        check_load(load._replace(num_requests=1_000_001))


def test_the_load_is_described_as_it_was_asked_for_and_as_it_was_drawn() -> None:
    prompt, answer = lengths_of("uniform:100..200", "prompt"), lengths_of(50, "answer")
    asked = Load(prompt, answer, requests_per_second=3.0, burstiness=2.0, seed=4)
    check_load(asked)
    kinds = [asked.kind, asked._replace(burstiness=1.0).kind, Load(prompt, answer, concurrency=2).kind]
    assert kinds == ["gamma", "poisson", "closed_loop"]
    requests = [Request(0, 0.0, 120, 50), Request(1, 0.5, 170, 56), Request(2, 0.9, 190, 44)]
    found = describe_load(asked, Outcome(requests, 0, 3, [], is_steady=False, refused=5))
    assert (found["prompt_tokens"], found["answer_tokens"]) == ("uniform:100..200", "50")
    assert (found["mean_prompt_tokens"], found["mean_answer_tokens"]) == (160.0, 50.0)
    assert (found["requests"], found["refused_requests"], found["seed"], found["burstiness"]) == (8, 5, 4, 2.0)
    assert (found["trace"], found["scale_rate"], found["concurrency"]) == (None, None, None)


def test_a_simulation_asks_for_a_device_and_for_no_longest_context() -> None:
    load = Load(lengths_of(100, "prompt"), lengths_of(10, "answer"), concurrency=1)
    question = Question(kvcalc.load_model("llama-3.1-8b"), engine="vllm")
    with pytest.raises(UsageError, match="simulate needs a device"):
        simulate(question, load)
    asked = question._replace(devices=kvcalc.find_devices("h100"), fits_context=True)
    with pytest.raises(UsageError, match="--context auto: requests that are too long"):
        simulate(asked, load)


@pytest.mark.parametrize("deviation", [0.3, 0.5, 0.8])
def test_drawn_lengths_have_the_mean_and_the_deviation_that_were_asked_for(deviation: float) -> None:
    """The deviation is a share of the mean."""
    lengths, random = lengths_of(f"lognormal:1000,{deviation}", "prompt"), Random(1)
    assert lengths is not None
    drawn = [lengths.draw(random) for _ in range(20_000)]
    assert mean(drawn) == pytest.approx(1000, rel=0.02) == lengths.mean_tokens
    assert pstdev(drawn) / mean(drawn) == pytest.approx(deviation, rel=0.04)
    even = lengths_of("uniform:10..12", "prompt")
    assert even is not None
    assert {even.draw(random) for _ in range(100)} == {10, 11, 12}
    assert (even.mean_tokens, even.longest_tokens) == (11, 12)


def test_a_request_that_just_keeps_its_limits_is_good() -> None:
    request = Request(0, 1.0, 100, 11)
    request.first_token, request.finish = 3.0, 8.0
    for first, each, is_kept in ((2.0, 0.5, True), (1.99, 0.5, False), (2.0, 0.49, False), (None, None, True)):
        assert is_good(request, Limits(first, each)) is is_kept
    # An answer of one token has no time per token.
    request.answer_tokens = 1
    assert is_good(request, Limits(2.0, 0.001))
