"""The constants of vLLM's reserve against public logs, and the range that is printed beside the estimate."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.fit_reserve import Log, covered, range_of, read_logs, release_and_family
from kvcalc.memory.reserve import vllm


@pytest.fixture(scope="module")
def logs() -> list[Log]:
    return read_logs()


def errors(logs: list[Log]) -> list[float]:
    return [abs(log.estimate - log.actual) / log.memory for log in logs]


def test_the_rules_give_what_one_machine_measured(logs: list[Log]) -> None:
    report = [log for log in logs if log.source.startswith("report")]
    assert len(report) >= 25
    assert max(errors(report)) < 0.006


def test_logs_that_set_no_constant_are_near(logs: list[Log]) -> None:
    held_out = [log for log in logs if log.is_held_out]
    assert len(held_out) >= 14
    assert median(errors(held_out)) < 0.015
    assert max(errors(held_out)) < 0.035


def test_the_range_covers_eight_of_ten_logs_that_did_not_set_it(logs: list[Log]) -> None:
    held_out = [log for log in logs if log.is_held_out]
    assert covered(held_out, release_and_family) >= 0.8 * len(held_out)
    used = (vllm._LOW, vllm._HIGH)
    assert tuple(round(end, 2) for end in range_of([log.ratio for log in held_out])) == used
