"""`--lengths`: a batch of sequences of different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcalc.planning.calibration.attention_rows import attention_rows
from kvcalc.planning.calibration.measured import Given
from tests.documents import validate
from tests.measure.quick import SMALL

FAST = (*SMALL, "--steps", "3", "--device", "cpu", "--dtype", "fp32", "--json")
# 2 layers, 2 KV heads of 16, K and V.
ROW = 2 * 2 * 2 * 16


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ((), (40 + 9 + 300) * ROW * 4),
        (("--block-size", "16"), (48 + 16 + 304) * ROW * 4),
        (("--kv-dtype", "int8"), (40 + 9 + 300) * (ROW + 2 * 2 * 2 * 4)),
        (("--sliding-window", "30"), (30 + 9 + 30) * ROW * 4),
        (("--attention", "mla", "--mla", "expanded"), (40 + 9 + 300) * 2 * 72 * 4),
        (("--backend", "grouped-sdpa"), (40 + 9 + 300) * ROW * 4),
    ],
    ids=str,
)
def test_each_sequence_holds_what_is_predicted(kvcalc: Any, options: tuple[str, ...], stored: int) -> None:
    result = kvcalc("measure", *FAST, "--lengths", "40,9,300", *options)
    assert result.status == 0, result.err
    validate(result.json, "measure")
    (run,) = result.json["runs"]
    assert run["predicted_bytes"] == run["held_bytes"] == stored
    assert result.json["workload"]["lengths"] == run["lengths"] == [40, 9, 300]
    assert (run["context_tokens"], run["batch_size"]) == (300, 3)
    assert run["verified"]["ok"]
    wrong = [row for row in run["backends"] if row["relative_error"] and row["relative_error"] > 1e-4]
    assert not wrong
    # The bytes that a step reads are those of all rows, whatever their lengths.
    bandwidth = result.json["roof"]["read_bytes_per_second"]
    core = run["attention_core_seconds"]["p50"]
    read = 69 if "30" in options else 349
    width = stored if "--block-size" not in options else 349 * ROW * 4
    assert run["kv_read_bytes_per_second"] * core == pytest.approx(width)
    assert run["fraction_of_roof"]["attention_core"] == pytest.approx(width / core / bandwidth)
    flop = 2 * 2 * 8 * (16 + 16) * read if "mla" not in options else None
    if flop is not None:
        assert run["attention_core_flop_per_second"] * core == pytest.approx(flop)


def test_equal_lengths_are_a_context_and_a_batch(kvcalc: Any) -> None:
    found, plain = (
        kvcalc("measure", *FAST, *options).json
        for options in (("--lengths", "40,40"), ("--context", "40", "--batch", "2"))
    )
    assert found["workload"] == plain["workload"]
    assert found["runs"][0]["held_bytes"] == plain["runs"][0]["held_bytes"]
    assert found["workload"]["lengths"] is None


def test_a_traces_first_requests(kvcalc: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_seconds,prompt_tokens,answer_tokens\n0,20,5\n1,100,50\n2,9,1\n")
    found = kvcalc("measure", *FAST, "--lengths", str(trace), "--batch", "2").json
    assert found["workload"]["lengths"] == [25, 150]
    result = kvcalc("measure", *FAST, "--lengths", str(trace), "--batch", "4")
    assert result.status == 2
    assert "has 3 requests" in result.err
    assert "at most --batch 3" in result.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--context", "40"), "says the context and the batch"),
        (("--batch", "3"), "says the context and the batch"),
        (("--sweep", "batch=1:2"), "combined with --sweep"),
        (("--until-full", "batch"), "combined with --until-full"),
        (("--prefill", "full"), "combined with --prefill full"),
        (("--cache", "grow"), "combined with --cache grow"),
        (("--cache", "none"), "combined with --cache none"),
        (("--steps", "9"), "less than the shortest sequence of 9"),
        (("--lengths", "1x,2"), "1x,2"),
        (("--profile",), "no effect"),
    ],
)
def test_what_does_not_go_with_lengths_is_refused(kvcalc: Any, options: tuple[str, ...], said: str) -> None:
    result = kvcalc("measure", *FAST, "--lengths", "9,40", *options)
    assert (result.status, result.out) == (2, "")
    assert said in result.err


def test_the_screen_says_the_lengths(kvcalc: Any) -> None:
    out = kvcalc("measure", *FAST[:-1], "--lengths", "40,9,300").out
    assert "3 sequences of 9 to 300 tokens, 349 in all, fp32, 3 steps" in out


def test_score_predicts_the_sum_of_the_sequences() -> None:
    """Half of the sequences at one length and half at another take the times of both together."""
    run: dict[str, Any] = {"attention": "gqa", "num_layers": 1, "attention_core_seconds": {"p50": 1e-4}}
    record = {
        "device": {"name": "NVIDIA H200"}, "model": {"name": "llama-3.1-8b", "attention": "gqa"},
        "workload": {"kv_dtype": "bf16"},
    }  # fmt: skip

    def predicted(**changed: Any) -> float:
        rows = attention_rows({**record, "runs": [{**run, **changed}]}, "file", Given())
        return rows[0]["predicted_seconds"]

    each = [predicted(context_tokens=tokens, batch_size=4, lengths=None) for tokens in (1024, 32768)]
    mixed = predicted(context_tokens=32768, batch_size=8, lengths=[1024, 32768] * 4)
    assert mixed == pytest.approx(sum(each))
