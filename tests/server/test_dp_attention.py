"""DP ranks copy the attention and divide the experts, the requests and so the cache.

Bytes are worked out by hand from DeepSeek-R1's published shapes: 61 layers, a latent of 512 + 64, 3 dense layers, 58
layers with 256 experts of 3 x 7168 x 2048, in fp8 with a scale in fp32 for each block of 128 x 128.
"""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import ENGINES
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.plan.document import Targets, plan
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.question.request_lengths import one_length
from kvcalc.server.case import make_case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.throughput.counts import Counts, bytes_of
from kvcalc.throughput.hardware import find_devices, find_gpu
from tests.conftest import loaded
from tests.documents import estimate, fit

R1 = "deepseek-r1"
# One token's latent in all layers, in bf16.
LATENT = 61 * (512 + 64) * 2
# The routed experts: 3 matrices of 7168 x 2048 in each, 256 in each of 58 layers, with one scale of 4 bytes per block.
EXPERTS = 58 * 256 * 3 * (7168 * 2048 + 4 * 56 * 16)


def ask(name: str = R1, gpus: str | None = "h200x8", dp: int = 8, engine: str = "vllm", **asked: Any) -> dict[str, Any]:
    devices = None if gpus is None else find_devices(gpus)
    return estimate(loaded(name), devices=devices, data_parallel_size=dp, engine=engine, **asked)


def plain(gpus: str = "h200x8", **asked: Any) -> dict[str, Any]:
    return ask(gpus=gpus, dp=1, **asked)


@pytest.mark.parametrize(("gpus", "dp"), [("h200x8", 8), ("h200x16", 16), ("h200x16", 8), ("h200x8", 2)])
def test_an_dp_rank_holds_the_cache_of_its_own_requests(gpus: str, dp: int) -> None:
    devices = find_devices(gpus).num_devices
    answer = ask(gpus=gpus, dp=dp, engine="logical", context_tokens=8192, batch_size=64)
    cache, engine = answer["kv_cache"], answer["engine"]
    assert (engine["data_parallel_size"], engine["tensor_parallel_size"]) == (dp, devices // dp)
    assert engine["expert_parallel_size"] == devices
    assert cache["bytes_per_device"] == 64 // dp * 8192 * LATENT
    # The latent is on every rank of a DP rank, so the sum counts it once per rank.
    assert cache["devices_total_bytes"] == devices // dp * 64 * 8192 * LATENT
    assert cache["total_bytes"] == cache["stored_bytes"] == 64 * 8192 * LATENT


def test_the_busiest_dp_rank_decides() -> None:
    nine, sixteen = (ask(context_tokens=4096, batch_size=batch)["kv_cache"] for batch in (9, 16))
    assert nine["bytes_per_device"] == sixteen["bytes_per_device"]
    assert nine["devices_total_bytes"] < sixteen["devices_total_bytes"]


def tables(fit: Any) -> int:
    """The bytes of the rotary tables, which vLLM makes while it loads the weights."""
    return sum(line["bytes"] for line in fit["lines"] if line["name"] == "rotary tables")


def test_the_weights_of_a_device_are_the_attention_and_its_part_of_the_experts() -> None:
    whole = kvcalc.estimate(R1)["weights"]["bytes"]
    assert whole is not None
    for devices in (8, 16, 32):
        held = ask(gpus=f"h200x{devices}", dp=devices)["fit"]
        dense = whole - EXPERTS
        assert held["weights_bytes"] - tables(held) == dense + EXPERTS // devices
        assert held["weights_replicated_bytes"] == dense
    # Two DP ranks of four devices: each of them splits the attention as --tp 4 does.
    both, four = ask(gpus="h200x8", dp=2)["fit"], plain(gpus="h200x4")["fit"]
    assert both["weights_bytes"] == four["weights_bytes"] - EXPERTS // 4 + EXPERTS // 8


def test_sglang_splits_mlps_and_the_head_over_all_devices() -> None:
    vllm, sglang = (
        fit["weights_bytes"] - tables(fit) for fit in (ask(engine=engine)["fit"] for engine in ("vllm", "sglang"))
    )

    def fp8(rows: int, columns: int) -> int:
        return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)

    mlps = 3 * 3 * fp8(18432, 7168) + 58 * 3 * fp8(2048, 7168) + 129280 * 7168 * 2
    assert vllm - sglang == pytest.approx(mlps * 7 / 8, rel=1e-4)


