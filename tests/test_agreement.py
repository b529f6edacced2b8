"""The parts of an answer must agree with each other, for all presets with varying engines and devices.

These tests have no expected figures. Their rules hold for any model, so they also check every new preset.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

import kvcalc
from kvcalc.engines import ENGINES, load_engine
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES
from kvcalc.memory.sharding import shard, stage_weights
from kvcalc.memory.weights import plain_bytes
from kvcalc.model.layout import Layout
from kvcalc.model.spec import ModelSpec, has_cross_attention, weights_of
from kvcalc.question.question import SpeedQuestion
from kvcalc.throughput.hardware import all_gpus, find_devices
from kvcalc.throughput.speed import Gap, StoredWeights, range_factors, speed_model
from tests.conftest import asked_presets, loaded, preset_names
from tests.documents import estimate
from tests.throughput.conftest import formula_reads

BF16 = DTYPES["bf16"]

# Devices with tp and pp. Each preset gets a different machine with each engine, so that all presets together cover
# all combinations.
MACHINES = (
    ("h100", 1, 1), ("a100x8", 8, 1), ("mi300x", 1, 1), ("h200x4", 2, 2), ("rtx-4090x2", 1, 2), ("m2-ultra", 1, 1),
    ("b200x8", 4, 1), ("l40sx2", 2, 1), ("t4", 1, 1),
)  # fmt: skip
MACS = (("m2-ultra", 1, 1), ("m4-max", 1, 1), ("m3-ultra", 1, 1))
WORKLOADS = ((1, 1), (700, 3), (4096, 64), (131_072, 2))


def answers(engine: str, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The documents of presets with one engine. The machine and the workload vary from preset to preset."""
    for place, name in enumerate(names):
        turn = place + list(ENGINES).index(engine)
        machines = MACS if engine == "mlx" else MACHINES
        devices, tp, pp = machines[turn % len(machines)]
        context, batch = WORKLOADS[turn % len(WORKLOADS)]
        asked: dict[str, Any] = {
            "engine": engine, "context_tokens": context, "batch_size": batch, "devices": find_devices(devices),
            "tensor_parallel_size": tp, "pipeline_parallel_size": pp,
        }  # fmt: skip
        if turn % 2:
            asked["speed"] = SpeedQuestion(input_tokens=500, output_tokens=100, concurrency=4)
        try:
            yield name, estimate(loaded(name), **asked)
        except (ModelError, UsageError):
            continue  # the engine does not support this model, or the heads cannot be divided


@pytest.mark.parametrize("engine", ENGINES)
def test_the_parts_of_every_document_agree(engine: str, pytestconfig: pytest.Config) -> None:
    seen = fits = speeds = 0
    for name, answer in answers(engine, asked_presets(pytestconfig)):
        cache, fit, speed = answer["kv_cache"], answer["fit"], answer["throughput"]
        assert 0 <= cache["bytes_per_device"] <= cache["devices_total_bytes"], name
        assert cache["fixed_bytes_per_sequence"] <= cache["bytes_per_sequence"], name
        if fit is not None:
            check_fit(name, answer)
            fits += 1
        if speed is not None:
            check_speed(name, speed, answer["workload"]["batch_size"])
            speeds += 1
        seen += 1
    assert seen > 30
    assert fits > seen / 2
    assert speeds >= seen / 2


