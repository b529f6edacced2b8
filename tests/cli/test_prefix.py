"""`kvcalc prefix` for people and scripts: screens, tables, bad rows, and options that need others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import spawn
from tests.planning.test_prefix import BLOCK, write_trace
from tests.traces.test_reuse import tree_of_prompts

FILES = Path(__file__).parents[1] / "traces" / "files"
MOONCAKE = FILES / "mooncake.jsonl"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl", tree_of_prompts(5, 300, BLOCK, popular=0.7, longest=6))


def test_the_table_has_a_row_for_each_size(kvcalc: Any, trace: Path) -> None:
    words = ("prefix", trace, "llama-3.1-8b", "--engine", "vllm", "--cache-memory", "1GiB..8GiB")
    rows = kvcalc(*words, "--format", "csv").out.splitlines()
    assert rows[0].startswith("cache_blocks,cache_tokens,cache_bytes,cache_bytes_per_device,hit_rate,")
    assert [int(row.split(",")[2]) for row in rows[1:]] == [2**30, 2**31, 2**32, 2**33]
    curve = kvcalc(*words, "--json").json["curve"]
    assert [row.split(",")[4] for row in rows[1:]] == [str(row["hit_rate"]) for row in curve]
    assert [row["hit_rate"] for row in curve] == sorted(row["hit_rate"] for row in curve)


def test_the_screen_leads_with_the_knee(kvcalc: Any, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # the path of the trace is long
    words = ("prefix", trace, "llama-3.1-8b", "--gpu", "h100", "--engine", "vllm", "--offload", "cpu=20GiB")
    answer = kvcalc(*words, "--json").json
    out = kvcalc(*words, "--price", "h100=2.5,cpu=0.003", "--format", "human").out
    lines = out.splitlines()
    assert lines[0].endswith(f"{answer['trace']['distinct_blocks']:,} distinct blocks of 512 tokens")
    assert any(line.startswith("knee: a cache of ") and f"{answer['knee']['hit_rate']:.1%}" in line for line in lines)
    assert "GPU seconds saved; a GPU second costs 0.00069" in out
    assert "cpu     20.00 GiB" in out
    # The bars grow with the hits.
    bars = [line.count("#") for line in kvcalc("prefix", trace, "--format", "human").out.splitlines() if "#" in line]
    assert bars == sorted(bars)
    assert bars[-1] == 24


def test_without_a_model_there_are_only_hit_rates(kvcalc: Any) -> None:
    answer = kvcalc("prefix", MOONCAKE, "--cache-tokens", "512,1536,2560", "--json").json
    assert (answer["model"], answer["engine"], answer["prefill"], answer["tiers"]) == (None, None, None, [])
    # Request 2 finds block 0. Request 3 finds blocks 0, 1 and 2, of which the last was partial: they are blocks 1, 3
    # and 4 of the stack.
    assert [row["hit_rate"] for row in answer["curve"]] == [
        2 * 512 / 4324,
        (2 * 512 + 512) / 4324,
        (2 * 512 + 2 * 512) / 4324,
    ]


def test_bad_rows_are_skipped_and_the_exit_code_is_1(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE.read_text() + "{broken\n" + '{"timestamp": 1}\n')
    result = kvcalc("prefix", path, "--json")
    assert result.status == 1
    assert result.json["trace"]["num_requests"] == 3
    assert result.json["curve"] == kvcalc("prefix", MOONCAKE, "--json").json["curve"]
    assert result.json["trace"]["num_bad_rows"] == 2
    assert result.json["trace"]["first_bad_row"].startswith("line 4: not JSON")
    table = kvcalc("prefix", path)
    assert (table.status, table.err) == (1, f"warning: 2 rows skipped; {result.json['trace']['first_bad_row']}\n")


def test_a_trace_from_a_pipe() -> None:
    done = spawn("prefix", "-", "--get", "trace.num_requests", stdin=MOONCAKE.read_text())
    assert (done.status, done.out) == (0, "3\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no TRACE"),
        (("no/such.jsonl",), "no/such.jsonl: No such file or directory"),
        (("/dev/null",), "/dev/null: not a regular file"),
        ((FILES / "plain.csv",), "in the format csv does not name shared blocks"),
        ((MOONCAKE, "--gpu", "h100"), "--gpu needs a MODEL"),
        ((MOONCAKE, "--block-size", "32"), "--block-size needs a MODEL"),
        ((MOONCAKE, "--engine", "vllm"), "--engine needs a MODEL"),
        ((MOONCAKE, "--cache-memory", "1GiB"), "--cache-memory needs a MODEL"),
        ((MOONCAKE, "--trace-format", "parquet"), "--trace-format 'parquet': unknown"),
        ((MOONCAKE, "--trace-format", "csv"), "not the start of a trace in the format csv"),
        ((MOONCAKE, "--trace-block-tokens", "100"), "no row can be read (3 rows)"),
        ((MOONCAKE, "gpt2", "--engine", "vllm,sglang"), "only one engine is supported here"),
        ((MOONCAKE, "gpt2", "--cache-memory", "1GiB", "--cache-tokens", "1k"), "both set the sizes"),
        ((MOONCAKE, "gpt2", "--offload", "200GiB"), "--offload '200GiB': not a list of tiers"),
        ((MOONCAKE, "gpt2", "--offload", "cpu=1GiB,cpu=2GiB"), "a tier is given twice"),
        ((MOONCAKE, "gpt2", "--offload", "tape=1GiB"), "'tape': not a tier"),
        ((MOONCAKE, "gpt2", "--gpu", "h100", "--price", "l40s=1"), "not the device of --gpu"),
        ((MOONCAKE, "gpt2", "--offload-bandwidth", "cpu=5GB/s"), "--offload-bandwidth cpu=5GB/s: needs --offload"),
        (
            (MOONCAKE, "gpt2", "--offload", "cpu=1GiB", "--offload-bandwidth", "disk=5GB/s"),
            "--offload-bandwidth disk: --offload has no such tier",
        ),
        (
            (MOONCAKE, "gpt2", "--engine", "tensorrt-llm", "--offload", "remote=1GiB"),
            "--offload remote: tensorrt-llm has no such tier",
        ),
        ((MOONCAKE, "gpt2", "--price", "cpu=1"), "--price needs --gpu"),
        (("gpt2", MOONCAKE), "gpt2: No such file or directory"),
        (("-", "-"), "only one of TRACE and MODEL can be read from stdin"),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(kvcalc: Any, words: tuple[object, ...], message: str) -> None:
    result = kvcalc("prefix", *words)
    assert result.status == 2
    assert message in result.err
    assert len(result.err.splitlines()) <= 2
    assert not result.out


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "logical"])
def test_tiers_keep_as_many_bytes_of_a_latent_as_in_estimate(kvcalc: Any, engine: str) -> None:
    words = ("deepseek-v3", "--gpu", "h200x8", "--engine", engine, "--offload", "cpu=500GiB")
    tiers = kvcalc("fit", *words, "--context", "8k", "--json").json["reuse"]["tiers"]
    found = kvcalc("prefix", MOONCAKE, *words, "--json").json
    block = found["engine"]["offloaded_bytes_per_trace_block"]
    assert block == tiers["unit_bytes"] * found["trace"]["block_tokens"] // tiers["unit_tokens"]


def test_batch_reads_no_traces(kvcalc: Any, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"model": "gpt2", "trace": str(MOONCAKE)}) + "\n")
    result = kvcalc("batch", questions)
    assert result.status == 1
    assert result.json["error"]["message"] == "'trace': batch reads no traces"