def test_eight_times_the_tokens_of_tensor_parallelism() -> None:
    # The point of the layout: with --tp 8 all devices hold the same latents.
    memory: dict[str, Any] = {"kv_memory_bytes": 20 << 30, "context_tokens": 4096}
    replicas, ranks = ask(gpus=None, **memory)["fit"], ask(gpus=None, dp=1, tensor_parallel_size=8, **memory)["fit"]
    assert replicas["max_batch_size"] == 8 * ranks["max_batch_size"]
    assert replicas["max_context_tokens"] == ranks["max_context_tokens"]


def test_grouped_heads_are_on_every_dp_rank() -> None:
    # 4 KV heads of 128: with --dp 2 --tp 4 each device has one of them, for half of the requests.
    split = ask("qwen3-235b-a22b", "h200x8", 2, "logical", context_tokens=1024, batch_size=6)["kv_cache"]
    assert split["bytes_per_device"] == 3 * 1024 * 94 * 2 * 128 * 2


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "logical"])
@pytest.mark.parametrize("gpus", ["h200x8", "b200x16"])
def test_the_limits_are_those_of_the_whole_replica(engine: str, gpus: str) -> None:
    dp = find_devices(gpus).num_devices
    asked: dict[str, Any] = {"gpus": gpus, "dp": dp, "engine": engine, "context_tokens": 8192}
    most = ask(**asked)["fit"]["max_batch_size"]
    assert most % dp == 0
    assert ask(**asked, batch_size=most)["fit"]["fits"]
    assert not ask(**asked, batch_size=most + 1)["fit"]["fits"]
    longest = ask(**asked, batch_size=most)["fit"]["max_context_tokens"]
    assert ask(**{**asked, "context_tokens": longest}, batch_size=most)["fit"]["fits"]
    assert not ask(**{**asked, "context_tokens": longest + 64}, batch_size=most)["fit"]["fits"]


def test_sglang_holds_the_tokens_it_printed() -> None:
    # sgl-project/sglang#11309: DeepSeek-V3.2 on 8 B200 with --tp 8 --dp 8 --enable-dp-attention prints 975,424 tokens.
    # The log is of October 2025. Since 0.5.10, an fp8 cache on B200 has other rows.
    engine = ask("deepseek-v3.2", "b200x8", engine="sglang@0.5.3", kv_dtype="fp8_e4m3")["engine"]
    assert engine["kv_cache_tokens"] == pytest.approx(975_424, rel=0.07)
    # Two latents and index keys of 132 bytes a token, as in that log: 43.67 GiB for these tokens.
    assert engine["bytes_per_block"] * 975_424 / 64 == pytest.approx(43.67 * 2**30, rel=1e-3)


def test_sglang_multiplies_as_much_as_vllm() -> None:
    # SGLang splits MLPs and the head over all replicas, and each device processes the tokens of all of them.
    def counts(engine: str) -> Counts:
        found = speed_of(
            make_case(
                Question(kvcalc.load_model(R1), engine=engine, devices=find_devices("h200x8"), data_parallel_size=8)
            ),
            [],
        )
        assert isinstance(found, Speed)
        return found.model.counts

    vllm, sglang = counts("vllm"), counts("sglang")
    assert sglang.experts == vllm.experts
    for name in ("dense", "head"):
        spread, whole = getattr(sglang, name), getattr(vllm, name)
        assert [row.elements for row in spread] == pytest.approx([row.elements for row in whole])
        assert bytes_of(spread) < bytes_of(whole)


def test_the_number_of_devices_follows_from_the_layout() -> None:
    assert ask(gpus="h200", dp=8)["hardware"]["num_devices"] == 8
    assert ask(gpus="h200", dp=8, tensor_parallel_size=2)["hardware"]["num_devices"] == 16
    two = ask(gpus="h200x16", dp=8, tensor_parallel_size=1)["hardware"]
    assert (two["num_devices"], two["replicas"]) == (16, 2)
    staged = ask(gpus="h200x16", dp=4, pipeline_parallel_size=2)["engine"]
    assert (staged["tensor_parallel_size"], staged["expert_parallel_size"]) == (2, 8)


