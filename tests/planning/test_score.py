"""`kvcalc score`: the prediction is that of `kvcalc estimate`, options override the file, and the errors are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

LOGS = ROOT / "tests" / "logs"


def scores(kvcalc: Any, *words: Any) -> list[dict[str, Any]]:
    result = kvcalc("score", *words, "--json")
    assert result.status == 0, result.err
    return list(result.json["scores"])


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes a run of a sample file with some values replaced. Returns the path."""

    def change(name: str, run: int = 0, **changes: Any) -> Path:
        text = (LOGS / name).read_text()
        found = json.loads(text) if name == "llama-bench.json" else [json.loads(line) for line in text.splitlines()]
        path = tmp_path / name
        path.write_text(json.dumps({**found[run], **changes}))
        return path

    return change


@pytest.mark.parametrize(
    ("file", "options", "model"),
    [
        ("vllm-bench.json", ("--gpu", "h100", "--engine", "vllm"), "llama-3.1-8b"),
        ("guidellm.json", ("--gpu", "l40sx2", "--engine", "sglang"), "llama-3.1-8b"),
        ("sglang-bench.jsonl", ("--gpu", "h100x4", "--engine", "sglang", "--dtype", "fp8"), "llama-3.1-70b"),
        ("vllm-bench.json", ("--gpu", "a100x2", "--engine", "vllm", "--kv-dtype", "fp8"), "llama-3.1-8b"),
    ],
)
def test_the_prediction_is_that_of_estimate(kvcalc: Any, file: str, options: tuple[str, ...], model: str) -> None:
    for row in scores(kvcalc, LOGS / file, *options):
        load = [f"--{name}={row[name.replace('-', '_')]}" for name in ("input-tokens", "output-tokens", "concurrency")]
        serving = kvcalc("estimate", model, *options, *load, "--benchmark", "--json").json["throughput"]["serving"]
        assert row["predicted_seconds"] == serving[f"{row['metric']}_seconds"]
        assert row["low_seconds"] == serving[f"{row['metric']}_low_seconds"]
        assert row["high_seconds"] == serving[f"{row['metric']}_high_seconds"]


def test_the_prediction_of_a_step_is_that_of_estimate(kvcalc: Any) -> None:
    prefill, decode, deep = scores(kvcalc, LOGS / "llama-bench.json")
    asked = ("estimate", "Qwen2.5-7B-Instruct", "--engine", "llama.cpp@b5163", "--gpu", "rtx-4080", "--dtype", "q4_k_m")
    for row, context, path in (
        (prefill, 512, "prefill_seconds"), (decode, 64, "decode_step_seconds"), (deep, 4160, "decode_step_seconds")
    ):  # fmt: skip
        throughput = kvcalc(*asked, "--context", str(context), "--json").json["throughput"]
        assert row["context_tokens"] == context
        assert row["predicted_seconds"] == throughput[path]
    assert decode["largest_part"] == "weights"


def test_the_error_and_the_factor_follow_from_the_times(kvcalc: Any) -> None:
    for row in scores(kvcalc, LOGS / "vllm-bench.json", "--gpu", "h100"):
        measured, predicted = row["measured_seconds"], row["predicted_seconds"]
        assert row["error"] == pytest.approx(predicted / measured - 1)
        if row["metric"] == "tpot":
            assert measured == row["mean_seconds"]
            assert row["in_range"] == (row["low_seconds"] <= measured <= row["high_seconds"])
        else:
            assert measured == row["median_seconds"]
            assert row["in_range"] is None or isinstance(row["in_range"], bool)
        if row["largest_part_factor"] is not None:
            mended = predicted + row["largest_part_seconds"] * (row["largest_part_factor"] - 1)
            assert mended == pytest.approx(measured)


def test_the_summary_is_of_the_rows(kvcalc: Any) -> None:
    document = kvcalc("score", LOGS / "vllm-bench.json", LOGS / "sglang-bench.jsonl", "--gpu", "h100", "--json").json
    assert [found["runs"] for found in document["results"]] == [3, 3]
    for found in document["summary"]:
        errors = [abs(row["error"]) for row in document["scores"] if row["metric"] == found["metric"]]
        assert found["times"] == len(errors) == 6
        assert found["mean_error"] == pytest.approx(sum(errors) / 6)
        assert found["within_a_quarter"] == pytest.approx(sum(error <= 0.25 for error in errors) / 6)


@pytest.mark.parametrize(
    ("file", "engine", "other"),
    [
        ("sglang-bench.jsonl", "vllm", "sglang"),
        ("llama-bench.json", "vllm", "llama.cpp"),
        ("sglang-bench.jsonl", "sglang", None),
        ("vllm-bench.json", "sglang", None),  # its backend names the client
    ],
)
def test_an_engine_that_was_not_measured_is_said(kvcalc: Any, file: str, engine: str, other: str | None) -> None:
    words = ("--gpu", "h100x4", "--dtype", "fp8") if file.startswith("sglang") else ("--gpu", "h100")
    result = kvcalc("score", LOGS / file, *words, "--engine", engine, "--json")
    text = None if other is None else f"{LOGS / file}: measured with {other}, compared with {engine}"
    said = [note["text"] for note in result.json["warnings"] if note["code"] == "other-engine"]
    assert said == ([] if text is None else [text])


def test_options_override_the_file(kvcalc: Any) -> None:
    words = ("--gpu", "h100x2", "--model", "qwen3-8b", "--engine", "sglang", "--tp", "2")
    row = scores(kvcalc, LOGS / "vllm-bench.json", *words)[0]
    assert (row["model"], row["engine"], row["tensor_parallel_size"]) == ("qwen3-8b", "sglang", 2)
    assert scores(kvcalc, LOGS / "sglang-bench.jsonl", "--gpu", "h100", "--tp", "8")[0]["num_devices"] == 8
    assert scores(kvcalc, LOGS / "sglang-bench.jsonl", "--gpu", "h100")[0]["num_devices"] == 4
    row = scores(kvcalc, LOGS / "llama-bench.json", "--gpu", "rtx-4090", "--kv-dtype", "q8_0", "--dtype", "q8_0")[1]
    assert row["gpu"] == "rtx-4090"


