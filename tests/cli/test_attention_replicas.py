"""--dp in every command that computes a layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MODEL = ("deepseek-r1", "--gpu", "h200x8", "--engine", "vllm", "--dp", "8")


def test_every_command_gives_the_figures_of_estimate(kvcalc: Any, tmp_path: Path) -> None:
    asked = ("--context", "8k", "--batch", "100")
    whole = kvcalc("estimate", *MODEL, *asked, "--json").json
    cache, fit, speed = (whole[part] for part in ("kv_cache", "fit", "throughput"))
    fitted = kvcalc("fit", *MODEL, *asked, "--json").json
    assert (fitted["kv_cache"], fitted["fit"]) == (cache, fit)
    (row,) = kvcalc("compare", *MODEL, *asked, "--json").json["models"]
    (point,) = kvcalc("sweep", *MODEL, *asked, "--json").json["points"]
    for found in (row, point):
        assert (found["data_parallel_size"], found["tensor_parallel_size"], found["num_devices"]) == (8, 1, 8)
        assert found["bytes_per_device"] == cache["bytes_per_device"]
        assert found["free_bytes"] == fit["free_bytes"]
        assert found["decode_step_seconds"] == pytest.approx(speed["decode_step_seconds"])
    file = tmp_path / "questions.jsonl"
    question = {"model": "deepseek-r1", "gpu": "h200x8", "engine": "vllm", "dp": 8, "context": 8192, "batch": 100}
    file.write_text(json.dumps(question))
    assert json.loads(kvcalc("batch", file).out) == whole


def test_a_sweep_by_the_formula_is_the_formula(kvcalc: Any) -> None:
    words = ("sweep", "deepseek-r1", "--dp", "8", "--context", "1k,4k", "--batch", "1,8,9", "--json")
    for point in kvcalc(*words).json["points"]:
        asked = ("--context", point["context_tokens"], "--batch", point["batch_size"], "--dp", "8", "--json")
        cache = kvcalc("estimate", "deepseek-r1", *asked).json["kv_cache"]
        for name in ("stored_bytes", "total_bytes", "bytes_per_device", "devices_total_bytes", "decode_read_bytes"):
            assert point[name] == cache[name], (name, point["batch_size"])


def test_check_judges_the_batch_of_all_replicas(kvcalc: Any) -> None:
    most = kvcalc("estimate", *MODEL, "--get", "fit.max_batch_size").out.strip()
    assert kvcalc("estimate", *MODEL, "--batch", most, "--check").status == 0
    assert kvcalc("estimate", *MODEL, "--batch", int(most) + 1, "--check").status == 4
    assert kvcalc("fit", *MODEL, "--batch", int(most) + 1).status == 4


def test_vllms_own_names_work(kvcalc: Any) -> None:
    words = ("estimate", "deepseek-r1", "--gpu", "h200", "--data-parallel-size", "8", "--tensor-parallel-size", "2")
    engine = kvcalc(*words, "--json").json["engine"]
    assert (engine["data_parallel_size"], engine["tensor_parallel_size"], engine["expert_parallel_size"]) == (8, 2, 16)


def test_human_output_names_the_dp_ranks(kvcalc: Any) -> None:
    assert "on 8 x h200-sxm of 139.72 GiB, dp 8\n" in kvcalc("fit", *MODEL, "--format", "human").out
    two = ("fit", "deepseek-r1", "--gpu", "h200x16", "--engine", "sglang", "--dp", "8", "--format", "human")
    assert "dp 8 x tp 2" in kvcalc(*two).out
    small = kvcalc("fit", "deepseek-r1", "--gpu", "h100x8", "--dp", "8", "--engine", "vllm", "--format", "human")
    assert "it fits on 16 of these devices: --tp 2 --dp 8\n" in small.out
    swept = kvcalc("sweep", *MODEL, "--context", "4k", "--batch", "8,64", "--format", "human").out
    assert "dp 8" in swept.splitlines()[0]
    assert "per device" in swept


@pytest.mark.parametrize("words", [
    ("estimate", "llama-3-8b", "--dp", "2", "--engine", "tensorrt-llm"),
    ("estimate", "deepseek-r1", "--dp", "2", "--engine", "llama.cpp"),
    ("estimate", "deepseek-r1", "--dp", "2", "--engine", "mlx"),
    ("fit", "deepseek-r1", "--gpu", "m2-ultra", "--dp", "2", "--engine", "mlx"),
    ("fit", "deepseek-r1", "--gpu", "h200x8", "--dp", "5"),
    ("sweep", "deepseek-r1", "--dp", "3", "--gpu", "h200x8", "--context", "4k"),
    ("estimate", "deepseek-r1", "--dp", "0"),
])  # fmt: skip
def test_a_refusal_names_the_option_and_what_to_type(kvcalc: Any, words: tuple[str, ...]) -> None:
    done = kvcalc(*words)
    assert done.status == 2
    assert "--dp" in done.err
    assert not done.out


def test_completion_offers_the_option(kvcalc: Any) -> None:
    for command in ("estimate", "fit", "compare", "sweep", "plan", "score"):
        assert "--dp" in kvcalc(command, "--help").out, command
