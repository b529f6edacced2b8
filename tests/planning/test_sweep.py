"""The points of a sweep have the same figures and the same refusals as estimates."""

from __future__ import annotations

from itertools import islice
from typing import Any, cast

import pytest

import kvcalc
from kvcalc.errors import ModelError, UsageError
from kvcalc.planning.answers.axis import Axis
from kvcalc.planning.answers.combination import COLUMNS
from kvcalc.planning.answers.figures import FIGURES
from kvcalc.planning.answers.sweep import Sweep, sweep
from kvcalc.question.question import Question
from kvcalc.throughput.hardware import Devices, find_gpu
from tests.conftest import loaded, preset_names
from tests.documents import estimate
from tests.rows import every_row


def grid(name: str, contexts: tuple[int, ...] = (4096,), batches: tuple[int, ...] = (1,), **options: Any) -> Sweep:
    sizes = Axis([options.pop("sizes", (1,))])
    asked = {field: options.pop(field) for field in Question._fields if field in options}
    return sweep(
        Question(loaded(name), **asked), contexts=Axis([contexts]), batches=Axis([batches]),
        tensor_parallel_sizes=sizes, **options,
    )  # fmt: skip


def check_against_estimates(name: str, found: Sweep, **options: Any) -> int:
    """Compare every point and return their number. Points that are refused must also be refused by estimate."""
    compared = 0
    for point in found.points():
        question = {
            "context_tokens": point["context_tokens"], "batch_size": point["batch_size"],
            "kv_dtype": point["kv_dtype"], "tensor_parallel_size": point["tensor_parallel_size"],
            "engine": point["engine"], **options,
        }  # fmt: skip
        if point["reason"] is not None:
            with pytest.raises(kvcalc.KvcalcError) as refused:
                estimate(loaded(name), **question)
            assert refused.value.message == point["reason"]
            continue
        cache = estimate(loaded(name), **question)["kv_cache"]
        assert {key: value for key, value in point.items() if key in FIGURES} == {key: cache[key] for key in FIGURES}
        compared += 1
    return compared


@pytest.mark.long
@every_row("name", preset_names())
def test_every_preset_has_the_estimates_figures(name: str) -> None:
    found = grid(name, (1, 127, 4097, 70_001), (1, 7), sizes=(1, 2))
    assert check_against_estimates(name, found) >= 8


