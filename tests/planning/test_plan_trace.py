"""`kvcalc plan --trace`: the requests of a trace, at its own times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.simulation.loads.recorded import record
from kvcalc.traces import TraceRequest
from tests.planning.traces import write_bursts
from tests.test_schema import check

MODEL = "llama-3.1-8b"


@pytest.fixture(scope="module")
def bursts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Half minutes that are quiet, busy and quiet: 5, 30 and 5 requests per second."""
    return write_bursts(tmp_path_factory.mktemp("traces") / "bursts.csv", seconds=90, each=30, rates=(5, 30))


@pytest.fixture(scope="module")
def recorded(bursts: str) -> Any:
    """The plan for a percentile of the trace. Do not change it."""
    return kvcalc.plan(MODEL, ["h100"], trace=bursts, max_ttft_seconds=0.25, ttft_percentile=99)


def ttft_of(row: Any, trace: str, **more: Any) -> Any:
    """The simulated times to the first token of a finalist, at the end that is judged."""
    found: Any = kvcalc.simulate(
        MODEL, row["gpu"], trace=trace, replicas=row["replicas"], tensor_parallel_size=row["tensor_parallel_size"],
        step_factor=row["step_factor"], router="random", **more,
    )  # fmt: skip
    times = next(one for one in found["times"] if one["metric"] == "ttft")
    return {name: times[f"{name}_seconds"] * row["ttft_factor"] for name in ("mean", "p99")}


@pytest.mark.long
@pytest.mark.parametrize(("percentile", "scale"), [(99, 1.0), (None, 2.0)])
def test_the_verdicts_are_those_of_a_simulation_of_the_trace(
    bursts: str, recorded: Any, percentile: Any, scale: float
) -> None:
    limit = 0.25
    document: Any = recorded
    if percentile is None:
        document = kvcalc.plan(MODEL, ["h100"], trace=bursts, scale_rate=scale, max_ttft_seconds=limit)
    check(document, "plan")
    rows: Any = document["finalists"]
    assert {row["passes"] for row in rows} == {True, False}
    statistic = "mean" if percentile is None else "p99"
    for row in rows:
        times = ttft_of(row, bursts, scale_rate=scale)
        assert row[f"ttft_{statistic}_seconds"] == pytest.approx(times[statistic])
        assert row["passes"] == (times[statistic] <= limit)
        assert row["seed"] is None
    assert document["best"]["num_devices"] == min(row["num_devices"] for row in rows if row["passes"])


@pytest.mark.long
def test_bursts_of_a_trace_need_more_than_its_mean_rate(recorded: Any) -> None:
    trace, lengths = recorded["trace"], recorded["lengths"]
    even: Any = kvcalc.plan(
        MODEL, ["h100"], input_tokens=lengths["input_tokens"], output_tokens=lengths["output_tokens"],
        requests_per_second=trace["requests_per_second"], max_ttft_seconds=0.25, ttft_percentile=99,
        requests=trace["requests"],
    )  # fmt: skip
    assert recorded["best"]["num_devices"] > even["best"]["num_devices"]


def test_layouts_are_sized_for_the_busiest_minute_and_tokens_cost_the_mean_rate(bursts: str) -> None:
    document: Any = kvcalc.plan(MODEL, ["h100"], trace=bursts, prices={"h100-sxm": 3.0})
    trace, best = document["trace"], document["best"]
    assert document["targets"]["requests_per_second"] == trace["peak_requests_per_second"]
    assert trace["peak_requests_per_second"] > trace["requests_per_second"]
    assert best["utilization"] < 1  # by the rate of the busiest minute
    assert best["requests_per_second"] == pytest.approx(trace["requests_per_second"], rel=0.1)
    tokens_per_hour = trace["requests_per_second"] * document["lengths"]["output_tokens"] * 3600
    assert best["cost_per_million_output_tokens"] == pytest.approx(best["cost_per_hour"] / tokens_per_hour * 1e6)
    assert any(one["passes"] for one in document["finalists"])


