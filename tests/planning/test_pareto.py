"""`kvcalc plan --pareto` and why the second choice of a device lost."""

from __future__ import annotations

from typing import Any

import pytest

LENGTHS = ("--input-tokens", "2k", "--output-tokens", "500")
PLAN = ("plan", "gpt-oss-120b", *LENGTHS, "--concurrency", "64", "--gpu", "h100,h200")
PRICES = ("--price", "h100=2.5,h200=3.5")


@pytest.mark.parametrize(
    ("options", "burden"),
    [(PRICES, "cost_per_million_output_tokens"), ((), "tokens_per_second_per_device")],
)
def test_no_point_is_worse_than_another_in_both_ways(kvcalc: Any, options: tuple[str, ...], burden: str) -> None:
    document = kvcalc(*PLAN, *options, "--pareto", "--json").json
    points = document["pareto"]
    sign = 1 if options else -1
    figures = [(point["tokens_per_second_per_user"], sign * point[burden]) for point in points]
    assert len(points) > 5
    # Slower for one user must mean cheaper.
    assert figures == sorted(figures, reverse=True)
    assert len({cost for _, cost in figures}) == len(figures)
    assert all(point["tokens_per_second_per_user"] == pytest.approx(1 / point["tpot_seconds"]) for point in points)


def test_a_point_is_the_estimate_of_its_replica(kvcalc: Any) -> None:
    points = kvcalc(*PLAN, *PRICES, "--pareto", "--json").json["pareto"]
    prices = {"h100-sxm": 2.5, "h200-sxm": 3.5}
    for point in points[:: max(1, len(points) // 4)]:
        found = kvcalc(
            "estimate", "gpt-oss-120b", "--engine", "vllm", "--gpu", f"{point['gpu']}x{point['num_devices']}",
            "--tp", point["tensor_parallel_size"], "--dp", point["data_parallel_size"],
            "--ep", point["expert_parallel_size"], *LENGTHS,
            "--concurrency", point["requests_per_replica"], "--json",
        ).json["throughput"]["serving"]  # fmt: skip
        assert found["tpot_seconds"] == pytest.approx(point["tpot_seconds"])
        hourly = prices[point["gpu"]] * point["num_devices"]
        cost = hourly / (found["tokens_per_second"] * 3600 / 1e6)
        assert point["cost_per_million_output_tokens"] == pytest.approx(cost)


def test_all_points_meet_the_targets(kvcalc: Any) -> None:
    points = kvcalc(*PLAN, "--max-tpot", "10ms", "--confidence", "50", "--pareto", "--json").json["pareto"]
    assert points
    assert all(point["tpot_seconds"] <= 0.01 for point in points)


def test_the_front_is_only_made_when_asked_for(kvcalc: Any) -> None:
    assert kvcalc(*PLAN, "--json").json["pareto"] is None
    assert "faster for one user" in kvcalc(*PLAN, "--pareto", "--format", "human").out


def test_the_second_choice_says_why_it_lost(kvcalc: Any) -> None:
    rows = {row["gpu"]: row for row in kvcalc(*PLAN, "--max-tpot", "30ms", "--json").json["plans"]}
    for row in rows.values():
        assert row["next_layout"]
    # Only one layout serves: the largest of the others is named with its reason.
    alone = ("plan", "llama-3-70b", *LENGTHS, "--concurrency", "4", "--gpu", "h100x2")
    (row,) = kvcalc(*alone, "--json").json["plans"]
    assert (row["tensor_parallel_size"], row["num_devices"]) == (2, 2)
    assert row["next_layout"].startswith("tp 1: a request of ")
    shown = " ".join(kvcalc(*alone, "--format", "human").out.split())  # the line is wrapped
    assert f"h100-sxm, not {row['next_layout']}" in shown
