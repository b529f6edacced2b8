"""The comparison of all engines."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import ENGINES
from kvcalc.errors import UsageError
from kvcalc.planning.answers.compare import compare_engines
from kvcalc.question.question import Question
from tests.conftest import loaded
from tests.documents import estimate
from tests.test_schema import check


def rows(name: str, **options: Any) -> dict[str, Any]:
    document: Any = compare_engines(Question(loaded(name), **{"engine": "all", **options}))
    check(document, "engines")
    assert [row["engine"] for row in document["engines"]] == list(ENGINES)
    return {row["engine"]: row for row in document["engines"]}


def test_every_row_is_the_engines_own_estimate() -> None:
    spec = kvcalc.load_model("gpt-oss-120b")
    found = rows("gpt-oss-120b", context_tokens=1000, batch_size=3, kv_memory_bytes=2**33)
    for name, row in found.items():
        alone = estimate(spec, context_tokens=1000, batch_size=3, engine=name, kv_memory_bytes=2**33)
        assert row["total_bytes"] == alone["kv_cache"]["total_bytes"]
        assert row["kv_cache_tokens"] == alone["engine"].get("kv_cache_tokens")
        assert row["fits"] is True
        assert row["reason"] is None


def test_an_engine_that_refuses_stands_with_its_reason() -> None:
    found = rows("deepseek-v3", context_tokens=1000, tensor_parallel_size=8)
    assert found["llama.cpp"]["total_bytes"] is None
    assert "tensor parallelism is not supported" in found["llama.cpp"]["reason"]
    assert found["vllm"]["reason"] is None


def test_each_engine_takes_the_settings_it_has() -> None:
    found = rows("llama-3-8b", context_tokens=100, engine_settings={"block-size": "32", "page-size": "16"})
    assert (found["vllm"]["block_size"], found["sglang"]["block_size"]) == (32, 16)


def test_what_the_formula_refuses_is_refused() -> None:
    with pytest.raises(UsageError, match="--tp 3"):
        rows("llama-7b", tensor_parallel_size=3)


def test_the_command_prints_it_in_every_format(kvcalc: Any) -> None:
    question = ("estimate", "gpt-oss-120b", "--context", "4096", "--engine", "all")
    check(kvcalc(*question, "--json").json, "engines")
    table = kvcalc(*question, "--format", "tsv").out.splitlines()
    assert [line.split("\t")[:2] for line in table] == [
        ["model", "engine"], *(["gpt-oss-120b", name] for name in ENGINES)
    ]  # fmt: skip
    assert kvcalc(*question, "--format", "csv").out.count("\n") == len(ENGINES) + 1
    human = kvcalc(*question, "--format", "human").out
    assert all(name in human for name in ENGINES)
    total = kvcalc(*question, "--get", "engines.5.total_bytes").out
    # llama.cpp: 18 layers with 4,096 cells, and 18 layers with 4 x 128 + 512 cells.
    assert int(total) == 18 * (4096 + 1024) * 2048


def test_short_options_as_llama_cpp_spells_them(kvcalc: Any) -> None:
    options = ("-c", "1k", "-ctk", "q8_0", "-ctv", "q4_0", "-np", "2", "-ub", "256", "-fa", "on", "-kvu")
    engine = kvcalc("estimate", "llama-3-8b", "--engine", "llama.cpp", *options, "--json").json
    assert engine["kv_cache"]["dtype"] == "q8_0/q4_0"
    assert (engine["engine"]["n_seq_max"], engine["engine"]["n_stream"]) == (2, 1)
    assert (engine["engine"]["ubatch_size"], engine["engine"]["flash_attn"]) == (256, "on")


def test_a_document_without_speed_and_limits_has_no_warnings_about_them() -> None:
    asked: Any = {"devices": kvcalc.find_devices("h100"), "batch_size": 4}
    found = compare_engines(Question(loaded("qwen3-8b"), engine="vllm,llama.cpp", **asked))
    assert [warning for warning in found["warnings"] if warning["part"] in ("throughput", "fit")] == []