@pytest.mark.settled
@pytest.mark.parametrize(("engine", "option"), [("vllm", "max-num-seqs"), ("sglang", "max-running-requests")])
def test_dp_ranks_of_a_dense_model_are_whole_copies(engine: str, option: str) -> None:
    """Each of four copies on two devices is a server of two devices with a quarter of the requests."""
    model, settings = "llama-3-8b", {option: "64"}
    speed = SpeedQuestion(None, 500, 100, 200)
    four = ask(model, "h100x8", 4, engine, speed=speed, engine_settings=settings)
    one = plain("h100x2", name=model, engine=engine, speed=speed._replace(concurrency=50), engine_settings=settings)
    assert (four["engine"]["tensor_parallel_size"], four["engine"]["expert_parallel_size"]) == (2, 1)
    limits = ("max_batch_size", "memory_batch_size")
    assert [four["fit"][key] for key in limits] == [4 * one["fit"][key] for key in limits]
    assert {**four["fit"], **dict.fromkeys(limits)} == {**one["fit"], **dict.fromkeys(limits)}
    assert four["kv_cache"]["devices_total_bytes"] == 4 * one["kv_cache"]["devices_total_bytes"]
    quick, alone = (answer["throughput"]["serving"] for answer in (four, one))
    assert 30 < alone["running_requests"] <= 50
    assert quick["running_requests"] == 4 * alone["running_requests"]
    assert quick["tpot_seconds"] == pytest.approx(alone["tpot_seconds"])
    assert quick["tokens_per_second"] == pytest.approx(4 * alone["tokens_per_second"])
    assert four["throughput"]["decode_step_seconds"] == pytest.approx(one["throughput"]["decode_step_seconds"])
    assert any("whole copy" in note["text"] for note in four["warnings"])
    # Only 64 requests of each copy run at once.
    crowded = ask(model, "h100x8", 4, engine, speed=speed._replace(concurrency=1000), engine_settings=settings)
    assert 0.9 * 4 * 64 < crowded["throughput"]["serving"]["running_requests"] <= 4 * 64


def test_tensorrt_llms_dense_models_are_refused_with_dp_ranks() -> None:
    with pytest.raises(LayoutError, match=r"not modelled for tensorrt-llm") as caught:
        ask("llama-3-70b", "h100x4", 4, "tensorrt-llm")
    assert "4 replicas" in (caught.value.hint or "")
    with pytest.raises(LayoutError, match=r"--ep 2: llama-3-70b has no experts"):
        ask("llama-3-70b", "h100x8", 4, speed=SpeedQuestion(2))


@pytest.mark.parametrize("engine", [name for name in ENGINES if name in ("transformers", "llama.cpp", "mlx")])
def test_an_engine_without_dp_ranks_is_named(engine: str) -> None:
    with pytest.raises(LayoutError, match=f"{engine} has no DP ranks"):
        ask(engine=engine, gpus=None)


