"""The constants of an engine's reserve against public logs, and the range that is printed beside the estimate."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.fit.reserve import ENGINES
from benchmarks.fit.reserve_logs import Log, covered, range_of, read_table, read_vllm_logs, release_and_family
from kvcalc.engines.reserve import ReserveInputs
from kvcalc.engines.sglang.reserve import reserve as sglang
from kvcalc.memory.sharding import Width
from kvcalc.model.layout import Layout
from kvcalc.throughput.hardware import find_gpu


@pytest.fixture(scope="module")
def logs() -> list[Log]:
    return read_vllm_logs()


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


@pytest.mark.parametrize("engine", ENGINES)
def test_the_range_covers_eight_of_ten_logs_that_did_not_set_it(engine: str) -> None:
    read, used = ENGINES[engine]
    held_out = [log for log in read() if log.is_held_out]
    assert len(held_out) >= 10
    assert covered(held_out, release_and_family) >= 0.8 * len(held_out)
    assert tuple(round(end, 2) for end in range_of(held_out)) == used


@pytest.mark.parametrize("engine", ENGINES)
def test_the_range_covers_other_families(engine: str) -> None:
    held_out = [log for log in ENGINES[engine][0]() if log.is_held_out]
    assert covered(held_out, lambda log: log.family) >= 0.8 * len(held_out)


def test_sglang_chooses_the_share_that_its_logs_show() -> None:
    # What is left of the free memory after the pool is the share: models of text with no flag.
    rows = [row for row in read_table("sglang_memory.tsv") if row["pool"] and not row["share"] and row["tp"] == "1"]
    assert len(rows) >= 2
    for row in rows:
        memory = find_gpu(row["device"]).memory_bytes
        found = sglang(ReserveInputs(memory, Width(0, 0, 0, 0, False), Layout(), 1, 1, {})).settings[
            "mem_fraction_static"
        ]
        assert found == pytest.approx((float(row["loaded"]) + float(row["pool"])) / float(row["before"]), abs=0.003)