def test_the_rates_of_a_trace() -> None:
    times = [0.0, 10.0, 20.0, *(100.0 + place for place in range(50)), 400.0]
    requests = [TraceRequest(when, 100, 10, None, None, 1) for when in times]
    found = record(iter(requests), "x", 2.0)
    assert found.duration_seconds == 200.0
    assert found.requests_per_second == pytest.approx(53 / 200)
    # The 50 arrive in 25 s. The third one was 40 s before, but the first of them 65 s before the last.
    assert found.peak_requests_per_second == pytest.approx(50 / 60)
    assert record(requests[3:53], "x").peak_requests_per_second == pytest.approx(1.0)


def test_a_burst_may_wait_as_long_as_its_limit_allows(tmp_path: Path) -> None:
    """All of these requests arrive within a second, so nearly all of the run is a queue."""
    file = tmp_path / "burst.csv"
    rows = [f"{place / 100},6000,300" for place in range(100)]
    file.write_text("arrival_seconds,prompt_tokens,answer_tokens\n" + "\n".join(rows))
    ask: dict[str, Any] = {"trace": str(file), "confidence": 50}
    waited: Any = kvcalc.plan(MODEL, ["h100"], max_e2e_seconds=60.0, e2e_percentile=99, **ask)
    assert waited["best"]["num_devices"] == 1
    # A limit on the time per token alone says nothing about the queue.
    unlimited: Any = kvcalc.plan(MODEL, ["h100"], max_tpot_seconds=10.0, tpot_percentile=99, **ask)
    assert any("does not keep up" in (row["reason"] or "") for row in unlimited["finalists"])


def test_requests_find_the_prefixes_that_the_trace_names(tmp_path: Path) -> None:
    file, alone = tmp_path / "shared.jsonl", tmp_path / "alone.jsonl"
    for path, common in ((file, 6), (alone, 0)):
        with path.open("w") as stream:
            for number in range(300):
                names = [*range(common), *range(10 * number + 10, 10 * number + 18 - common)]
                row = {"timestamp": 80 * number, "input_length": 4096, "output_length": 50, "hash_ids": names}
                stream.write(json.dumps(row) + "\n")
    plans: list[Any] = [
        kvcalc.plan(MODEL, ["h100"], trace=str(path), max_ttft_seconds=0.4, ttft_percentile=99, requests=200)
        for path in (file, alone)
    ]
    shared, own = plans
    assert shared["best"]["num_devices"] < own["best"]["num_devices"]
    assert shared["trace"]["requests"] == 200
    copied = kvcalc.plan(MODEL, ["h100"], engine="llama.cpp", trace=str(file), requests=20)
    assert "not-shared" in {row["code"] for row in copied["warnings"]}


def test_the_screen_names_both_rates_and_bad_rows(
    kvcalc: Any, bursts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("plan", MODEL, "--gpu", "h100", "--max-ttft", "300ms", "--format", "human", "--trace")
    result = kvcalc(*words, bursts)
    assert result.status == 0
    assert "TTFT mean" in result.out
    assert "in the busiest minute" in result.out
    file = tmp_path / "bad.csv"
    file.write_text("arrival_seconds,prompt_tokens,answer_tokens\n0,100,10\n1,x,10\n2,100,0\n3,90,9\n")
    result = kvcalc(*words, file)
    assert result.status == 1
    assert "1 row skipped; line 3" in result.err
    assert "1 row without an answer" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--concurrency", "4"), "--trace cannot be combined with --concurrency"),
        (("--input-tokens", "4"), "--input-tokens"),
        (("--lengths", "x.csv"), "--lengths"),
        (("--burstiness", "0.5"), "--burstiness"),
        (("--trace-format", "nothing"), "--trace-format"),
        (("--scale-rate", "0"), "--scale-rate"),
        (("--requests", "1"), "at the same time"),
    ],
)
def test_what_contradicts_a_trace_is_refused(kvcalc: Any, bursts: str, words: tuple[str, ...], message: str) -> None:
    result = kvcalc("plan", MODEL, "--gpu", "h100", "--trace", bursts, *words)
    assert result.status == 2
    assert message in result.err


@pytest.mark.parametrize("words", [("--scale-rate", "2"), ("--trace-format", "csv")])
def test_options_of_a_trace_need_one(kvcalc: Any, words: tuple[str, ...]) -> None:
    ask = ("plan", MODEL, "--gpu", "h100", "--input-tokens", "100", "--output-tokens", "9", "--concurrency", "2")
    result = kvcalc(*ask, *words)
    assert result.status == 2
    assert "needs --trace" in result.err
