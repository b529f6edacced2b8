"""What a command must not do silently: drop a value, leave a row empty, or print figures of what does not run."""

from __future__ import annotations

import json
import re
import sys
from io import BytesIO, TextIOWrapper
from typing import Any

import pytest


@pytest.mark.parametrize("engine", ["logical", "vllm", "sglang"])
def test_a_batch_that_does_not_fit_has_no_speed(kvcalc: Any, engine: str) -> None:
    asked = ("sweep", "deepseek-v3", "--gpu", "h100x16", "--context", "8k", "--batch", "1,64,512", "--engine", engine)
    rows = kvcalc(*asked, "--json").json["points"]
    assert [row["fits"] for row in rows] == [True, False, False]
    for row in rows:
        speeds = [row[key] for key in row if key.endswith("_seconds") or key == "decode_tokens_per_second"]
        assert all(value is not None for value in speeds) if row["fits"] else set(speeds) == {None}
        assert row["total_bytes"] > 0


def test_fit_for_several_engines_leads_to_a_table_with_verdict_and_speed(kvcalc: Any) -> None:
    refused = kvcalc("fit", "llama-3-8b", "--gpu", "h100", "--engine", "vllm,sglang")
    command = re.search(r"kvcalc (compare .*)", refused.err)
    assert command
    out = kvcalc(*command[1].split(), "--format", "human").out
    assert "tok/s" in out
    assert "fits" in out
    several = ("estimate", "llama-3-8b", "--engine", "vllm,sglang", "--format", "human")
    assert "fits" in kvcalc(*several, "--gpu", "h100").out
    assert "fits" not in kvcalc(*several).out


def test_a_model_without_an_answer_is_an_error(kvcalc: Any) -> None:
    result = kvcalc("compare", "llama-3-8b", "llama-3-70x", "--format", "human")
    assert result.status == 1
    assert "kvcalc: no answer for llama-3-70x: model 'llama-3-70x' is not known" in result.err
    assert result.err.count("is not known") == 1
    assert "512.00 MiB" in result.out
    # A kind of attention that a model cannot have is an answer, and so is an engine that refuses it.
    assert kvcalc("compare", "t5-small", "--engine", "logical,llama.cpp").status == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("estimate", "gpt2", "--get", "kv_cache.dtype", "--get", "kv_cache.total_bytes"), "--get"),
        (("estimate", "gpt2", "--context", "1k", "-c", "512"), "--context"),
        (("plan", "gpt2", "--input-tokens", "100", "--prompt-tokens", "200"), "--input-tokens"),
        (("fit", "gpt2", "--gpu", "h100", "--engine", "vllm", "--max-num-seqs", "8", "--max-num-seqs", "9"),
         "--max-num-seqs"),
        (("models", "--family", "Qwen", "--family", "Llama"), "--family"),
        (("gpus", "h100", "--get", "name", "--get", "vendor"), "--get"),
    ],
)  # fmt: skip
def test_a_second_value_is_an_error(kvcalc: Any, words: tuple[str, ...], named: str) -> None:
    result = kvcalc(*words)
    assert (result.status, result.out) == (2, "")
    assert f"{named} is given twice" in result.err
    assert ("kvcalc sweep MODEL --context" in result.err) == (named == "--context")


def test_models_shows_the_bytes_that_estimate_shows(kvcalc: Any) -> None:
    rows = {row["name"]: row for row in kvcalc("models", "--json").json["models"]}
    assert rows["gemma-3-27b"]["bytes_per_token"] == 80 * 1024
    for name in ("gemma-3-27b", "bert-base", "deepseek-v4-pro", "gpt-oss-120b", "qwen3-next-80b-a3b", "t5-small"):
        found = kvcalc("estimate", name, "--json").json
        keys = ("bytes_per_token", "fixed_bytes_per_sequence")
        assert [rows[name][key] for key in keys] == [found["kv_cache"][key] for key in keys], name
        assert rows[name]["kv_dtype"] == found["kv_cache"]["dtype"]
        assert rows[name]["context_tokens"] == found["workload"]["context_tokens"]
    assert "per token" in kvcalc("models", "--format", "human").out.splitlines()[0]


@pytest.mark.parametrize("command", ["simulate", "plan", "estimate", "check"])
def test_one_spelling_of_the_lengths_is_shown_and_both_are_taken(kvcalc: Any, command: str) -> None:
    for screen in ("-h", "--help"):
        shown = re.sub(r"\[also:[^]]*\]", "", kvcalc(command, screen).out)
        assert "--input-tokens" in shown
        assert "--prompt-tokens" not in shown
        assert "--answer-tokens" not in shown
        assert not re.search(r"\S   +--", shown)
    asked = ("simulate", "gpt2", "--gpu", "h100", "--concurrency", "1", "--requests", "2", "--get", "load")
    one = kvcalc(*asked, "--input-tokens", "100", "--output-tokens", "5")
    assert one.status == 0, one.err
    assert one.out == kvcalc(*asked, "--prompt-tokens", "100", "--answer-tokens", "5").out


def _batch(kvcalc: Any, monkeypatch: pytest.MonkeyPatch, line: dict[str, Any]) -> Any:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(json.dumps(line).encode())))
    return kvcalc("batch").json