@pytest.mark.parametrize("engine", ["transformers", "vllm", "vllm@0.11", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-oss-120b", "deepseek-v3"])
def test_engines_have_the_estimates_figures(name: str, engine: str) -> None:
    found = grid(name, (100, 8192), (1, 9), sizes=(1, 4), engines=(engine,), kv_dtypes=("bf16", "fp8"))
    for point in found.points():
        point["engine"] = engine
    assert check_against_estimates(name, found, engine=engine) >= 4


def test_the_order_is_the_columns_order_and_every_point_has_them_all() -> None:
    found = grid(
        "llama-3-8b", (1024, 2048), (1, 2), sizes=(1, 2), kv_dtypes=("bf16", "fp8"), engines=("logical", "vllm")
    )
    points = list(found.points())
    assert len(points) == found.num_points == 32
    assert all(tuple(point) == COLUMNS for point in points)
    axes = ("engine", "kv_dtype", "gpu", "tensor_parallel_size", "context_tokens")
    keys = [tuple(cast(Any, point)[name] for name in axes) for point in points]
    order = {"logical": 0, "vllm": 1, "bf16": 0, "fp8": 1}
    assert keys == sorted(keys, key=lambda key: (order[key[0]], order[key[1]], *key[2:]))


def test_a_refused_combination_keeps_its_rows_with_the_reason() -> None:
    found = grid("llama-3-8b", (1024,), (1, 2), sizes=(1, 3))
    points = list(found.points())
    assert [point["reason"] is None for point in points] == [True, True, False, False]
    assert points[2]["stored_bytes"] is None
    assert any("tp 3" in note.text for note in found.notes)


def test_where_all_are_refused_so_is_the_sweep() -> None:
    with pytest.raises(UsageError, match="--tp 3"):
        grid("llama-3-8b", sizes=(3, 5))
    with pytest.raises(ModelError, match="recurrent_gemma is not modelled"):
        grid("recurrentgemma-2b", engines=("vllm",))


def test_a_name_nobody_knows_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="fp7"):
        grid("llama-3-8b", kv_dtypes=("bf16", "fp7"))
    with pytest.raises(UsageError, match="vlm"):
        grid("llama-3-8b", engines=("logical", "vlm"))


def test_a_context_an_engine_refuses_is_a_row_without_figures() -> None:
    settings = {"context-length": "8192"}
    found = grid("llama-3-8b", (16384, 4096), engines=("sglang",), engine_settings=settings, kv_memory_bytes=1 << 40)
    long: Any
    short: Any
    long, short = found.points()
    assert long["reason"] == "--context-length 8192 is shorter than the context of 16384 tokens"
    assert {long[key] for key in (*FIGURES, "fits", "free_bytes")} == {None}
    assert short["total_bytes"] > 0
    assert short["fits"]
    assert found.chart(most_contexts=9, most_lines=9)["lines"][0]["bytes"] == [short["bytes_per_device"], None]


def test_what_fits() -> None:
    found = grid("llama-3-8b", (8192, 16384), (1, 8), kv_memory_bytes=1 << 30)
    assert [p["fits"] for p in found.points()] == [True, False, False, False]
    assert [p["free_bytes"] for p in found.points()] == [0, -7 << 30, -1 << 30, -15 << 30]


def test_points_are_computed_when_they_are_taken() -> None:
    found = sweep(
        Question(kvcalc.load_model("llama-3-8b")), contexts=Axis([range(1, 10**15)]), batches=Axis([range(1, 10**6)]),
        tensor_parallel_sizes=Axis([(1,)]),
    )  # fmt: skip
    assert [p["batch_size"] for p in islice(found.points(), 3)] == [1, 2, 3]


def test_an_encoder_as_long_as_each_context() -> None:
    name = next(n for n in preset_names() if n.startswith(("t5", "flan-t5")))
    assert check_against_estimates(name, grid(name, (100, 512))) == 2


def test_the_chart_is_named_by_what_differs() -> None:
    chart: Any = grid("llama-3-8b", (1024, 4096), (1, 2, 3), sizes=(1, 2)).chart(most_contexts=10, most_lines=4)
    assert [line["label"] for line in chart["lines"]] == [
        "tp 1 batch 1", "tp 1 batch 2", "tp 1 batch 3", "tp 2 batch 1",
    ]  # fmt: skip
    assert chart["omitted"] == 2
    assert chart["lines"][3]["bytes"] == [chart["lines"][0]["bytes"][0] // 2, chart["lines"][0]["bytes"][1] // 2]


@pytest.mark.parametrize("engine", ["logical", "vllm", "sglang"])
def test_on_a_device_points_have_the_estimates_fit_and_speed(engine: str) -> None:
    from kvcalc.throughput.hardware import Devices, find_gpu

    gpu = find_gpu("h100")
    found = grid("qwen3-32b", (1024, 32_768), (1, 64, 1024), sizes=(1, 4), gpus=[gpu], engines=(engine,))
    point: Any
    for point in found.points():
        answer = estimate(
            kvcalc.load_model("qwen3-32b"), context_tokens=point["context_tokens"], batch_size=point["batch_size"],
            engine=engine, tensor_parallel_size=point["tensor_parallel_size"],
            devices=Devices(gpu, point["tensor_parallel_size"]),
        )  # fmt: skip
        assert point["gpu"] == "h100-sxm"
        assert (point["fits"], point["free_bytes"]) == (answer["fit"]["fits"], answer["fit"]["free_bytes"])
        for key in ("decode_step_seconds", "decode_tokens_per_second", "prefill_seconds"):
            assert point[key] == (answer["throughput"] or {}).get(key)
        for end in ("low_seconds", "high_seconds"):
            assert point[f"decode_step_{end}"] == (answer["throughput"] or {}).get(end)


def test_several_devices_are_one_line_and_a_memory_each() -> None:
    from kvcalc.throughput.hardware import find_gpu

    found = grid("llama-3.1-8b", (1024, 4096), gpus=[find_gpu("h100"), find_gpu("l40s")])
    chart = found.chart(most_contexts=9, most_lines=9)
    assert len(chart["lines"]) == 1
    assert [capacity["label"] for capacity in chart["capacities"]] == ["h100-sxm", "l40s"]
    # --kv-memory replaces the memory that the engine's reserve would leave.
    given = grid("llama-3.1-8b", (1024, 4096), gpus=[find_gpu("h100")], kv_memory_bytes=2**28)
    assert [point["fits"] for point in given.points()] == [True, False]
    assert all(point["decode_step_seconds"] for point in list(given.points())[:1])


def test_a_model_whose_weights_are_not_known_has_bytes_and_a_warning() -> None:
    from kvcalc.model.hf_config import read_config
    from kvcalc.throughput.hardware import find_gpu

    config = {"model_type": "generic", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    found = sweep(
        Question(read_config(config, "mine", "mine")), contexts=Axis([(64,)]), batches=Axis([(1,)]),
        tensor_parallel_sizes=Axis([(1,)]), gpus=[find_gpu("h100")],
    )  # fmt: skip
    (point,) = found.points()
    assert point["total_bytes"] == 2 * 2 * 4 * 8 * 64 * 2
    assert (point["fits"], point["decode_step_seconds"]) == (None, None)
    assert ("fit", "unknown") in {(note.part, note.code) for note in found.notes}


@pytest.mark.parametrize(
    ("model", "engine", "asked", "dtype"),
    [
        ("deepseek-v3.2", "vllm", "fp8_ds_mla", None), ("llama-3-8b", "vllm", "fp8_inc", None),
        ("llama-3-8b", "tensorrt-llm", "auto", "fp8"), ("llama-3-8b", "tensorrt-llm", "auto", "nvfp4"),
        ("llama-3-8b", "tensorrt-llm", "bf16", "fp8"), ("llama-3-8b", "tensorrt-llm", "auto", "int4"),
        ("llama-3-8b", "llama.cpp", "auto", None), ("llama-3-8b", "llama.cpp", "q8_0", None),
        ("llama-3-8b", "sglang", "auto", "fp8"),
    ],
)  # fmt: skip
def test_the_cache_type_is_the_one_estimate_takes(model: str, engine: str, asked: str, dtype: str | None) -> None:
    spec, gpu = kvcalc.load_model(model), find_gpu("b200")
    found = grid(model, (8192,), (4,), kv_dtypes=(asked,), gpus=(gpu,), engines=(engine,), dtype=dtype)
    (point,) = found.points()
    answer = estimate(
        spec, context_tokens=8192, batch_size=4, kv_dtype=asked, dtype=dtype, engine=engine, devices=Devices(gpu, 1)
    )
    assert point["kv_dtype"] == answer["kv_cache"]["dtype"]
    assert point["bytes_per_device"] == answer["kv_cache"]["bytes_per_device"]
    speed = answer["throughput"]
    assert point["decode_step_seconds"] == (None if speed is None else speed["decode_step_seconds"])


def test_a_type_only_one_engine_knows_stands_with_the_reason_of_the_others() -> None:
    found = grid("deepseek-v3.2", kv_dtypes=("fp8_ds_mla",), engines=("sglang", "vllm"))
    reasons: Any = {point["engine"]: point["reason"] for point in found.points()}
    assert "not a dtype" in reasons["sglang"]
    assert reasons["vllm"] is None
    with pytest.raises(UsageError, match="this vLLM type is not modelled"):
        grid("llama-3-8b", kv_dtypes=("bf16", "octave_k3v4"), engines=("vllm",))


def test_a_number_of_devices_splits_the_model_over_all_of_them() -> None:
    four = Devices(find_gpu("h100"), 4)
    found = sweep(Question(kvcalc.load_model("llama-3-70b")), batches=Axis([(1,)]), gpus=[four, find_gpu("h200")])
    points = [(p["model"], p["gpu"], p["num_devices"], p["tensor_parallel_size"]) for p in found.points()]
    assert points == [("llama-3-70b", "h100-sxm", 4, 4), ("llama-3-70b", "h200-sxm", 1, 1)]
    replicas = grid("llama-3-70b", gpus=[four], sizes=(2, 4))
    assert [(p["num_devices"], p["tensor_parallel_size"]) for p in replicas.points()] == [(4, 2), (4, 4)]
    with pytest.raises(UsageError, match="--pipeline-parallel-size 3 does not divide 4"):
        sweep(Question(kvcalc.load_model("llama-3-70b"), pipeline_parallel_size=3), batches=Axis([(1,)]), gpus=[four])


def test_nothing_runs_where_not_one_sequence_fits() -> None:
    found = grid("qwen3-32b", (131_072,), (1, 8), gpus=[find_gpu("h100")], engines=("vllm",))
    for point in found.points():
        assert point["fits"] is False
        assert (point["decode_step_seconds"], point["decode_step_high_seconds"]) == (None, None)


def test_capacities_are_named_by_what_differs_and_equal_ones_share_a_line() -> None:
    from kvcalc.output.human.sweep import draw_chart

    same = grid("llama-3.1-8b", (1024, 131_072), gpus=[find_gpu("h100"), find_gpu("a100")], kv_memory_bytes=2**33)
    (capacity,) = same.chart(most_contexts=9, most_lines=9)["capacities"]
    assert capacity["label"] == "h100-sxm, a100-sxm-80gb"
    found = grid("llama-3.1-8b", (1024, 131_072), (1, 8), gpus=[find_gpu("h100"), find_gpu("l40s")])
    text = draw_chart(found.chart(most_contexts=9, most_lines=9), 80)
    marks = [line.split()[0] for line in text if "per device for the cache" in line]
    assert len(set(marks)) == len(marks) == 2
    drawn = [line for line in text if " |" in line]
    for mark in marks:
        assert sum(line.count(mark) for line in drawn) > 5, mark


def test_one_remark_about_several_points_is_one_line() -> None:
    gpus = [find_gpu(name) for name in ("l40s", "h100", "l4", "a10")]
    found = grid("llama-3.1-8b", gpus=gpus, sizes=(1, 3), engines=("vllm", "sglang"))
    assert sum(note.code == "not-fitted" for note in found.notes) == 1
    (refused,) = (note.text for note in found.notes if note.code == "refused")
    assert refused == "--tp 3 does not divide the 32 attention heads"


def test_defaults_that_depend_on_the_context_are_those_of_each_point() -> None:
    """Without chunked prefill, vLLM's step is as long as the context, and its memory is not for the cache."""
    devices = Devices(find_gpu("h100"), 1)
    asked: dict[str, Any] = {"engine": "vllm", "engine_settings": {"no-enable-chunked-prefill": True}}
    found = kvcalc.sweep("llama-3.1-8b", contexts=[4096, 65_536], batches=[1, 4], gpus=[devices], **asked)
    for point in found["points"]:
        tokens, batch = point["context_tokens"], point["batch_size"]
        alone = kvcalc.estimate("llama-3.1-8b", context_tokens=tokens, batch_size=batch, devices=devices, **asked)
        assert alone["fit"] is not None
        assert alone["throughput"] is not None
        assert (point["free_bytes"], point["fits"]) == (alone["fit"]["free_bytes"], alone["fit"]["fits"])
        assert point["decode_step_seconds"] == alone["throughput"]["decode_step_seconds"]
    free = [point["free_bytes"] or 0 for point in found["points"] if point["batch_size"] == 1]
    cache = 61_440 * 131_072
    assert free[0] - free[1] > 1.1 * cache, "the longer step also takes memory"
