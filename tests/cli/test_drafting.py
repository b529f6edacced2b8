"""The options for speculative decoding, on the command line and in a batch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

DRAFTED = ("--speculative", "mtp:3", "--acceptance-length", "2.4")
SERVER = ("deepseek-v3", "--gpu", "h200x8", "--engine", "vllm")


def test_a_batch_line_is_answered_as_the_command_line(kvcalc: Any, tmp_path: Path) -> None:
    lines = [
        {"model": "deepseek-v3", "gpu": "h200x8", "engine": "vllm", "speculative": "mtp:3", "acceptance_length": 2.4},
        {"model": "llama-3-70b", "gpu": "h100x4", "speculative": "draft:4", "acceptance-length": "3",
         "draft_model": "llama-3.2-1b", "input_tokens": 1000, "output_tokens": 200, "prefix_hit_rate": 0.5},
    ]  # fmt: skip
    commands = [
        ("estimate", *SERVER, *DRAFTED),
        ("estimate", "llama-3-70b", "--gpu", "h100x4", "--speculative", "draft:4", "--acceptance-length", "3",
         "--draft-model", "llama-3.2-1b", "--input-tokens", "1000", "--output-tokens", "200",
         "--prefix-hit-rate", "50%"),
    ]  # fmt: skip
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = [json.loads(line) for line in kvcalc("batch", path).out.splitlines()]
    assert answers == [kvcalc(*command, "--json").json for command in commands]
    assert all(answer["speculative"]["speedup"] > 0 for answer in answers)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--speculative", "mtp"), ("mtp: the number", "mtp:3")),
        (("--speculative", "mtp:x"), ("x", "16")),
        (("--speculative", "mtp:0"), ("mtp:0", "leave --speculative out")),
        (("--speculative", "medusa:3"), ("medusa:3", "mtp, eagle, eagle1, dflash, draft, ngram")),
        (("--speculative", "mtp:3"), ("tokens are accepted", "--acceptance-length 2.4")),
        (("--speculative", "mtp:3", "--acceptance-length", "5"), ("--acceptance-length 5", "at most the 3")),
        (("--speculative", "mtp:3", "--acceptance-length", "nan"), ("nan", "--acceptance-length 2.4")),
        (("--speculative", "draft:3", "--acceptance-length", "2"), ("draft:3", "--draft-model MODEL")),
        (("--acceptance-length", "2"), ("needs --speculative", "mtp:3")),
        (("--draft-model", "llama-3.2-1b"), ("needs --speculative", "mtp:3")),
        ((*DRAFTED, "--draft-model", "llama-3.2-1b"), ("--draft-model llama-3.2-1b", "draft:3")),
    ],
)
def test_wrong_options_are_refused_with_what_to_type(kvcalc: Any, options: tuple[str, ...], words: Any) -> None:
    result = kvcalc("estimate", *SERVER, *options)
    first, second = result.err.splitlines()
    assert result.status == 2
    assert words[0] in first
    assert words[1] in second


def test_an_unknown_draft_model_is_unknown(kvcalc: Any) -> None:
    result = kvcalc("estimate", "llama-3-70b", "--speculative", "draft:3", "--draft-model", "llama-3.2-1q")
    assert result.status == 3
    assert "llama-3.2-1q" in result.err


def test_a_model_without_mtp_layers_is_refused_by_name(kvcalc: Any) -> None:
    result = kvcalc("estimate", "llama-3-70b", *DRAFTED)
    assert result.status == 2
    assert result.err.splitlines()[0] == (
        "kvcalc: --speculative mtp: llama-3-70b has no multi-token prediction (MTP) layers"
    )


def test_comparisons_sweeps_and_fits_draft_like_an_estimate(kvcalc: Any) -> None:
    estimated = kvcalc("estimate", *SERVER, "--context", "8k", *DRAFTED, "--json").json
    for command, path in (("compare", "models"), ("sweep", "points")):
        arguments = (command, *SERVER, "--context", "8k", "--json")
        plain, drafted = kvcalc(*arguments).json[path][0], kvcalc(*arguments, *DRAFTED).json[path][0]
        assert drafted["total_bytes"] > plain["total_bytes"]
        assert drafted["decode_step_seconds"] > plain["decode_step_seconds"]
        assert drafted["decode_tokens_per_second"] > plain["decode_tokens_per_second"]
        assert drafted["decode_tokens_per_second"] == estimated["throughput"]["decode_tokens_per_second"]
        assert drafted["total_bytes"] == estimated["kv_cache"]["total_bytes"]
    fitted = kvcalc("fit", *SERVER, "--context", "8k", *DRAFTED, "--json").json
    assert fitted["fit"] == estimated["fit"]
    assert fitted["speculative"] == estimated["speculative"]


def test_a_plan_drafts_and_prints_the_command(kvcalc: Any) -> None:
    load = ("--input-tokens", "1k", "--output-tokens", "1k", "--concurrency", "4", "--gpu", "h200", "--engine", "vllm")
    plain = kvcalc("plan", "deepseek-v3", *load, "--json").json
    drafted = kvcalc("plan", "deepseek-v3", *load, *DRAFTED, "--json").json
    assert plain["speculative"] is None
    assert drafted["speculative"] == {
        "method": "mtp", "num_draft_tokens": 3, "acceptance_length": 2.4, "draft_model": None,
    }  # fmt: skip
    assert drafted["best"]["tpot_seconds"] < plain["best"]["tpot_seconds"]
    assert '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\'' in drafted["best"]["vllm"]
    other = kvcalc("plan", "deepseek-v3", *load[:-1], "sglang", *DRAFTED, "--json").json
    assert "--speculative-num-steps 3" in other["best"]["sglang"]
    assert "--speculative" not in plain["best"]["vllm"]


def test_a_plan_names_the_draft_models_checkpoint(kvcalc: Any) -> None:
    found = kvcalc(
        "plan", "llama-3-70b", "--input-tokens", "1k", "--output-tokens", "100", "--concurrency", "4", "--gpu", "h100",
        "--speculative", "draft:4", "--draft-model", "llama-3.2-1b", "--acceptance-length", "3",
        "--engine", "vllm,sglang", "--json",
    ).json  # fmt: skip
    commands = {row["engine"]: row["command"] for row in found["commands"]}
    assert "meta-llama/Llama-3.2-1B" in commands["vllm"]
    assert "--speculative-algorithm STANDALONE" in commands["sglang"]


def test_the_screen_says_what_drafting_costs_and_when_it_stops_paying(kvcalc: Any) -> None:
    question = ("llama-3-70b", "--gpu", "h100x4", "--engine", "vllm", "--speculative", "ngram:4")
    asked = ("estimate", *question, "--acceptance-length", "1.6")
    batch = kvcalc(*asked, "--get", "speculative.break_even_batch").out.strip()
    shown = kvcalc(*asked, "--format", "human").out
    assert "speculative decoding  ngram, 4 drafted per step, acceptance length 1.6" in shown
    assert re.search(rf"break-even batch +{batch}  drafting pays below it", shown)
    assert "without drafting" in shown


def test_without_a_device_the_bytes_need_no_acceptance_length(kvcalc: Any) -> None:
    found = kvcalc("estimate", "deepseek-v3", "--speculative", "mtp:1", "--json").json
    assert found["speculative"]["cache_bytes"] > 0
    assert found["speculative"]["speedup"] is None
    assert "break-even" not in kvcalc("estimate", "deepseek-v3", "--speculative", "mtp:1", "--format", "human").out


def test_all_engines_side_by_side(kvcalc: Any) -> None:
    found = kvcalc("estimate", "deepseek-v3", "--engine", "all", "--speculative", "mtp:1", "--json").json
    plain = kvcalc("estimate", "deepseek-v3", "--engine", "all", "--json").json
    for row, before in zip(found["engines"], plain["engines"]):
        if row["engine"] == "transformers":
            assert "ngram:1" in row["reason"] or "n-grams" in row["reason"]
            continue
        if row["engine"] == "mlx":
            assert "draft model only" in row["reason"]
            continue
        assert (row["reason"] is None) == (before["reason"] is None), row
        if row["reason"] is None:
            assert row["total_bytes"] > before["total_bytes"]


def test_methods_and_draft_models_complete(kvcalc: Any) -> None:
    def candidates(*words: str) -> list[str]:
        return [line.partition("\t")[0] for line in kvcalc("completion", "words", "--", *words).out.splitlines()]

    assert {"mtp:", "eagle:", "draft:", "ngram:", ":nospace"} <= set(candidates("estimate", "--speculative", ""))
    assert "llama-3.2-1b" in candidates("estimate", "--draft-model", "llama-3.2")