@pytest.mark.parametrize("engine", ["logical", "vllm", "sglang", "tensorrt-llm"])
def test_the_parts_agree_with_dp_ranks(engine: str, pytestconfig: pytest.Config) -> None:
    seen = 0
    for place, name in enumerate(asked_presets(pytestconfig)):
        devices, dp, tp = (("h200x8", 8, 1), ("b200x8", 4, 2), ("h100x16", 16, 1), ("h200x8", 2, 4))[place % 4]
        served = SpeedQuestion(input_tokens=500, output_tokens=100, concurrency=37)
        try:
            answer = estimate(
                loaded(name), engine=engine, devices=find_devices(devices), data_parallel_size=dp,
                tensor_parallel_size=tp, speed=served,
            )  # fmt: skip
        except (ModelError, UsageError):
            continue  # the engine does not support the model, or the heads cannot be divided
        cache, fit, speed = answer["kv_cache"], answer["fit"], answer["throughput"]
        assert cache["bytes_per_device"] <= cache["devices_total_bytes"] <= dp * tp * cache["bytes_per_device"], name
        if fit is not None:
            check_fit(name, answer)
            towers = sum(tower["bytes"] or 0 for tower in answer["weights"]["towers"])
            towers += sum(line["bytes"] for line in fit["lines"] if line["name"] == "rotary tables")
            assert fit["weights_replicated_bytes"] <= fit["weights_bytes"] <= answer["weights"]["bytes"] + towers, name
        # If not one request fits, the speed is that of a start with a larger share of the memory and its own batch.
        if speed is not None and fit is not None and fit["max_batch_size"] != 0:
            check_speed(name, speed, answer["workload"]["batch_size"])
        seen += 1
    assert seen > 10


def check_fit(name: str, answer: dict[str, Any]) -> None:
    fit = answer["fit"]
    assert sum(line["bytes"] for line in fit["lines"]) == fit["device_bytes"], name
    # The slots of states can be fewer than the batch, although there is memory for more of it.
    has_room = fit["max_batch_size"] is None or answer["workload"]["batch_size"] <= fit["max_batch_size"]
    assert fit["fits"] == (fit["free_bytes"] >= 0 and has_room), name
    # If the devices have different layers, the figures of `fit` are those of the one with the least free memory.
    held = [row["kv_cache_bytes"] for row in fit["devices"] or (fit,)]
    assert max(held) >= answer["kv_cache"]["bytes_per_device"] or not fit["fits"], name
    assert fit["devices"] is None or fit["free_bytes"] == min(row["free_bytes"] for row in fit["devices"]), name
    # A workload that fits is within its own limits, and one that does not fit is beyond them.
    longest, largest = fit["memory_context_tokens"], fit["max_batch_size"]
    workload = answer["workload"]
    for limit, asked in ((longest, workload["context_tokens"]), (largest, workload["batch_size"])):
        assert fit["fits"] == (limit is None or limit >= asked), name


def check_range(name: str, low: float | None, seconds: float, high: float | None) -> None:
    """Both ends are null if the range is not known."""
    assert (low is None) == (high is None), name
    assert low is None or high is None or low <= seconds <= high <= 4 * low, name


def check_speed(name: str, speed: dict[str, Any], batch: int) -> None:
    step = speed["decode_step_seconds"]
    assert 0 < speed["roofline_decode_step_seconds"] <= step, name
    check_range(name, speed["low_seconds"], step, speed["high_seconds"])
    assert sum(speed["parts"].values()) == pytest.approx(step), name
    assert speed["parts"][f"{speed['bound_by']}_seconds"] == max(speed["parts"].values()), name
    assert speed["decode_tokens_per_second"] * step == pytest.approx(batch), name
    serving = speed["serving"]
    if serving is not None:
        for part in (key.removesuffix("_low_seconds") for key in serving if key.endswith("_low_seconds")):
            check_range(
                name, serving[f"{part}_low_seconds"], serving[f"{part}_seconds"], serving[f"{part}_high_seconds"]
            )
        assert serving["running_requests"] <= serving["concurrency"], name


def stored(spec: ModelSpec) -> StoredWeights | None:
    weights = weights_of(spec)
    return None if weights is None else StoredWeights(weights, BF16, None, None, "bf16")


