"""`kvcalc compare`: rows are estimates, a refusal is in its row, and the exit code is 0 if any row has figures."""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc.planning.answers.figures import FIGURES


def test_rows_are_estimates(kvcalc: Any) -> None:
    options = ("--context", "8k", "--batch", "3", "--tp", "2", "--kv-dtype", "fp8", "--kv-memory", "20GiB")
    names = ["llama-3-70b", "deepseek-v3", "gemma-3-27b"]
    rows = kvcalc("compare", *names, *options, "--json").json["models"]
    assert [row["model"] for row in rows] == names
    for row in rows:
        answer = kvcalc("estimate", row["model"], *options, "--json").json
        assert {key: row[key] for key in FIGURES} == {key: answer["kv_cache"][key] for key in FIGURES}
        assert row["weights_bytes"] == answer["weights"]["bytes"]
        assert row["max_batch_size"] == answer["fit"]["max_batch_size"]
        assert (row["reason"], row["exit_code"]) == (None, 0)


def test_attention_all_is_one_model_four_times(kvcalc: Any) -> None:
    rows = kvcalc("compare", "llama-3-70b", "--attention", "all", "--context", "8192", "--json").json["models"]
    assert [row["attention"] for row in rows] == ["mha", "mqa", "gqa", "mla"]
    assert [row["total_bytes"] for row in rows][:3] == [21_474_836_480, 335_544_320, 2_684_354_560]


def test_one_context_for_all_the_shortest_default(kvcalc: Any) -> None:
    document = kvcalc("compare", "llama-3-70b", "gpt2", "--json").json
    assert document["workload"]["context_tokens"] == 1024
    assert kvcalc("compare", "llama-3-70b", "gemma-2b", "--get", "workload.context_tokens").out == "4096\n"


def test_a_refused_model_has_its_reason_and_the_rest_are_answered(kvcalc: Any) -> None:
    result = kvcalc("compare", "llama-3-8b", "lama-3-8c", "--json")
    assert result.status == 1
    good, bad = result.json["models"]
    assert good["total_bytes"] > 0
    assert bad["total_bytes"] is None
    assert "lama-3-8c" in bad["reason"]
    assert bad["exit_code"] == 3
    assert "lama-3-8c" in kvcalc("compare", "llama-3-8b", "lama-3-8c").err


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("nope", "nape"), 3), (("llama-3-8b", "gpt2", "--kv-dtype", "fp7"), 2), (("llama-3-8b", "--tp", "5"), 2),
        (("llama-3-8b", "--attention", "mgqa"), 2), (("falcon-7b", "--attention", "gqa"), 2), ((), 2),
        (("llama-3-8b", "--get", "models.0.byte"), 2),
    ],
)  # fmt: skip
def test_where_all_are_refused_the_status_is_the_refusals(kvcalc: Any, arguments: tuple[str, ...], status: int) -> None:
    result = kvcalc("compare", *arguments)
    assert result.status == status
    assert result.out == ""
    assert result.err.startswith("kvcalc: ")


def test_a_table_for_scripts_and_one_for_people(kvcalc: Any) -> None:
    lines = kvcalc("compare", "llama-3-8b", "nope", "jamba-v0.1").out.splitlines()
    assert len(lines) == 4
    assert {len(line.split("\t")) for line in lines} == {len(lines[0].split("\t"))}
    human = kvcalc("compare", "llama-3-8b", "nope", "jamba-v0.1", "--format", "human")
    assert "hybrid" in human.out
    assert "nope" in human.err


def test_on_devices_rows_have_fit_and_speed(kvcalc: Any) -> None:
    options = ("--gpu", "h100x4", "--engine", "vllm", "--context", "32k", "--batch", "16")
    document = kvcalc("compare", "llama-3.3-70b", "qwen3-32b", *options, "--json").json
    assert [hardware["num_devices"] for hardware in document["hardware"]] == [4]
    assert [engine["name"] for engine in document["engines"]] == ["vllm"]
    for row in document["models"]:
        assert (row["gpu"], row["num_devices"], row["tensor_parallel_size"]) == ("h100-sxm", 4, 4)
        answer = kvcalc("estimate", row["model"], *options, "--json").json
        assert row["fits"] == answer["fit"]["fits"]
        assert (answer["throughput"] is None) == (not row["fits"])
        speed = answer["throughput"] or {}
        assert row["decode_step_seconds"] == speed.get("decode_step_seconds")
        assert row["decode_step_low_seconds"] == speed.get("low_seconds")
        assert row["decode_step_high_seconds"] == speed.get("high_seconds")
        assert row["bound_by"] == speed.get("bound_by")
    human = kvcalc("compare", "llama-3.3-70b", "qwen3-32b", *options, "--format", "human").out
    assert "4 x h100-sxm" in human
    assert max(map(len, human.splitlines())) <= 80