@pytest.mark.parametrize(
    ("gpus", "asked", "said"),
    [
        ("h200x8", {"dp": 3}, "--dp 3 does not divide 8 devices"),
        ("h200x8", {"dp": 16}, "--dp 16 does not divide 8 devices"),
        ("h200x8", {"tensor_parallel_size": 8}, "8 devices with --tp 8 --dp 8: one replica needs 64"),
        ("h200x8", {"speed": SpeedQuestion(3)}, "--ep 3 does not divide --dp 8 x --tp 1"),
        ("h200x6", {"dp": 6, "engine": "sglang"}, "--dp 6: the 256 experts of a layer cannot be divided among 6"),
        ("h200x512", {"dp": 512}, "--dp 512: the 256 experts of a layer cannot be divided among 512"),
        ("h200x8", {"dp": 4, "engine": "tensorrt-llm"}, "--dp 4 --tp 2: every device is a DP rank"),
        ("h200x8", {"dp": 0}, "data_parallel_size 0: must be at least 1"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(gpus: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        ask(gpus=gpus, **asked)
    assert caught.value.hint or "must be" in said


def test_the_hint_names_numbers_that_divide_the_devices_and_the_experts() -> None:
    with pytest.raises(LayoutError) as caught:
        ask(gpus="h200x6", dp=6, engine="sglang")
    assert caught.value.hint == "use --ep 1 or 2"  # 6 devices and 256 experts


def test_uneven_experts_go_to_the_first_devices() -> None:
    # vLLM and TensorRT-LLM: 256 experts on 6 devices are 43 on the first four and 42 on the others.
    whole = kvcalc.estimate(R1)["weights"]["bytes"]
    assert whole is not None
    for engine in ("vllm", "tensorrt-llm"):
        held = ask(gpus="b200x6", dp=6, engine=engine)["fit"]
        assert held["weights_bytes"] - tables(held) == whole - EXPERTS + 43 * EXPERTS // 256


def test_split_experts_take_as_many_bytes_as_whole_ones() -> None:
    whole, split = ask(), ask(speed=SpeedQuestion(1))
    assert (whole["engine"]["expert_parallel_size"], split["engine"]["expert_parallel_size"]) == (8, 1)
    assert split["fit"]["weights_bytes"] == pytest.approx(whole["fit"]["weights_bytes"], rel=1e-3)


def test_a_model_whose_experts_are_not_counted_is_refused() -> None:
    with pytest.raises(ModelError, match="arctic-480b: its experts are not known"):
        ask("arctic-480b", None)


def test_fit_names_a_layout_with_the_same_dp_ranks() -> None:
    model: ModelSpec = kvcalc.load_model(R1)
    document = fit(model, find_devices("h100x8"), engine="vllm", data_parallel_size=8)
    assert document["smallest"] == {
        "num_devices": 16, "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 8,
    }  # fmt: skip


def test_serving_runs_more_requests_than_tensor_parallelism() -> None:
    speed = SpeedQuestion(input_tokens=2048, output_tokens=500, concurrency=1024)
    replicas, ranks = ask(speed=speed), plain(speed=speed)
    running = [answer["throughput"]["serving"]["running_requests"] for answer in (replicas, ranks)]
    assert running[0] > 3 * running[1]
    tokens = [answer["throughput"]["serving"]["tokens_per_second"] for answer in (replicas, ranks)]
    assert tokens[0] > tokens[1]
    assert replicas["throughput"]["parts"]["communication_seconds"] > 0
    assert any("DP ranks" in note["text"] for note in replicas["warnings"])


def planned(name: str, gpu: str = "h200", dp: int = 8, engine: str = "vllm", **asked: Any) -> dict[str, Any]:
    targets = Targets(512, None)
    document = plan(
        Question(loaded(name), data_parallel_size=dp), [find_gpu(gpu)], one_length(2048, 500), targets,
        engines=(engine,), **asked,
    )  # fmt: skip
    (row,) = document["plans"]
    return dict(row)


def test_a_plan_has_the_commands_of_each_engine() -> None:
    row = planned(R1)
    assert (row["data_parallel_size"], row["tensor_parallel_size"], row["num_devices"]) == (8, 1, 8)
    assert "--tensor-parallel-size" not in row["vllm"]
    assert "--data-parallel-size 8 --enable-expert-parallel" in row["vllm"]
    # vLLM's limit is per DP rank, and one of them may get all clients. SGLang's is for all of them.
    assert "--max-num-seqs 512 " in row["vllm"]
    other = planned(R1, engine="sglang")["sglang"]
    assert "--tp-size 8 " in other
    assert "--max-running-requests 512 --attn-dp-size 8 --ep-size 8" in other
    answer = ask(speed=SpeedQuestion(None, 2048, 500, row["requests_per_replica"]))
    # Two runs of different lengths: the ranks wait for each other's prompts, so their times vary.
    assert answer["throughput"]["serving"]["tpot_seconds"] == pytest.approx(row["tpot_seconds"], rel=0.06)
    assert answer["fit"]["free_bytes"] == row["free_bytes"]


@pytest.mark.parametrize(
    ("engine", "option", "limit"), [("vllm", "max-num-seqs", 16 * 8), ("sglang", "max-running-requests", 16)]
)
def test_an_engines_limit_is_of_each_replica_or_of_all(engine: str, option: str, limit: int) -> None:
    asked = SpeedQuestion(None, 500, 100, 1000)
    answer = ask(engine=engine, engine_settings={option: "16"}, speed=asked)
    assert answer["throughput"]["serving"]["running_requests"] == pytest.approx(limit, abs=1)


def test_a_plan_grows_by_whole_dp_ranks() -> None:
    assert planned(R1, "h100")["num_devices"] % 8 == 0
    small = planned(R1, max_devices=4)
    assert not small["fits"]


def test_a_plan_of_a_dense_model_starts_whole_copies() -> None:
    row = planned("llama-3-70b")
    assert row["num_devices"] % 8 == 0
    assert "--data-parallel-size 8" in row["vllm"]
    assert "--enable-expert-parallel" not in row["vllm"]
    other = planned("llama-3-70b", engine="sglang")["sglang"]
    assert " --dp-size 8" in other
    assert "--attn-dp-size" not in other
