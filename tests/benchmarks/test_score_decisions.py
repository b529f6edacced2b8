"""Scores of decisions: what a deployed layout loses, and how far off the ratio of two devices is."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def decisions() -> ModuleType:
    return importlib.import_module("benchmarks.score.decisions")


def test_the_loss_is_that_of_the_pick_and_all_of_it_if_the_pick_misses(decisions: ModuleType) -> None:
    slow, fast = decisions.Point("a", 0.02, 100, 0.02, 1.05, 90), decisions.Point("a", 0.03, 160, 0.025, 1.16, 150)
    late, wide = fast._replace(tpot=0.0307), fast._replace(high=1.24)

    def of(points: list[Any], limit: float, confidence: int = 80) -> Any:
        return tuple(decisions.choices([points], limit, confidence))

    assert of([slow, fast], 0.03) == ([0.0], 0, 0)
    assert of([slow, wide], 0.03) == ([pytest.approx(1 - 100 / 160)], 0, 0)
    assert of([slow, wide], 0.03, 50) == ([0.0], 0, 0), "the estimate is within the limit"
    assert of([slow, late], 0.03) == ([1.0], 1, 0)
    assert of([slow, fast], 0.0205) == ([], 0, 1), "nothing is judged to meet it"
    assert of([slow, fast], 0.01) == ([], 0, 0), "nothing meets it"


def test_the_table_has_a_row_for_each_level(decisions: ModuleType) -> None:
    slow, fast = decisions.Point("a", 0.02, 100, 0.02, 1.05, 90), decisions.Point("a", 0.03, 160, 0.025, 1.24, 150)
    table = decisions.table_of([[slow, fast]]).splitlines()
    assert len(table) == 2 + len(decisions.LEVELS)
    assert table[2] == "| 50 | 0 / 0 / 0 % | 0.0 / 0.0 / 0.0 % | 0 / 0 / 0 |"
    assert table[-1].startswith("| 90 | - / 38 / 0 %")


def test_devices_are_compared_by_their_best_tokens_within_the_limit(decisions: ModuleType) -> None:
    points = [
        decisions.Point("a", 0.02, 100, 0.02, 0.02, 90), decisions.Point("a", 0.04, 200, 0.04, 0.04, 180),
        decisions.Point("b", 0.02, 50, 0.02, 0.02, 60),
    ]  # fmt: skip
    assert decisions.ratios(points, 0.03) == [(2.0, 1.5)]
    assert decisions.ratios(points, 0.05) == [(4.0, 3.0)]
    assert decisions.ratios(points[:2], 0.05) == []


def test_a_point_has_the_measured_and_the_predicted_tokens(decisions: ModuleType) -> None:
    row: dict[str, Any] = {
        "model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm", "release": None, "dtype": None, "isl": 1000,
        "osl": 101, "layout": {"tp": 2}, "concurrency": 8, "ttft": 0.1, "tpot": 0.009,
    }  # fmt: skip
    found = decisions.point(row)
    assert found.rate == pytest.approx(8 * 101 / 1.0 / 2)
    assert found.high > 1
    assert decisions.point({**row, "engine": "vllm", "model": "no-such-model"}) is None