def test_the_cache_type_of_llama_bench_is_used(kvcalc: Any, write: Any) -> None:
    path = write("llama-bench.json", 2, type_k="q8_0", type_v="q8_0")
    (half,) = scores(kvcalc, path)
    assert half["predicted_seconds"] < scores(kvcalc, LOGS / "llama-bench.json")[2]["predicted_seconds"]
    (whole,) = scores(kvcalc, path, "--cache-type-k", "f16", "--cache-type-v", "f16")
    assert whole["predicted_seconds"] == scores(kvcalc, LOGS / "llama-bench.json")[2]["predicted_seconds"]


@pytest.mark.parametrize(
    ("name", "changes", "options", "status", "words"),
    [
        ("vllm-bench.json", {}, (), 2, ("does not name the device", "--gpu")),
        ("vllm-bench.json", {"model_id": "/data/mine", "tokenizer_id": None}, ("--gpu", "h100"), 3,
         ("unknown model, '/data/mine'", "--model")),
        ("vllm-bench.json", {"backend": "lmdeploy"}, ("--gpu", "h100"), 2, ("does not name the engine", "--engine")),
        ("vllm-bench.json", {}, ("--gpu", "h100x4", "--tp", "2"), 2, ("replicas", "--num-gpus 2")),
        ("vllm-bench.json", {}, ("--gpu", "t4", "--model", "llama-3-70b"), 2, ("no prediction", "")),
        ("llama-bench.json", {"n_gpu_layers": 10}, (), 2, ("10 of 28 layers", "")),
        ("llama-bench.json", {"model_type": "qwen2 7B Q9_X"}, (), 2, ("type of its weights", "--dtype")),
        ("llama-bench.json", {"gpu_info": "Acorn 9000"}, (), 3, ("Acorn 9000", "")),
        ("sglang-bench.jsonl", {"server_info": {"tp_size": 3}}, ("--gpu", "h100", "--model", "llama-3-8b"), 2,
         ("3", "")),
    ],
)  # fmt: skip
def test_what_a_prediction_needs_is_named(
    kvcalc: Any, write: Any, name: str, changes: dict[str, Any], options: tuple[str, ...], status: int,
    words: tuple[str, str],
) -> None:  # fmt: skip
    result = kvcalc("score", write(name, **changes), *options)
    assert result.status == status, result.err
    assert result.out == ""
    first, *second = result.err.splitlines()
    assert f"{name}, run 1: " in first
    assert words[0] in first
    assert words[1] in " ".join(second)
    assert len(second) <= 1


def test_a_served_path_names_the_model_by_its_last_part(kvcalc: Any, write: Any) -> None:
    path = write("vllm-bench.json", model_id="/data/models/Llama-3.1-8B-Instruct/")
    assert scores(kvcalc, path, "--gpu", "h100")[0]["model"] == "llama-3.1-8b"


def test_a_refused_run_does_not_stop_the_others(kvcalc: Any, write: Any) -> None:
    bad = write("vllm-bench.json", spec_decode_acceptance_length=2.5)
    result = kvcalc("score", bad, LOGS / "vllm-bench.json", "--gpu", "h100", "--json")
    assert result.status == 0
    (refused,) = result.json["refused"]
    assert (refused["file"], refused["run"]) == (str(bad), 1)
    assert "drafts tokens" in refused["reason"]
    assert len(result.json["scores"]) == 6
    table = kvcalc("score", bad, LOGS / "vllm-bench.json", "--gpu", "h100", "--format", "tsv")
    assert len(table.out.splitlines()) == 7
    assert "drafts tokens" in table.err


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_the_screen_cuts_nothing(kvcalc: Any, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = kvcalc("score", LOGS / "llama-bench.json", "--format", "human").out
    assert "…" not in out
    assert "prefill" in out
    assert ("not shown" in out) == (int(columns) < 120)


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"benchmarks": [{"metrics": {}}]}', '[{"a": 1}]', "[[[["])
def test_other_files_are_one_line_and_exit_code_2(kvcalc: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "file.json").write_text(text)
    result = kvcalc("score", tmp_path / "file.json", "--gpu", "h100")
    assert result.status == 2
    assert result.out == ""
    assert len(result.err.splitlines()) <= 2


def test_first_tokens_that_come_early_suggest_repeated_prompts(kvcalc: Any, tmp_path: Path) -> None:
    """With the share that the client repeated, the prompts take less and the note is gone."""
    run = json.loads((LOGS / "vllm-bench.json").read_text().splitlines()[0])
    early = {**run, "mean_ttft_ms": run["mean_ttft_ms"] / 20, "median_ttft_ms": run["median_ttft_ms"] / 20}
    file = tmp_path / "early.json"
    file.write_text(json.dumps(early))
    usual, unsaid, said = (
        kvcalc("score", path, "--gpu", "h100", *more, "--json").json
        for path, *more in ((LOGS / "vllm-bench.json",), (file,), (file, "--prefix-hit-rate", "0.9"))
    )
    codes = [{note["code"] for note in document["warnings"]} for document in (usual, unsaid, said)]
    assert ["repeated-prompts" in each for each in codes] == [False, True, False]
    first, later = (
        next(row["predicted_seconds"] for row in document["scores"] if row["metric"] == "ttft")
        for document in (unsaid, said)
    )
    assert later < 0.8 * first
