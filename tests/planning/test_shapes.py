"""`kvcalc plan --all-layouts`: the layouts follow from a rule, and leaving some out early changes no plan."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

import kvcalc
from kvcalc.engines import engine_class
from kvcalc.model.layout import Layout
from kvcalc.planning.plan.replicas import OnePool, devices_then_speed, find_layouts, shapes_of, smallest
from kvcalc.planning.plan.shapes import all_shapes, expert_shapes, usual_shapes
from kvcalc.planning.plan.targets import Targets
from kvcalc.planning.plan.traffic import Platform, Traffic
from kvcalc.question.question import Question
from kvcalc.question.request_lengths import one_length
from kvcalc.throughput.hardware import find_gpu

H100, GB200, MI300X = (find_gpu(name) for name in ("h100", "gb200", "mi300x"))
LENGTHS = {"input_tokens": 2048, "output_tokens": 500}


def shapes(
    name: str, gpu: Any = H100, engine: str = "vllm", dp: int = 1, settings: dict[str, str] | None = None
) -> list[Layout]:
    question = Question(kvcalc.load_model(name), engine_settings=settings, data_parallel_size=dp)
    return all_shapes(gpu, question, engine)


@pytest.mark.parametrize("gpu", [H100, GB200])
def test_all_layouts_have_those_of_the_default_search_and_no_layout_twice(gpu: Any) -> None:
    found = shapes("deepseek-v3", gpu)
    assert len(found) > 100
    assert len(set(found)) == len(found)
    assert [shape.num_devices for shape in found] == sorted(shape.num_devices for shape in found)
    assert {
        shape for few in usual_shapes(gpu, Question(kvcalc.load_model("deepseek-v3")), "vllm") for shape in few
    } <= set(found)


def test_the_default_search_tries_dp_ranks_of_experts_within_the_fast_link() -> None:
    question = Question(kvcalc.load_model("qwen3-30b-a3b"))
    (first, *others) = expert_shapes(H100, question, "vllm")
    assert {shape.num_devices for shape in first} == {1, 2, 4, 8}
    assert {(shape.tensor_parallel_size, shape.data_parallel_size) for shape in first if shape.num_devices == 8} == {
        (8, 1),
        (4, 2),
        (2, 4),
        (1, 8),
    }
    assert {shape.expert_parallel_size for shape in first if shape.data_parallel_size == 8} == {8, 1}
    assert {shape.pipeline_parallel_size for shape in first} == {1}
    assert others == list(usual_shapes(H100, question, "vllm"))[1:]


@pytest.mark.parametrize(
    ("model", "asked", "ranks"),
    [
        ("deepseek-v3", {}, {2, 4, 8}),
        ("deepseek-v3", {"data_parallel_size": 4}, {4}),
        ("llama-3.3-70b", {}, {1}),
    ],
)
def test_dp_ranks_are_tried_if_nobody_asks_for_others(model: str, asked: dict[str, Any], ranks: set[int]) -> None:
    """DeepSeek's latent is on every tensor-parallel rank, so DP ranks hold more requests on the same devices."""
    load: dict[str, Any] = {"input_tokens": 2000, "output_tokens": 300, "requests_per_second": 20.0}
    best: Any = kvcalc.plan(model, ["h200"], **load, **asked)["best"]
    assert best["data_parallel_size"] in ranks


def test_the_tokens_are_divided_only_among_ranks_with_the_same_heads() -> None:
    # 8 KV heads on up to 64 devices: 16 ranks share each head with one other, 64 with seven others.
    ranks = {(shape.tensor_parallel_size, shape.token_ranks) for shape in shapes("llama-3.1-405b", GB200)}
    assert {pair for pair in ranks if pair[1] > 1} == {(16, 2), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8)}
    latent = {(shape.tensor_parallel_size, shape.token_ranks) for shape in shapes("deepseek-v3", MI300X)}
    assert {dcp for tensor, dcp in latent if tensor == 8} == {1, 2, 4, 8}
    assert {shape.token_ranks for shape in shapes("mamba-codestral-7b", GB200)} == {1}, "it has no heads"
    for none in (
        shapes("llama-3.1-405b"), shapes("gpt-oss-120b", GB200), shapes("deepseek-v3", engine="sglang"),
        shapes("qwen3-30b-a3b", MI300X), shapes("deepseek-v3", settings={"decode-context-parallel-size": "2"}),
    ):  # fmt: skip
        assert {shape.token_ranks for shape in none} == {1}


def test_backends_that_have_the_sums_of_a_decode_step_may_divide_the_tokens() -> None:
    """On AMD's devices those for latents alone, and on others none."""
    divides = engine_class("vllm").divides_tokens
    for model, vendors in (("deepseek-v3", {"NVIDIA", "AMD"}), ("llama-3.1-405b", {"NVIDIA"})):
        spec = kvcalc.load_model(model)
        assert {vendor for vendor in ("NVIDIA", "AMD", "Intel", None) if divides(spec, vendor)} == vendors


def test_only_experts_make_dp_ranks_and_a_number_that_is_asked_for_is_the_only_one() -> None:
    assert {shape.data_parallel_size for shape in shapes("llama-3-70b")} == {1}
    assert {shape.data_parallel_size for shape in shapes("gpt-oss-120b")} == {1, 2, 4, 8, 16, 32, 64}
    assert {shape.data_parallel_size for shape in shapes("gpt-oss-120b", dp=4)} == {4}
    assert max(shape.num_devices for shape in shapes("gpt-oss-120b")) == 64


