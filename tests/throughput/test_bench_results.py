"""Results of benchmarks are read as their tools write them, and anything else is refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.errors import UsageError
from kvcalc.throughput.bench_results import Measured, Point, read_results
from tests.conftest import ROOT

LOGS = ROOT / "tests" / "logs"


def read(name: str) -> list[Point]:
    return read_results((LOGS / name).read_text(), name)


def rows(name: str) -> list[dict[str, Any]]:
    text = (LOGS / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name != "llama-bench.json" else list(json.loads(text))


def one(row: Any, **changes: Any) -> Point:
    (point,) = read_results(json.dumps({**row, **changes}), "file")
    return point


def test_a_result_of_vllm() -> None:
    points = read("vllm-bench.json")
    assert [point.concurrency for point in points] == [1, 16, 64]
    assert [point.run for point in points] == [1, 2, 3]
    point = points[1]
    assert (point.tool, point.likely_engine, point.input_tokens, point.output_tokens) == ("vllm", "vllm", 1000, 200)
    assert point.engine is None
    assert point.models[0] == "meta-llama/Llama-3.1-8B-Instruct"
    assert point.times[0] == Measured("tpot", pytest.approx(8.61e-3), pytest.approx(8.524e-3))  # type: ignore[arg-type]
    assert point.times[1].metric == "ttft"
    assert not point.is_average
    assert point.refusal is None


def test_a_result_of_sglang_names_the_model_and_the_split() -> None:
    point = read("sglang-bench.jsonl")[0]
    assert (point.tool, point.engine, point.concurrency, point.layout.tensor_parallel_size) == (
        "sglang",
        "sglang",
        8,
        4,
    )
    assert point.models == ("meta-llama/Llama-3.1-70B-Instruct",)
    assert (point.input_tokens, point.output_tokens) == (2048, 256)


def test_an_older_result_of_sglang_names_no_model() -> None:
    row = rows("sglang-bench.jsonl")[0]
    del row["server_info"]
    assert one(row)._replace(models=()) == one(row)
    assert one(row).layout.tensor_parallel_size is None
    assert (one(row).engine, one(row).likely_engine) == (None, "sglang")


def test_the_tpot_of_guidellm_is_its_inter_token_latency() -> None:
    points = read("guidellm.json")
    assert [point.concurrency for point in points] == [1, 16, 18]
    assert [point.is_average for point in points] == [False, False, True]
    assert points[0].times[0].mean_seconds == pytest.approx(7.01e-3)
    assert points[0].engine is None


def test_an_older_report_of_guidellm() -> None:
    report = json.loads((LOGS / "guidellm.json").read_text())
    for run in report["benchmarks"]:
        config = run.pop("config")
        run["args"] = {"strategy": config["strategy"]}
        run["worker"] = {"backend_model": config["backend"]["model"]}
    assert read_results(json.dumps(report), "old") == read("guidellm.json")


def test_a_result_of_llama_bench() -> None:
    prefill, decode, deep = read("llama-bench.json")
    assert prefill.times == (Measured("prefill", 72135640 * 1e-9, None),)
    assert decode.times[0].mean_seconds == pytest.approx(1 / 118.881588, rel=1e-3)
    assert (deep.input_tokens, deep.output_tokens, deep.concurrency) == (4096, 128, 1)
    assert decode.models[0] == "Qwen2.5-7B-Instruct"
    assert (decode.gpu, decode.dtype, decode.engine) == ("NVIDIA GeForce RTX 4080", "q4_k_m", "llama.cpp")
    assert decode.settings == {"cache-type-k": "f16", "cache-type-v": "f16"}


def test_json_lines_of_llama_bench_are_the_same() -> None:
    lines = "\n".join(json.dumps(row) for row in rows("llama-bench.json"))
    assert read_results(lines, "lines") == read("llama-bench.json")


@pytest.mark.parametrize(
    ("description", "dtype"),
    [("llama 8B Q8_0", "q8_0"),
     ("qwen2 7B Q4_K - Small", "q4_k_s"), ("llama 8B F16", "fp16"), ("llama 8B BF16", "bf16"),
     ("gpt-oss 20B MXFP4 MoE", "mxfp4"), ("llama 8B IQ2_XXS - 2.0625 bpw", "iq2_xxs"), ("", None)],
)  # fmt: skip
def test_the_type_of_the_weights_follows_from_the_description(description: str, dtype: str | None) -> None:
    point = one(rows("llama-bench.json")[1], model_type=description)
    assert point.dtype == dtype
    assert (point.unknown_dtype is None) == (dtype is not None)


@pytest.mark.parametrize(
    ("path", "model"),
    [("/m/Llama-3.1-8B-Instruct.Q8_0.gguf", "Llama-3.1-8B-Instruct"), ("C:\\m\\gpt2-F16.gguf", "gpt2"),
     ("gpt-oss-120b-mxfp4-00001-of-00003.gguf", "gpt-oss-120b"), ("qwen3-8b.gguf", "qwen3-8b")],
)  # fmt: skip
def test_the_model_follows_from_the_files_name(path: str, model: str) -> None:
    assert one(rows("llama-bench.json")[1], model_filename=path).models[0] == model


def test_a_request_rate_gives_the_mean_concurrency() -> None:
    row = rows("vllm-bench.json")[1]
    latency = (row["mean_ttft_ms"] + 199 * row["mean_tpot_ms"]) / 1e3
    point = one(row, request_rate=8.0, max_concurrency=None, request_throughput=8.0)
    assert point.concurrency == round(8.0 * latency)
    assert point.is_average
    # A limit that the rate does not reach is not the load.
    assert one(row, request_rate=8.0, max_concurrency=512, request_throughput=8.0) == point
    assert one(row, request_rate=8.0, request_throughput=8.0, mean_e2el_ms=10_000.0).concurrency == 80
    without = one(row, request_rate=8.0, request_throughput=None)
    assert without.concurrency == round(160 / row["duration"] * latency)


def test_sglang_knows_its_mean_concurrency() -> None:
    assert read("sglang-bench.jsonl")[2].concurrency == 14
    assert read("sglang-bench.jsonl")[2].is_average


def test_a_rate_without_latencies_is_refused_by_name() -> None:
    row = {**rows("vllm-bench.json")[1], "request_rate": 8.0, "max_concurrency": None, "duration": None}
    assert "request rate" in (one(row, request_throughput=None).refusal or "")


def test_fewer_prompts_than_the_concurrency_are_all_at_once() -> None:
    assert (
        one(rows("vllm-bench.json")[1], completed=4, total_input_tokens=4000, total_output_tokens=800).concurrency == 4
    )


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("vllm-bench.json", {"completed": 0}, "no request was completed"),
        ("vllm-bench.json", {"completed": 0.5}, "no request was completed"),
        ("vllm-bench.json", {"total_output_tokens": None}, "how many tokens"),
        ("vllm-bench.json", {"spec_decode_acceptance_length": 2.4}, "drafts tokens"),
        ("vllm-bench.json", dict.fromkeys(("mean_tpot_ms", "median_tpot_ms", "mean_ttft_ms", "median_ttft_ms")),
         "no TPOT and no TTFT"),
        ("sglang-bench.jsonl", {"accept_length": 3.1}, "drafts tokens"),
        ("sglang-bench.jsonl", {"server_info": {"dp_size": 2}}, "dp_size is 2 without enable_dp_attention"),
        ("llama-bench.json", {"n_gen": 64}, "-pg"),
        ("llama-bench.json", {"n_depth": 512}, "-d"),
        ("llama-bench.json", {"n_prompt": 0}, "neither"),
        ("llama-bench.json", {"avg_ns": 0}, "avg_ns"),
        ("llama-bench.json", {"n_cpu_moe": 8}, "-ncmoe"),
        ("llama-bench.json", {"no_kv_offload": True}, "-nkvo"),
        ("llama-bench.json", {"gpu_info": "A, A", "split_mode": "row"}, "splits the tensors"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_compared_says_why(name: str, changes: dict[str, Any], reason: str) -> None:
    assert reason in (one(rows(name)[0], **changes).refusal or "")


def test_sglangs_tensor_parallel_size_counts_all_dp_ranks() -> None:
    point = one(
        rows("sglang-bench.jsonl")[0],
        server_info={"tp_size": 16, "dp_size": 8, "ep_size": 16, "enable_dp_attention": True},
    )
    assert point.refusal is None
    assert (point.layout.tensor_parallel_size, point.layout.data_parallel_size, point.layout.expert_parallel_size) == (
        2,
        8,
        16,
    )


def test_layers_split_over_devices_are_pipeline_stages() -> None:
    point = one(rows("llama-bench.json")[1], gpu_info="NVIDIA GeForce RTX 4090, NVIDIA GeForce RTX 4090")
    assert (point.gpu, point.num_devices, point.layout.pipeline_parallel_size) == ("NVIDIA GeForce RTX 4090", 2, 2)
    assert one(rows("llama-bench.json")[1], gpu_info="NVIDIA A100, NVIDIA H100").gpu is None


@pytest.mark.parametrize("text", ["", " \n", "[]", "{}", "null", "[1]", "3", '{"benchmarks": []}', "not json",
                                  "[" * 9999,
                                  '{"model_id": 1}', "9" * 9999, '{"model_id": "x"}\n{"a": 1}'])  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        read_results(text, "file.json")
    assert error.value.message.startswith("file.json: ")
    assert "\n" not in error.value.message


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANY = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))


@given(ANY)
def test_random_json_is_refused(document: Any) -> None:
    with pytest.raises(UsageError) as error:
        read_results(json.dumps(document), "file")
    assert "\n" not in error.value.message


@given(st.sampled_from(["vllm-bench.json", "sglang-bench.jsonl", "llama-bench.json"]), st.data())
def test_a_result_with_any_value_replaced_is_read_or_refused(name: str, data: Any) -> None:
    row = rows(name)[0]
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(row)), ANY, max_size=3))
    for point in read_results(json.dumps({**row, **changes}), "file"):
        assert point.refusal is not None or point.times
        assert point.concurrency is None or point.concurrency >= 1


@given(st.data())
def test_a_report_of_guidellm_with_any_part_replaced_is_read_or_refused(data: Any) -> None:
    report = json.loads((LOGS / "guidellm.json").read_text())
    run = report["benchmarks"][0]
    part = data.draw(st.sampled_from([run, run["config"], run["metrics"], run["metrics"]["prompt_token_count"]]))
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(ANY)
    assert len(read_results(json.dumps(report), "file")) == 3
