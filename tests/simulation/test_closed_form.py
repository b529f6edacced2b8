"""The simulation and the closed form of serving agree where both apply: a closed loop of about equal requests."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.model.drafting import Speculation
from tests.conftest import at_night

MODEL, DEVICE = "llama-3.1-8b", "h100"
LOADS = [(1000, 1000, 1), (1000, 1000, 8), (1000, 1000, 64), (8000, 500, 16), (2000, 500, 32)]


def about(tokens: int) -> str:
    return f"uniform:{int(tokens * 0.7)}..{int(tokens * 1.3)}"


def simulated(
    engine: str, prompt: int, answer: int, concurrency: int, requests: int | None = None, model: str = MODEL,
    device: str = DEVICE,
) -> kvcalc.documents.Simulate:  # fmt: skip
    return kvcalc.simulate(
        model, device, engine=engine, prompt_tokens=about(prompt), answer_tokens=about(answer), concurrency=concurrency,
        requests=requests,
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_means_are_those_of_the_closed_form(engine: str, load: tuple[int, int, int]) -> None:
    closed, found = estimated(MODEL, DEVICE, engine, *load), simulated(engine, *load)
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert times["tpot"] == pytest.approx(closed["tpot_seconds"], rel=0.05)
    assert found["results"]["requests_per_second"] == pytest.approx(closed["requests_per_second"], rel=0.05)
    assert times["ttft"] == pytest.approx(closed["steady_ttft_seconds"], rel=0.1)


@pytest.mark.parametrize(
    ("engine", "model", "device", "tensor_parallel_size", "load"),
    [
        # As many answers end with a long step as with a short one, so few requests arrive during a long one.
        ("vllm", "llama-3.3-70b", "h100x4", 4, (2689, 117, 108)),
        ("vllm", "llama-3.3-70b", "h100x4", 4, (6240, 97, 22)),
        ("tensorrt-llm", "qwen3-32b", "h100x2", 2, (15_370, 52, 14)),
        ("sglang", "llama-3.1-8b", "a100-80gb", 1, (3316, 110, 34)),
        # The prompts of a group take several steps.
        ("sglang", "llama-3.1-8b", "h100", 1, (1500, 30, 100)),
        # A server with several prompts in each step has long and short steps in turn.
        ("tensorrt-llm", "llama-3.1-8b", "a100-80gb", 1, (217, 63, 225)),
        # With two clients, a request meets one other, and never its own prompt.
        ("vllm", "llama-3.1-8b", "a100-80gb", 1, (10_947, 102, 2)),
        ("sglang", "llama-3.3-70b", "h100x4", 4, (12_529, 198, 2)),
        # A prompt in parts: those of 11 and 4 tokens read fewer experts than a third of the prompt.
        ("llama.cpp", "gpt-oss-120b", "h100", 1, (401, 68, 2)),
        # Prompts in slots share the steps.
        ("llama.cpp", "mixtral-8x7b", "h200", 1, (8645, 59, 6)),
    ],
)  # fmt: skip
def test_so_are_those_of_a_server_that_is_busy_with_prompts(
    engine: str, model: str, device: str, tensor_parallel_size: int, load: tuple[int, int, int]
) -> None:
    prompt, answer, clients = load
    asked: dict[str, Any] = {"tensor_parallel_size": tensor_parallel_size}
    if engine == "llama.cpp":
        asked["engine_settings"] = {"parallel": str(max(4, clients))}
    closed = estimated(model, device, engine, *load, **asked)
    found = kvcalc.simulate(
        model, device, engine=engine, prompt_tokens=about(prompt), answer_tokens=about(answer), concurrency=clients,
        **asked,
    )  # fmt: skip
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert times["tpot"] == pytest.approx(closed["tpot_seconds"], rel=0.1)
    assert found["results"]["requests_per_second"] == pytest.approx(closed["requests_per_second"], rel=0.1)
    # The closed form says 14 % too little of the server with several prompts in each step.
    close = 0.2 if load == (217, 63, 225) else 0.12
    assert times["ttft"] == pytest.approx(closed["steady_ttft_seconds"], rel=close)


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("vllm", {"max-num-batched-tokens": "256"}),
        ("sglang", {"chunked-prefill-size": "256"}),
        ("tensorrt-llm", {"max-num-tokens": "64", "enable-chunked-prefill": True}),
    ],
)
def test_so_is_that_of_one_prompt_in_many_steps(engine: str, settings: dict[str, Any]) -> None:
    """Each step reads the weights again, so the prompt takes longer than in one step."""
    serving = estimated(MODEL, DEVICE, engine, 16_000, 100, 1, engine_settings=settings)
    found = kvcalc.simulate(
        MODEL, DEVICE, engine=engine, engine_settings=settings, prompt_tokens="fixed:16000", answer_tokens="fixed:100",
        concurrency=1, requests=40,
    )  # fmt: skip
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert serving["steady_ttft_seconds"] == pytest.approx(times["ttft"], rel=0.05)


@pytest.mark.parametrize("load", [(1000, 1000, 120), (4000, 1000, 60), at_night((200, 2000, 200))], ids=str)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_so_are_those_of_requests_that_wait_for_memory(engine: str, load: tuple[int, int, int]) -> None:
    # After 20 requests of each client, the start of a full server hardly counts.
    closed = estimated("qwen3-30b-a3b", DEVICE, engine, *load)
    found = simulated(engine, *load, model="qwen3-30b-a3b", requests=20 * load[2])
    times, results = {row["metric"]: row["mean_seconds"] for row in found["times"]}, found["results"]
    assert closed["running_requests"] < load[2]
    assert results["preemptions"] > 0
    assert results["requests_per_second"] == pytest.approx(closed["requests_per_second"], rel=0.1)
    assert times["tpot"] == pytest.approx(closed["tpot_seconds"], rel=0.1)
    assert times["ttft"] == pytest.approx(closed["steady_ttft_seconds"], rel=0.12)


@pytest.mark.parametrize("clients", [100, 256])
def test_so_are_those_of_a_model_with_windows(clients: int) -> None:
    """To start a request, vLLM reserves blocks for all steps in flight: 30 such reservations would fill the cache."""
    closed = estimated("gemma-3-12b", "h200", "vllm", 8000, 1000, clients)
    found = simulated("vllm", 8000, 1000, clients, model="gemma-3-12b", device="h200")
    times, results = {row["metric"]: row["mean_seconds"] for row in found["times"]}, found["results"]
    assert closed["running_requests"] == pytest.approx(results["mean_running_requests"], rel=0.05)
    assert times["tpot"] == pytest.approx(closed["tpot_seconds"], rel=0.05)
    assert times["ttft"] == pytest.approx(closed["steady_ttft_seconds"], rel=0.1)
    assert results["requests_per_second"] == pytest.approx(closed["requests_per_second"], rel=0.05)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_plan_for_a_rate_has_the_times_of_requests_that_arrive_at_random(engine: str) -> None:
    """With the first burst of a benchmark, TTFT would be 40 to 60 % longer."""
    asked: dict[str, Any] = {"engine": engine, "requests_per_second": 20.0}
    document = kvcalc.plan(MODEL, [DEVICE], input_tokens=1000, output_tokens=500, max_tpot_seconds=0.05, **asked)
    (row,) = document["plans"]
    found = kvcalc.simulate(
        MODEL, DEVICE, prompt_tokens="fixed:1000", answer_tokens="fixed:500", requests=3000, replicas=row["replicas"],
        tensor_parallel_size=row["tensor_parallel_size"], **asked,
    )  # fmt: skip
    times = {one["metric"]: one["mean_seconds"] for one in found["times"]}
    assert row["tpot_seconds"] == pytest.approx(times["tpot"], rel=0.05)
    assert row["ttft_seconds"] == pytest.approx(times["ttft"], rel=0.25)


OTHERS: dict[str, dict[str, Any]] = {
    "DP ranks": {"model": "deepseek-v3", "gpu": "h200x8", "data_parallel_size": 8},
    "drafts": {"model": MODEL, "gpu": DEVICE, "speculative": Speculation("ngram", 3, 2.0)},
    "drafts of DP ranks": {
        "model": "deepseek-v3", "gpu": "h200x8", "data_parallel_size": 8, "speculative": Speculation("mtp", 1, 1.8),
    },
    "a part on the host": {
        "model": "qwen3-30b-a3b", "gpu": "rtx-4090", "engine": "llama.cpp", "engine_settings": {"n-cpu-moe": "40"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_so_are_those_of_other_layouts_and_of_drafts(name: str) -> None:
    asked = {"engine": "vllm", **OTHERS[name]}
    model, gpu = asked.pop("model"), asked.pop("gpu")
    number = 8 if "host" in name else 32
    lengths: dict[str, Any] = {"prompt_tokens": "uniform:900..1100", "answer_tokens": "uniform:450..550"}
    found = kvcalc.simulate(model, gpu, **lengths, concurrency=number, requests=10 * number, benchmark=True, **asked)
    closed = estimated(model, gpu, asked.pop("engine"), 1000, 500, number, **asked)
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert times["tpot"] == pytest.approx(closed["tpot_seconds"], rel=0.05)
    assert found["results"]["tokens_per_second"] == pytest.approx(closed["tokens_per_second"], rel=0.1)
    # The server gives the tokens of a step at once, and then nothing until the next one.
    if times["tpot"] is not None:
        assert times["itl"] == pytest.approx(times["tpot"] * found["engine"]["tokens_per_step"], rel=0.01)


@pytest.mark.parametrize(
    ("engine", "clients"), [("vllm", 256), ("vllm", 64), ("sglang", 64), ("sglang", 16), ("tensorrt-llm", 128)]
)
def test_so_are_those_of_dp_ranks_that_stop_for_long_prompts(engine: str, clients: int) -> None:
    asked: dict[str, Any] = {"engine": engine, "data_parallel_size": 8}
    found = kvcalc.simulate(
        "deepseek-v3", "h200x8", prompt_tokens=about(7000), answer_tokens=about(700), concurrency=clients,
        **asked,
    )  # fmt: skip
    closed = estimated("deepseek-v3", "h200x8", asked.pop("engine"), 7000, 700, clients, **asked)
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert times["tpot"] == pytest.approx(closed["tpot_seconds"], rel=0.1)
    assert found["results"]["requests_per_second"] == pytest.approx(closed["requests_per_second"], rel=0.1)
    # A prompt waits for the steps of other ranks too, and is computed beside their prompts.
    assert times["ttft"] == pytest.approx(closed["steady_ttft_seconds"], rel=0.15)


def test_so_are_those_of_dp_ranks_that_get_requests_as_others_end() -> None:
    """Answers end on any rank, so the next prompts are not spread evenly, and one rank computes a third of them."""
    asked: dict[str, Any] = {"data_parallel_size": 8}
    found = kvcalc.simulate(
        "deepseek-v3", "h200x8", engine="tensorrt-llm", prompt_tokens=about(1834), answer_tokens=about(58),
        concurrency=240, requests=2400, **asked,
    )  # fmt: skip
    closed = estimated("deepseek-v3", "h200x8", "tensorrt-llm", 1834, 58, 240, **asked)
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert times["tpot"] == pytest.approx(closed["tpot_seconds"], rel=0.1)
    assert found["results"]["requests_per_second"] == pytest.approx(closed["requests_per_second"], rel=0.1)


@pytest.mark.parametrize("clients", [128, 400])
def test_so_are_those_of_dp_ranks_with_several_prompts_in_a_step(clients: int) -> None:
    """They stop the requests of their rank once."""
    asked: dict[str, Any] = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    found = kvcalc.simulate(
        "qwen3-30b-a3b", "h100x4", engine="sglang", prompt_tokens=about(634), answer_tokens=about(64),
        concurrency=clients, benchmark=True, **asked,
    )  # fmt: skip
    closed = estimated("qwen3-30b-a3b", "h100x4", "sglang", 634, 64, clients, **asked)
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert times["tpot"] == pytest.approx(closed["tpot_seconds"], rel=0.05)
    assert found["results"]["requests_per_second"] == pytest.approx(closed["requests_per_second"], rel=0.05)


def test_so_are_those_of_dp_ranks_whose_prompts_take_several_steps() -> None:
    """Every step waits for the rank whose part of a prompt attends to most tokens."""
    asked: dict[str, Any] = {"data_parallel_size": 8}
    found = kvcalc.simulate(
        "deepseek-v3", "h200x8", engine="sglang", prompt_tokens=about(16_000), answer_tokens=about(500), concurrency=64,
        requests=640, **asked,
    )  # fmt: skip
    closed = estimated("deepseek-v3", "h200x8", "sglang", 16_000, 500, 64, **asked)
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert times["tpot"] == pytest.approx(closed["tpot_seconds"], rel=0.1)
    assert found["results"]["requests_per_second"] == pytest.approx(closed["requests_per_second"], rel=0.1)


def test_an_answer_whose_requests_are_preempted_names_the_simulation() -> None:
    for engine, load, is_named in (("vllm", 512, True), ("vllm", 64, False), ("tensorrt-llm", 512, False)):
        question = kvcalc.SpeedQuestion(input_tokens=1000, output_tokens=1000, concurrency=load, closed_form=True)
        answer = kvcalc.estimate(MODEL, devices=kvcalc.find_devices(DEVICE), engine=engine, speed=question)
        texts = [note["text"] for note in answer["warnings"] if note["code"] == "preemptions"]
        assert len(texts) == is_named
        assert not texts or "kvcalc simulate" in texts[0]


def estimated(
    model: str, device: str, engine: str, prompt: int, answer: int, concurrency: int, **more: Any
) -> dict[str, Any]:
    """The closed form's answer."""
    asked = kvcalc.SpeedQuestion(input_tokens=prompt, output_tokens=answer, concurrency=concurrency, closed_form=True)
    devices = kvcalc.find_devices(device)
    throughput = kvcalc.estimate(model, devices=devices, engine=engine, speed=asked, **more)["throughput"]
    assert throughput is not None
    assert throughput["serving"] is not None
    return {**throughput["serving"]}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_full_cache_is_never_overfull_and_loses_no_request(engine: str) -> None:
    found = simulated(engine, 1000, 1000, 512, 2000)
    engine_part, results = found["engine"], found["results"]
    assert engine_part["blocks"] is not None
    assert results["most_used_blocks"] is not None
    assert 0.95 * engine_part["blocks"] < results["most_used_blocks"] <= engine_part["blocks"]
    assert results["requests"] == 2000
    assert (results["preemptions"] > 0) == (engine != "tensorrt-llm")


