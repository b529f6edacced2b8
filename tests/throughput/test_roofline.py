"""Steps obey physical limits for all constants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcalc.memory.dtypes import parse_dtype
from kvcalc.model.layout import Layout
from kvcalc.model.resolve import load_model
from kvcalc.throughput.constants import load_constants
from kvcalc.throughput.costs import matrix_flops
from kvcalc.throughput.hardware import all_gpus, find_gpu
from kvcalc.throughput.roofline import SpeedModel, _overlap
from kvcalc.throughput.speed import speed_model
from tests.rows import every_row
from tests.throughput.conftest import MakeModel, formula_reads, stored

ENGINES = ("logical", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers")
MODELS = ("llama-3-8b", "deepseek-v3", "gpt-oss-120b", "gemma-3-27b", "qwen3-next-80b-a3b")


@pytest.mark.long
@every_row("engine", ENGINES)
@every_row("gpu", ["h100", "a100", "rtx-4090", "m2-ultra", "mi300x", "t4"])
@every_row("name", MODELS)
@every_row("dtype", ["bf16", "fp8", "int4"])
def test_no_step_is_faster_than_the_ideal_roofline(
    model_of: MakeModel, name: str, gpu: str, engine: str, dtype: str
) -> None:
    model = model_of(name, gpu, engine, dtype)
    for batch in (1, 7, 300, 5000):
        for context in (1, 2000, 200_000):
            step = model.decode(batch, context)
            assert step.seconds >= model.roofline(batch, context)
            assert step.seconds == pytest.approx(sum(step[1:]))
            assert min(step[1:]) >= 0
            assert step.bound_by in ("weights", "kv", "compute", "overhead", "communication")


_MODEL = speed_model(
    load_model("gpt-oss-120b"), stored("gpt-oss-120b"),
    formula_reads(load_model("gpt-oss-120b"), parse_dtype("bf16", "x"), 4), find_gpu("h100"), "vllm",
    Layout(tensor_parallel_size=4),
)[0]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 200_000), st.integers(1, 200_000))
def test_more_sequences_and_longer_ones_never_take_less_time(b1: int, b2: int, c1: int, c2: int) -> None:
    small, large = sorted((b1, b2))
    short, long = sorted((c1, c2))
    assert _MODEL.decode(small, short).seconds <= _MODEL.decode(large, short).seconds
    assert _MODEL.decode(small, short).seconds <= _MODEL.decode(small, long).seconds
    assert _MODEL.prefill(short).seconds <= _MODEL.prefill(long).seconds
    assert _MODEL.prefill_work(short).seconds <= _MODEL.prefill_work(long).seconds


def test_splitting_over_devices_divides_the_reading_and_adds_the_link(model_of: MakeModel) -> None:
    one, four = model_of("llama-3-70b"), model_of("llama-3-70b", tensor_parallel_size=4)
    alone, split = one.decode(1, 4096), four.decode(1, 4096)
    # Only norms are whole on every rank.
    assert split.weights == pytest.approx(alone.weights / 4, rel=1e-3)
    assert split.kv == pytest.approx(alone.kv / 4)
    assert alone.communication == 0 < split.communication
    assert split.overhead < alone.overhead  # each rank attends to a quarter of the heads


def test_heads_beyond_their_number_and_latents_are_read_on_every_rank(model_of: MakeModel) -> None:
    eight, sixteen = (model_of("llama-3-70b", tensor_parallel_size=n).decode(64, 8192) for n in (8, 16))
    assert eight.kv == pytest.approx(sixteen.kv)
    one, two = (model_of("deepseek-v3", tensor_parallel_size=n) for n in (8, 16))
    assert one.counts.kv_read_bytes(5000) == two.counts.kv_read_bytes(5000)


def test_a_lone_sequence_passes_all_stages_and_a_full_pipeline_shares_the_weights(model_of: MakeModel) -> None:
    one, four = model_of("llama-3-70b"), model_of("llama-3-70b", pipeline_parallel_size=4)
    hop = 3 * four.constants.stage_seconds
    assert four.decode(1, 4096).seconds == pytest.approx(one.decode(1, 4096).seconds + hop)
    # Each of four stages with eight sequences is as fast as one device with eight.
    assert four.decode(32, 4096).seconds == pytest.approx(one.decode(8, 4096).seconds + hop)


def test_prefill_grows_with_the_square_of_a_long_prompt_and_not_of_a_windowed_one(model_of: MakeModel) -> None:
    full, windowed = model_of("llama-3-8b"), model_of("mistral-7b-v0.1")
    assert full.prefill_work(400_000).compute > 3.5 * full.prefill_work(200_000).compute
    assert windowed.prefill_work(400_000).compute < 2.05 * windowed.prefill_work(200_000).compute
    assert full.prefill(8192).bound_by == "compute"
    assert full.prefill(1).weights > 0


def test_many_tokens_are_bound_by_compute_and_one_by_weights(model_of: MakeModel) -> None:
    assert model_of("llama-3-70b").decode(1, 128).bound_by == "weights"
    assert model_of("llama-3-70b").decode(4000, 128).bound_by == "compute"
    assert model_of("llama-2-7b").decode(64, 8192).bound_by == "kv"


def test_the_stored_type_says_which_operations_count() -> None:
    h100, a100, b200, t4 = map(find_gpu, ("h100", "a100", "b200", "t4"))
    assert matrix_flops(h100, "fp8") == h100.flops_per_second["fp8"]
    assert matrix_flops(a100, "fp8") == a100.flops_per_second["bf16"]
    assert matrix_flops(b200, "nvfp4") == matrix_flops(b200, "mxfp4") == b200.flops_per_second["fp4"]
    assert matrix_flops(h100, "nvfp4") == matrix_flops(h100, "int4") == h100.flops_per_second["bf16"]
    assert matrix_flops(t4, "bf16") == t4.flops_per_second["fp16"]
    assert matrix_flops(h100, "fp32") == h100.flops_per_second["tf32"]


def test_every_device_that_has_rates_has_a_speed() -> None:
    spec, held = load_model("llama-3-8b"), stored("llama-3-8b")
    reads = formula_reads(spec, parse_dtype("bf16", "x"))
    for gpu in all_gpus():
        for engine in ENGINES:
            model, _ = speed_model(spec, held, reads, gpu, engine)
            assert 0 < model.decode(1, 1000).seconds < 60, gpu.name
        assert isinstance(model, SpeedModel)


def test_constants_of_an_engine_differ_by_kind_of_device() -> None:
    h100, b200, ada = find_gpu("h100"), find_gpu("b200"), find_gpu("rtx-4090")
    for engine in ("vllm", "llama.cpp"):
        assert load_constants(engine, h100)[0] != load_constants(engine, ada)[0]
    assert load_constants("vllm", b200)[0].kernel_seconds < load_constants("vllm", h100)[0].kernel_seconds


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9), st.floats(1, 16))
def test_the_shorter_part_of_a_step_adds_no_negative_time(read: float, multiply: float, power: float) -> None:
    """The power of a sum may be rounded to less than its larger part: at a batch of 2,147,483,647 on an M3 Max."""
    parts = _overlap(read, multiply, power)
    assert min(parts) >= 0
    assert sum(parts) >= max(read, multiply)
    # What takes no time adds none.
    assert (_overlap(read, 0.0, power), _overlap(0.0, multiply, power)) == ((read, 0.0), (0.0, multiply))