def test_engines_and_devices_are_lists_and_each_pair_has_a_row(kvcalc: Any) -> None:
    base = ("compare", "llama-3-8b", "qwen3-8b", "--context", "4k", "--json")
    commas = kvcalc(*base, "--gpu", "h100x2,l40s", "--engine", "vllm,sglang", "--page-size", "32")
    repeated = kvcalc(*base, "--gpu", "h100x2", "--gpu", "l40s", "--engine", "vllm", "--engine", "sglang",
                      "--page-size", "32")  # fmt: skip
    assert commas.json == repeated.json
    rows = commas.json["models"]
    assert [(row["model"], row["engine"], row["gpu"], row["num_devices"]) for row in rows] == [
        (model, engine, gpu, number)
        for model in ("llama-3-8b", "qwen3-8b")
        for engine in ("vllm", "sglang")
        for gpu, number in (("h100-sxm", 2), ("l40s", 1))
    ]
    alone = kvcalc("compare", "qwen3-8b", *base[3:], "--gpu", "l40s", "--engine", "sglang", "--page-size", "32")
    assert rows[-1] == alone.json["models"][0]
    every = kvcalc("compare", "llama-3-8b", "--engine", "all", "--json").json["models"]
    assert [row["engine"] for row in every] == [
        "logical",
        "transformers",
        "vllm",
        "sglang",
        "tensorrt-llm",
        "llama.cpp",
        "mlx",
    ]


def test_a_given_cache_memory_replaces_the_reserve_of_a_device(kvcalc: Any) -> None:
    options = ("--gpu", "h100", "--engine", "vllm", "--context", "8k", "--kv-memory", "10GiB", "--json")
    (row,) = kvcalc("compare", "llama-3.1-8b", *options).json["models"]
    answer = kvcalc("estimate", "llama-3.1-8b", *options).json
    assert row["max_batch_size"] == answer["fit"]["max_batch_size"] == 10
    assert row["decode_step_seconds"] > 0


def test_a_name_is_never_cut(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "someone/Llama-3.1-70B-Instruct-with-a-very-long-name-of-its-own"
    options = ("--gpu", "h100x8,h200x8", "--engine", "vllm,sglang", "--context", "32k", "--batch", "16")
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        for words in ((), options):
            out = kvcalc("compare", "llama-3.1-70b", "deepseek-v3", long, *words, "--format", "human").out
            assert "\u2026" not in out
            assert long in "".join(line.split("  ")[0].strip() for line in out.splitlines())
            assert max(map(len, out.splitlines())) <= int(columns)


def test_one_remark_about_several_rows_is_one_line(kvcalc: Any) -> None:
    models = ("llama-3-8b", "qwen3-8b", "gemma-2b", "mistral-7b-v0.3", "phi-4")
    lines = kvcalc("compare", *models, "--gpu", "l40s,h100", "--engine", "vllm,sglang").err.splitlines()
    assert sum("not fitted" in line for line in lines) == 1
    assert not any("memory holds" in line for line in lines)
    assert len(lines) <= 4, lines


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("--gpu", "h101"), 3), (("--gpu", "h100,h101"), 3), (("--engine", "vlm"), 2), (("--engine", "vllm,vlm"), 2),
        (("--gpu", "h100,"), 2), (("--gpu", "h100,l4", "--gpu-memory", "80GB"), 2), (("--num-gpus", "2"), 2),
        (("--page-size", "32", "--engine", "vllm,llama.cpp"), 2),
    ],
)  # fmt: skip
def test_unknown_names_end_with_the_status_of_estimate(kvcalc: Any, arguments: tuple[str, ...], status: int) -> None:
    result = kvcalc("compare", "llama-3-8b", "gpt2", *arguments)
    assert (result.status, result.out) == (status, "")
    if "," not in "".join(arguments):
        assert kvcalc("estimate", "llama-3-8b", *arguments).status == status
