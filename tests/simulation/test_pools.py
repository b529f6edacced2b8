"""Prefill and decode on separate instances: against the plan, and what must be conserved."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import DoesNotFitError, LayoutError
from kvcalc.model.drafting import Speculation
from kvcalc.planning.answers.simulate_pools import Prefills, simulate_pools
from kvcalc.question.lengths import lengths_of
from kvcalc.question.question import Question
from kvcalc.simulation import together
from kvcalc.simulation.loads.load import Load
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.results import Outcome, describe_times, ttft_of
from tests.conftest import ROOT

pytestmark = pytest.mark.settled

LINK = "infiniband-400g"


@pytest.mark.parametrize(
    ("engine", "prompt", "answer", "rate"), [("vllm", 5000, 1000, 3.0), ("sglang", 4096, 500, 8.0)]
)
def test_the_plan_is_what_the_simulation_plays_out(engine: str, prompt: int, answer: int, rate: float) -> None:
    model = "llama-3-70b" if prompt > 5000 else "qwen3-32b"
    document: Any = kvcalc.plan(
        model, ["h100"], engine=engine, input_tokens=prompt, output_tokens=answer, requests_per_second=rate,
        max_tpot_seconds=0.02, max_ttft_seconds=3, disaggregate=True, transfer=LINK,
    )  # fmt: skip
    (row,) = [row for row in document["plans"] if row["disaggregated"]]
    prefill, decode, parts = (row["disaggregated"][name] for name in ("prefill", "decode", "ttft_parts"))
    found: Any = kvcalc.simulate(
        model, "h100", engine=engine, prompt_tokens=prompt, answer_tokens=answer, requests_per_second=rate,
        requests=3000, tensor_parallel_size=decode["tensor_parallel_size"], replicas=decode["instances"],
        prefill_replicas=prefill["instances"], prefill_tensor_parallel_size=prefill["tensor_parallel_size"],
        transfer=LINK,
    )  # fmt: skip
    means = {one["metric"]: one["mean_seconds"] for one in found["times"]}
    assert means["tpot"] == pytest.approx(row["tpot_seconds"], rel=0.03)
    assert means["ttft"] == pytest.approx(row["ttft_seconds"], rel=0.15)
    here = found["prefill"]
    assert here["busy_share"] == pytest.approx(prefill["utilization"], rel=0.06)
    # Prompts that start together share a step, and the link has a queue, so they are compared as one.
    waited = here["mean_queue_seconds"] + here["mean_prefill_seconds"] + here["mean_transfer_seconds"]
    planned = parts["queue_seconds"] + parts["prefill_seconds"] + parts["transfer_seconds"]
    assert waited == pytest.approx(planned, rel=0.1)
    sent = 3000 * row["disaggregated"]["transfer"]["bytes_per_device"]
    assert here["sent_bytes"] == pytest.approx(sent, rel=0.02)


@pytest.mark.parametrize(
    ("model", "engine", "lengths", "clients"),
    [("llama-3.1-8b", "vllm", (8000, 200), 32), ("llama-3-70b", "vllm", (4096, 500), 64),
     ("deepseek-v3", "sglang", (2048, 500), 48)],
)  # fmt: skip
def test_so_is_a_closed_loop_after_its_start(
    model: str, engine: str, lengths: tuple[int, int], clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = "h200" if model == "deepseek-v3" else "h100"
    document: Any = kvcalc.plan(
        model, [gpu], engine=engine, input_tokens=lengths[0], output_tokens=lengths[1], concurrency=clients,
        max_tpot_seconds=0.035, disaggregate=True, transfer=LINK,
    )  # fmt: skip
    (row,) = [row for row in document["plans"] if row["disaggregated"]]
    prefill, decode = (row["disaggregated"][name] for name in ("prefill", "decode"))
    answers: list[Request] = []

    def describe(outcome: Outcome) -> Any:
        answers.extend(outcome.requests)
        return describe_times(outcome)

    monkeypatch.setattr("kvcalc.planning.answers.simulate.describe_times", describe)
    found: Any = kvcalc.simulate(
        model, gpu, engine=engine, prompt_tokens=lengths[0], answer_tokens=lengths[1],
        concurrency=clients, requests=80 * clients, tensor_parallel_size=decode["tensor_parallel_size"],
        data_parallel_size=decode["data_parallel_size"], replicas=decode["instances"],
        prefill_replicas=prefill["instances"], prefill_tensor_parallel_size=prefill["tensor_parallel_size"],
        prefill_data_parallel_size=prefill["data_parallel_size"], transfer=LINK,
        speed=kvcalc.SpeedQuestion(expert_parallel_size=decode["expert_parallel_size"]),
        prefill_expert_parallel_size=prefill["expert_parallel_size"],
    )  # fmt: skip
    assert found["load"]["arrivals"] == "closed_loop"
    # All clients send at the start, which takes a while to even out.
    steady = [ttft_of(request) for request in answers if request.number >= 10 * clients]
    assert sum(steady) / len(steady) == pytest.approx(row["ttft_seconds"], rel=0.1)
    tpot = next(times["mean_seconds"] for times in found["times"] if times["metric"] == "tpot")
    assert tpot == pytest.approx(row["tpot_seconds"], rel=0.05)


def test_requests_that_are_too_long_for_the_cache_are_left_out_of_both_pools() -> None:
    found: Any = kvcalc.simulate(
        "llama-3.1-8b", "h100", prompt_tokens="uniform:1000..20000", answer_tokens="fixed:50", requests_per_second=5,
        requests=200, kv_memory_bytes=2**30, prefill_replicas=2, transfer=LINK,
    )  # fmt: skip
    refused, served = found["load"]["refused_requests"], found["results"]["requests"]
    assert min(refused, served) > 40
    assert refused + served == 200


POOLS: dict[str, Any] = {"requests_per_second": 2, "requests": 100,
    "prompt_tokens": "fixed:2048", "answer_tokens": "fixed:300",
                         "prefill_replicas": 2, "transfer": LINK}  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_drafts_speed_decode_steps_and_a_drafter_is_on_both_instances(engine: str) -> None:
    plain, drafted = (
        kvcalc.simulate("deepseek-v3", "h200", engine=engine, tensor_parallel_size=8, speculative=asked, **POOLS)
        for asked in (None, Speculation("mtp", 1, 1.8))
    )
    times, without = ({row["metric"]: row["mean_seconds"] or 0.0 for row in one["times"]} for one in (drafted, plain))
    assert times["tpot"] == pytest.approx(times["itl"] / 1.8, rel=0.01)
    assert times["tpot"] < 0.8 * without["tpot"]
    # Its layer has a cache on the decode instance, is computed by the prefill instance, and its cache is sent.
    assert (drafted["engine"]["blocks"] or 0) < (plain["engine"]["blocks"] or 0)
    assert drafted["prefill"]["mean_prefill_seconds"] > plain["prefill"]["mean_prefill_seconds"]
    assert drafted["prefill"]["sent_bytes"] * 61 == plain["prefill"]["sent_bytes"] * 62


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_dp_ranks_are_in_either_pool(engine: str) -> None:
    found = kvcalc.simulate(
        "deepseek-v3", "h200", engine=engine, data_parallel_size=8, prefill_data_parallel_size=1,
        prefill_tensor_parallel_size=8, **POOLS,
    )  # fmt: skip
    assert (found["engine"]["data_parallel_size"], found["prefill"]["data_parallel_size"]) == (8, 1)
    assert found["hardware"]["num_devices"] == 8 + 2 * 8
    both = kvcalc.simulate("deepseek-v3", "h200", engine=engine, data_parallel_size=8, **POOLS)
    assert (both["prefill"]["data_parallel_size"], both["prefill"]["tensor_parallel_size"]) == (8, 1)
    # A prompt is on one of eight DP ranks, which takes longer than on eight ranks.
    assert both["prefill"]["mean_prefill_seconds"] > found["prefill"]["mean_prefill_seconds"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_experts_are_spread_differently_in_each_pool(engine: str) -> None:
    asked: dict[str, Any] = {"engine": engine, "data_parallel_size": 16, "prefill_data_parallel_size": 8, **POOLS}
    shared = kvcalc.SpeedQuestion(expert_parallel_size=16)
    found = kvcalc.simulate("deepseek-v3", "h200", speed=shared, prefill_expert_parallel_size=8, **asked)
    assert (found["engine"]["expert_parallel_size"], found["prefill"]["expert_parallel_size"]) == (16, 8)
    # Without either, each pool has the engine's default: all of its devices.
    assert kvcalc.simulate("deepseek-v3", "h200", **asked) == found
    # The size of the decode instances is that of both, unless the other one is given.
    with pytest.raises(LayoutError, match="prefill instances: --ep 16 does not divide --dp 8 x --tp 1"):
        kvcalc.simulate("deepseek-v3", "h200", speed=shared, **asked)


def test_prefill_instances_may_split_every_expert() -> None:
    asked: dict[str, Any] = {"tensor_parallel_size": 4, "speed": kvcalc.SpeedQuestion(expert_parallel_size=4), **POOLS}
    both, split = (
        kvcalc.simulate("gpt-oss-120b", "h100", prefill_expert_parallel_size=size, **asked) for size in (None, 1)
    )
    assert [one["engine"]["expert_parallel_size"] for one in (both, split)] == [4, 4]
    assert [one["prefill"]["expert_parallel_size"] for one in (both, split)] == [4, 1]


def test_tensorrt_llm_has_two_buffers_for_the_transfer_beside_its_blocks() -> None:
    asked: dict[str, Any] = {
        "engine": "tensorrt-llm",
        "requests_per_second": 2,
        "requests": 20,
        "answer_tokens": "fixed:100",
    }
    alone, split = (
        kvcalc.simulate("qwen3-32b", "h100", tensor_parallel_size=2, prompt_tokens="fixed:4000", **asked, **more)[
            "engine"
        ]
        for more in ({"replicas": 1}, {"prefill_replicas": 1, "transfer": LINK})
    )
    # A prompt has 125 blocks of 32 tokens, and a buffer one more.
    assert (alone["blocks"] or 0) - (split["blocks"] or 0) == pytest.approx(2 * 126, abs=1)


def test_prompts_find_the_blocks_of_earlier_ones_on_their_prefill_instance() -> None:
    trace = str(ROOT / "tests" / "traces" / "files" / "mooncake.jsonl")
    asked: dict[str, Any] = {"trace": trace, "scale_rate": 0.01}
    alone = kvcalc.simulate("qwen3-8b", "l40s", **asked)["results"]["cached_tokens"]
    one, two = (
        kvcalc.simulate("qwen3-8b", "l40s", prefill_replicas=number, transfer=LINK, **asked) for number in (1, 2)
    )
    assert one["results"]["cached_tokens"] == alone > two["results"]["cached_tokens"]
    assert one["prefill"]["sent_bytes"] == two["prefill"]["sent_bytes"]
    assert not [warning for warning in one["warnings"] if warning["code"] == "not-shared"]


def test_why_requests_of_a_trace_do_not_share_blocks_is_named() -> None:
    """Blocks of 512 tokens are named in this trace. llama.cpp has slots, and windows share other blocks."""
    asked: dict[str, Any] = {"trace": str(ROOT / "tests" / "traces" / "files" / "mooncake.jsonl"), "scale_rate": 0.01}
    for model, engine, settings, why in (
        ("qwen3-8b", "llama.cpp", {}, "slots keep their requests apart"),
        ("gpt-oss-20b", "vllm", {}, "layers with windows or states share other blocks"),
        ("qwen3-8b", "sglang", {"page-size": "1024"}, "blocks of 1024 tokens do not make up those of 512 tokens"),
        ("qwen3-8b", "vllm", {"no-enable-prefix-caching": True}, "prefix caching is off"),
        ("qwen3-8b", "vllm", {}, None),
    ):
        found = kvcalc.simulate(model, "h100", engine=engine, engine_settings=settings, **asked)
        texts = [warning["text"] for warning in found["warnings"] if warning["code"] == "not-shared"]
        assert (len(texts) == 0) if why is None else (why in texts[0]), engine
        assert (found["results"]["cached_tokens"] > 0) is (why is None)


def test_the_command_line_and_batch_ask_the_same(kvcalc: Any, tmp_path: Any) -> None:
    asked = {"requests_per_second": 8, "prompt_tokens": "fixed:1000", "answer_tokens": "fixed:100", "requests": 50,
        "gpu": "h100x3",
             "prefill_replicas": 2, "transfer_bandwidth": "50GB/s"}  # fmt: skip
    words = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", value)]
    found = kvcalc("simulate", "llama-3.1-8b", *words, "--json").json
    assert (found["hardware"]["num_devices"], found["results"]["requests"]) == (3, 50)
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"command": "simulate", "model": "llama-3.1-8b", **asked}) + "\n")
    assert json.loads(kvcalc("batch", file).out) == found
    assert "prefill instances: 2 x tp 1, busy " in kvcalc("simulate", "llama-3.1-8b", *words, "--format", "human").out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prefill-replicas", "2"), "needs the link between the instances"),
        (("--prefill-tp", "2"), "--prefill-tp needs --prefill-replicas"),
        (("--prefill-ep", "2"), "--prefill-ep needs --prefill-replicas"),
        (("--prefill-replicas", "2", "--transfer-bandwidth", "nvlink", "--engine", "llama.cpp"), "no separate prefill"),
        (("--prefill-replicas", "2", "--transfer-bandwidth", "nvlink", "--num-gpus", "8"), "both pools need 3 devices"),
        (
            ("--prefill-replicas", "2", "--transfer-bandwidth", "nvlink", "--pp", "2"),
            "decode instances of vllm have one",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(kvcalc: Any, options: tuple[str, ...], message: str) -> None:
    result = kvcalc("simulate", "llama-3.1-8b", "--gpu", "h100", "--requests-per-second", "1", "--input-tokens",
                    "100", "--output-tokens", "10", *options)  # fmt: skip
    assert result.status == 2
    assert message in result.err


def test_progress_is_told_while_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the blocks of all instances are added up as often."""
    monkeypatch.setattr(together, "_RECOUNT_EVERY", 20)
    told: list[tuple[int, int]] = []
    question = Question(kvcalc.load_model("llama-3.1-8b"), engine="vllm", devices=kvcalc.find_devices("h100"))
    load = Load(lengths_of(500, "prompt"), lengths_of(20, "answer"), requests_per_second=20.0, num_requests=100)
    simulate_pools(question, load, Prefills(1, LINK), progress=lambda done, of: told.append((done, of)))
    assert len(told) >= 10
    assert told == sorted(told)
    assert {of for _, of in told} == {100}
    assert 50 < told[-1][0] <= 100