def test_whole_experts_are_on_the_ranks_if_there_is_one_for_each() -> None:
    """With tensor parallelism alone, the default splits each expert. Mixtral has 8 of them."""
    sizes = {
        (shape.tensor_parallel_size, shape.expert_parallel_size)
        for shape in shapes("mixtral-8x7b", GB200)
        if shape.data_parallel_size == 1
    }
    whole = {(2, 2), (4, 4), (8, 8)}
    assert sizes == {(tensor, 1) for tensor in (1, 2, 4, 8, 16, 32, 64)} | whole
    of_ranks = [shape for shape in shapes("mixtral-8x7b", GB200) if shape.data_parallel_size > 1]
    assert all(shape.expert_parallel_size in (1, shape.ranks) for shape in of_ranks)
    assert sum(shape.expert_parallel_size == 1 for shape in of_ranks) == len(of_ranks) / 2


@pytest.mark.long
@pytest.mark.parametrize(
    "targets",
    [Targets(None, 15.0, max_tpot_seconds=0.02), Targets(300, None, max_ttft_seconds=0.4)],
    ids=["rate", "concurrency"],
)
def test_leaving_out_early_changes_no_plan(targets: Targets) -> None:
    lengths = one_length(LENGTHS["input_tokens"], LENGTHS["output_tokens"])
    traffic = Traffic(Question(kvcalc.load_model("gpt-oss-120b")), lengths, targets, False, all_layouts=True)
    kind = Platform(H100, 16, "vllm")
    (found,) = find_layouts(traffic, kind)
    every = [smallest(traffic, kind, shape) for shape in shapes("gpt-oss-120b") if shape.num_devices <= 16]
    best = sorted((one for one in every if isinstance(one, OnePool)), key=devices_then_speed)
    assert len(best) > 10
    assert [(str(one), one.tokens_per_second) for one in found.layouts[:2]] == [
        (str(one), one.tokens_per_second) for one in best[:2]
    ]


@pytest.mark.parametrize(("name", "gpu"), [("deepseek-v3", "mi300x"), ("gpt-oss-120b", "h100")])
def test_the_command_of_a_layout_starts_what_was_counted(name: str, gpu: str) -> None:
    asked: dict[str, Any] = {"concurrency": 256, "max_tpot_seconds": 0.05, **LENGTHS}
    plain, best = (kvcalc.plan(name, [gpu], **asked, all_layouts=every)["plans"][0] for every in (False, True))
    if plain["fits"]:
        assert (best["num_devices"] or 0) <= (plain["num_devices"] or 0)
    words = shlex.split(best["vllm"] or "")
    flags = {word: words[place + 1 : place + 2] for place, word in enumerate(words) if word.startswith("--")}
    ranks, replicas = best["decode_context_parallel_size"] or 1, best["data_parallel_size"] or 1
    assert ("--enable-expert-parallel" in flags) == ((best["expert_parallel_size"] or 1) > 1)
    assert flags.get("--decode-context-parallel-size", ["1"]) == [str(ranks)]
    assert flags.get("--data-parallel-size", ["1"]) == [str(replicas)]
    each = (best["num_devices"] or 0) // (best["replicas"] or 1)
    counted = kvcalc.estimate(
        name, engine="vllm", devices=kvcalc.find_devices(f"{gpu}x{each}"),
        tensor_parallel_size=best["tensor_parallel_size"], pipeline_parallel_size=best["pipeline_parallel_size"] or 1,
        data_parallel_size=replicas,
        engine_settings={"decode-context-parallel-size": str(ranks)} if ranks > 1 else None,
        speed=kvcalc.SpeedQuestion(best["expert_parallel_size"], 2048, 500, best["requests_per_replica"]),
    )  # fmt: skip
    found: Any = counted
    assert found["fit"]["free_bytes"] == best["free_bytes"]
    assert found["throughput"]["serving"]["tpot_seconds"] == pytest.approx(best["tpot_seconds"], rel=0.06)


@pytest.mark.long
def test_the_front_of_all_layouts_has_the_parts_of_each(kvcalc: Any) -> None:
    words = ("plan", "qwen3-235b-a22b", "--input-tokens", "2k", "--output-tokens", "500", "--concurrency", "64")
    document = kvcalc(*words, "--gpu", "h100", "--all-layouts", "--pareto", "--json").json
    assert any(point["data_parallel_size"] > 1 for point in document["pareto"])
    out = kvcalc(*words, "--gpu", "h100", "--all-layouts", "--pareto", "--format", "human").out
    assert "dp " in out


@pytest.mark.parametrize(("model", "dp"), [("llama-3.3-70b", 1), ("qwen3-30b-a3b", 2)])
def test_without_experts_or_with_dp_ranks_that_were_asked_for_only_the_usual_shapes_are_tried(
    model: str, dp: int
) -> None:
    question = Question(kvcalc.load_model(model), data_parallel_size=dp)
    traffic = Traffic(question, one_length(2048, 500), Targets(8, None), False)
    usual = [shape for shapes in usual_shapes(H100, question, "vllm") for shape in shapes if shape.num_devices <= 32]
    assert shapes_of(traffic, Platform(H100, 32, "vllm")) == usual
    assert {shape.data_parallel_size for shape in usual} == {dp}