@pytest.mark.parametrize("engine", ENGINES)
def test_no_more_tokens_or_sequences_ever_take_less_time(engine: str, pytestconfig: pytest.Config) -> None:
    gpus = [gpu for gpu in all_gpus() if gpu.bandwidth_bytes_per_second and gpu.flops_per_second]
    for place, name in enumerate(asked_presets(pytestconfig)):
        spec = loaded(name)
        held = stored(spec)
        if held is None or has_cross_attention(spec):
            continue
        model = speed_model(spec, held, formula_reads(spec, BF16), gpus[place % len(gpus)], engine, Layout())[0]
        for batch in (1, 3, 64, 1000):
            steps = [model.decode(batch, context).seconds for context in (1, 100, 5000, 200_000)]
            assert all(a <= b for a, b in pairwise(steps)), name
        for context in (1, 5000):
            steps = [model.decode(batch, context).seconds for batch in (1, 2, 3, 64, 1000)]
            assert all(a <= b for a, b in pairwise(steps)), name
            # A batch is never slower than its sequences run one after another.
            assert all(step <= batch * steps[0] for step, batch in zip(steps, (1, 2, 3, 64, 1000))), name
        prompts = [model.prefill(tokens).seconds for tokens in (1, 100, 5000, 200_000)]
        assert all(a <= b for a, b in pairwise(prompts)), name
        assert all(a <= b for a, b in pairwise(model.prefill(700, batch).seconds for batch in (1, 2, 9))), name
        assert model.roofline(3, 5000) <= model.decode(3, 5000).seconds, name


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engines_range_holds_its_own_value(engine: str) -> None:
    spec = kvcalc.load_model("llama-3-8b")
    held = stored(spec)
    assert held is not None
    for gpu in all_gpus():
        model, regime = speed_model(spec, held, formula_reads(spec, BF16), gpu, engine, Layout())
        for ranges in (regime.ranges, regime.ttft_ranges):
            for dtype in ("bf16", "fp8", "nvfp4", "q4_k_m"):
                gaps = (), [Gap("a larger batch")], [Gap("this device", True)]
                inside, beyond, unmeasured = (range_factors(model, ranges, dtype, 40, each) for each in gaps)
                assert 0 < unmeasured[0] <= beyond[0] <= inside[0] <= 1 <= inside[1] <= beyond[1] <= unmeasured[1]
                assert unmeasured == (min(inside[0], 0.5), max(inside[1], 2.0))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_weights_of_all_stages_are_the_models(engine: str) -> None:
    rules = load_engine(engine, kvcalc.load_model("llama-3.1-8b"))
    for name in preset_names():
        spec = loaded(name)
        weights = weights_of(spec)
        if weights is None:
            continue
        whole = plain_bytes(weights, BF16)[0]
        table = 2 * weights.embedding.parameters
        parts = stage_weights(weights, rules.stage_bounds(spec.num_layers, min(3, spec.num_layers)))
        # A tied table is on the first stage and on the last.
        assert sum(plain_bytes(part, BF16)[0] for part in parts) == whole + (table if weights.tied else 0), name


def test_ranks_hold_no_less_than_their_part_and_no_more_than_one_rank_fewer_would() -> None:
    for name in preset_names():
        weights = weights_of(loaded(name))
        if weights is None:
            continue
        sizes = [plain_bytes(shard(weights, Layout(ranks)), BF16)[0] for ranks in (1, 2, 4, 8)]
        assert all(a >= b >= a / 2 for a, b in pairwise(sizes)), name


@pytest.mark.parametrize("engine", ENGINES)
def test_more_memory_never_holds_less(engine: str) -> None:
    for name in preset_names()[::4]:
        spec = loaded(name)
        limits: list[tuple[float, float]] = []
        for gib in (1, 2, 8, 40):
            try:
                fit = estimate(spec, engine=engine, context_tokens=2048, kv_memory_bytes=gib << 30)["fit"]
            except (ModelError, UsageError):
                break
            limits.append(tuple(
                float("inf") if fit[key] is None else fit[key] for key in ("memory_context_tokens", "max_batch_size")
            ))  # type: ignore[arg-type]  # fmt: skip
        for less, more in pairwise(limits):
            assert less[0] <= more[0], name
            assert less[1] <= more[1], name