def test_prefill_instances_keep_a_common_prefix() -> None:
    asked: Any = {
        "prompt_tokens": "fixed:4000", "answer_tokens": "fixed:50", "requests_per_second": 2.0, "requests": 200,
        "prefill_replicas": 1, "transfer": LINK,
    }  # fmt: skip
    own, shared = (
        kvcalc.simulate("llama-3.1-8b", "h100", **asked, reuse=reuse)
        for reuse in (None, kvcalc.CacheReuse(prefix_tokens=2000))
    )
    assert own["results"]["cached_tokens"] == 0
    # 125 blocks of 16 tokens are found by all requests but those before the first one has computed them.
    assert 190 * 2000 <= shared["results"]["cached_tokens"] <= 200 * 2000
    assert own["prefill"] is not None
    assert shared["prefill"] is not None
    assert shared["prefill"]["mean_prefill_seconds"] < 0.7 * own["prefill"]["mean_prefill_seconds"]
    # The whole prompt is sent in any case.
    assert shared["prefill"]["sent_bytes"] == own["prefill"]["sent_bytes"]


def test_a_limit_of_requests_is_that_of_the_decode_instances() -> None:
    """One card has memory for the states of some hundred requests, so prefill instances start with a lower limit."""
    asked: Any = {
        "devices": "h100", "engine": "vllm", "engine_settings": {"max-num-seqs": 600}, "prompt_tokens": "fixed:500",
        "answer_tokens": "fixed:100", "requests_per_second": 4.0, "requests": 50,
    }  # fmt: skip
    with pytest.raises(DoesNotFitError, match="does not start with --max-num-seqs 600"):
        kvcalc.simulate("qwen3.6-27b", tensor_parallel_size=1, **asked)
    found = kvcalc.simulate(
        "qwen3.6-27b",
        tensor_parallel_size=4,
        prefill_replicas=1,
        prefill_tensor_parallel_size=1,
        transfer=LINK,
        **asked,
    )
    assert found["prefill"] is not None
    assert found["results"]["requests_per_second"] > 3