@pytest.mark.parametrize("load", [(1000, 100, 128), (200, 2000, 128)], ids=str)
def test_requests_start_only_if_every_pool_of_tensorrt_llm_has_room(load: tuple[int, int, int]) -> None:
    """Its layers with windows have a pool of their own, which may be full before that of the others."""
    closed = estimated("gemma-3-27b", DEVICE, "tensorrt-llm", *load)
    found = simulated("tensorrt-llm", *load, model="gemma-3-27b")["results"]
    assert found["mean_running_requests"] == pytest.approx(closed["running_requests"], rel=0.1)


@pytest.mark.parametrize(
    ("engine", "model", "device", "tensor_parallel_size", "load", "within"),
    [
        # The mean of all ages fits, but requests that started together outgrow the cache: some wait all the same.
        ("vllm", "llama-3.1-8b", "h100", 1, (422, 1329, 424), 0.15),
        at_night("sglang", "llama-3.1-8b", "h100", 1, (119, 1536, 422), 0.3),
        # Of those that wait, few are paused.
        at_night("vllm", "gpt-oss-120b", "h100", 1, (152, 673, 288), 0.15),
        # Most wait for a place (--max-num-seqs), and not for memory: they preempt nobody.
        ("vllm", "qwen3-8b", "l40s", 1, (143, 775, 357), 0.1),
        # Long answers hold their places for longer.
        ("tensorrt-llm", "qwen3-32b", "h100x2", 2, (113, 1254, 241), 0.1),
        at_night("tensorrt-llm", "gpt-oss-120b", "h100", 1, (539, 2206, 85), 0.1),
        # DP ranks that compute prompts first: the answers wait for memory that is always full, and stand still.
        ("sglang", "deepseek-v3", "h200x8", 1, (14_020, 63, 509), 0.15),
    ],
)
def test_so_are_those_of_a_cache_that_is_just_full(
    engine: str, model: str, device: str, tensor_parallel_size: int, load: tuple[int, int, int], within: float
) -> None:
    """Without these rules, one of the two times is 1.3 to 9 times as long as the other."""
    ranks = kvcalc.find_devices(device).num_devices // tensor_parallel_size
    asked: dict[str, Any] = {"tensor_parallel_size": tensor_parallel_size, "data_parallel_size": ranks}
    closed = estimated(model, device, engine, *load, **asked)
    found = kvcalc.simulate(
        model, device, engine=engine, prompt_tokens=about(load[0]), answer_tokens=about(load[1]), concurrency=load[2],
        **asked,
    )  # fmt: skip
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert times["ttft"] == pytest.approx(closed["steady_ttft_seconds"], rel=within)
    assert times["tpot"] == pytest.approx(closed["tpot_seconds"], rel=0.1)