def test_batch_takes_the_keys_of_its_answers(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"context_tokens": 1000, "batch_size": 3, "kv_memory_bytes": 2**33, "tensor_parallel_size": 2}
    found = _batch(kvcalc, monkeypatch, {"model": "llama-3-8b", **asked})
    assert (
        found == kvcalc("estimate", "llama-3-8b", "-c", 1000, "-b", 3, "--kv-memory", "8GiB", "--tp", 2, "--json").json
    )
    twice = _batch(kvcalc, monkeypatch, {"model": "gpt2", "context": 10, "context_tokens": 20})
    assert "the same field" in twice["error"]["message"]


@pytest.mark.parametrize("wrong", ["contxt", "context_size", "batch_sise", "tensor_paralel", "max_tokens", "gpus"])
def test_what_batch_suggests_is_a_key(kvcalc: Any, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    hint = _batch(kvcalc, monkeypatch, {"model": "gpt2", wrong: 1})["error"]["hint"]
    names = (
        hint.removeprefix("did you mean ").removesuffix("?").split(" or ") if "did you mean" in hint else ["context"]
    )
    for name in names:
        error = _batch(kvcalc, monkeypatch, {"model": "gpt2", name: 1}).get("error", {"message": ""})
        assert "unknown field" not in error["message"], name


def test_a_percentage_of_the_memory(kvcalc: Any) -> None:
    asked = (
        "plan",
        "llama-3-8b",
        "--gpu",
        "h100",
        "--concurrency",
        "4",
        "--input-tokens",
        "1k",
        "--output-tokens",
        "9",
    )
    found = kvcalc(*asked, "--gpu-memory-utilization", "90%", "--json").json
    assert found["plans"] == kvcalc(*asked, "--gpu-memory-utilization", "0.9", "--json").json["plans"]
    # The engine's own command takes no percentage.
    assert "--gpu-memory-utilization 0.9" in found["commands"][0]["command"]
    meant = kvcalc("fit", "gpt2", "--gpu", "h100", "--engine", "vllm", "--gpu-memory-utilization", "90")
    assert "for a percentage: --gpu-memory-utilization 90%" in meant.err
    wrong = kvcalc("fit", "gpt2", "--gpu", "h100", "--engine", "vllm", "--gpu-memory-utilization", "190%")
    assert wrong.status == 2


def test_several_kinds_of_attention_lead_to_compare(kvcalc: Any) -> None:
    refused = kvcalc("estimate", "llama-3-8b", "--attention", "mha,mqa")
    assert refused.status == 2
    command = re.search(r"kvcalc (compare MODEL .*)", refused.err)
    assert command
    assert kvcalc(*command[1].replace("MODEL", "llama-3-8b").split()).status == 0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("estimate", "x", "--gpu", "h100,h20"), False), (("fit", "x", "--gpu", "h100,h20"), False),
        (("compare", "x", "--gpu", "h100,h20"), True), (("plan", "x", "--gpu", "h100,h20"), True),
        (("estimate", "x", "--attention", "mha,m"), False), (("compare", "x", "--attention", "mha,m"), True),
        (("estimate", "x", "--attention", "al"), False), (("estimate", "x", "--gpu", "h20"), True),
    ],
)  # fmt: skip
def test_no_command_completes_what_it_refuses(kvcalc: Any, words: tuple[str, ...], found: bool) -> None:
    lines = kvcalc("completion", "words", "--", *words).out.splitlines()
    assert any(not line.startswith(":") for line in lines) == found


def test_a_note_is_no_warning_and_get_prints_neither(kvcalc: Any) -> None:
    note = ("fit", "llama-3-8b", "--gpu", "l4", "--engine", "vllm", "--context", "100")
    err = kvcalc(*note).err
    assert "note: a first start" in err
    assert "warning: " not in err
    warned = ("estimate", "llama-3-8b", "--context", "9000")
    assert kvcalc(*warned).err.startswith("warning: ")
    assert kvcalc(*warned, "--get", "kv_cache.total_bytes").err == ""


def test_explain_shows_formulas_and_the_evidence_of_the_speed(kvcalc: Any) -> None:
    asked = ("estimate", "llama-3-70b", "--gpu", "h100x4", "--engine", "vllm", "--context", "8k")
    evidence = kvcalc(*asked, "--json").json["throughput"]["evidence"]
    assert evidence["measured_times"] > 100
    assert evidence["low_factor"] < 1 < evidence["high_factor"]
    assert evidence["outside"] == []
    out = " ".join(kvcalc(*asked, "--explain", "--format", "human").out.split())
    formula = "2 x 80 x 1 x 8 x 8,192 x 128 x 2 = 2,684,354,560 bytes, exact"
    fitted = f"fitted to {evidence['measured_times']:,} measured times"
    for text in (formula, "estimated", evidence["sources"][0], fitted, "with the model's family left out"):
        assert text in out
    assert "where the figures come from" not in kvcalc(*asked, "--format", "human").out
    new = kvcalc("estimate", "llama-3-70b", "--gpu", "mi300x", "--engine", "vllm", "--json").json["throughput"]
    assert new["evidence"]["outside"]
