"""Prefill and decode on separate instances: against the plan, and what must be conserved."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvcalc
from kvcalc.simulation.pool import PoolError
from kvcalc.simulation.pools import check_conservation, send
from kvcalc.simulation.requests import Request

LINK = "infiniband-400g"


@pytest.mark.parametrize(
    ("engine", "prompt", "answer", "rate"), [("vllm", 7168, 1024, 3.0), ("sglang", 4096, 500, 8.0)]
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
    assert here["sent_bytes"] == 3000 * row["disaggregated"]["transfer"]["bytes_per_device"]


def finished(number: int, at: float) -> Request:
    request = Request(number, 0.0, 100, 1)
    request.started, request.finish = 0.0, at
    return request


def test_a_link_carries_one_cache_at_a_time() -> None:
    prompts = [finished(0, 1.0), finished(1, 1.1), finished(2, 1.2), finished(3, 9.0)]
    # Two senders: 0 and 2 from the first, 1 and 3 from the second. One receiver, 100 bytes at 50 bytes per second.
    sent = send(prompts, (2, 1), lambda tokens: tokens, 50)
    assert [(one.start, one.end) for one in sent] == [(1.0, 3.0), (3.0, 5.0), (5.0, 7.0), (9.0, 11.0)]
    # With two receivers, the second cache has a link of its own, and the third waits for its sender.
    sent = send(prompts, (2, 2), lambda tokens: tokens, 50)
    assert [(one.start, one.end) for one in sent] == [(1.0, 3.0), (1.1, 3.1), (3.0, 5.0), (9.0, 11.0)]


def test_a_request_that_is_lost_or_early_is_found() -> None:
    prompts = [finished(0, 1.0), finished(1, 2.0)]
    sent = send(prompts, (1, 1), lambda tokens: tokens, 50)
    answers = [finished(0, 9.0), finished(1, 9.0)]
    for answer in answers:
        answer.first_token = 8.0
    check_conservation(prompts, sent, answers)
    with pytest.raises(PoolError, match="2 requests arrived, but 1 were sent"):
        check_conservation(prompts, sent[:1], answers)
    answers[1].first_token = 3.5  # before its cache has arrived
    with pytest.raises(PoolError, match="request 1"):
        check_conservation(prompts, sent, answers)


def test_the_command_line_and_batch_ask_the_same(kvcalc: Any, tmp_path: Any) -> None:
    asked = {"requests_per_second": 8, "prompt_tokens": 1000, "answer_tokens": 100, "requests": 50, "gpu": "h100x3",
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
        (("--prefill-replicas", "2", "--transfer-bandwidth", "nvlink", "--engine", "llama.cpp"), "no separate prefill"),
        (("--prefill-replicas", "2", "--transfer-bandwidth", "nvlink", "--num-gpus", "8"), "both pools need 3 devices"),
    ],
)
def test_what_cannot_be_simulated_is_refused(kvcalc: Any, options: tuple[str, ...], message: str) -> None:
    result = kvcalc("simulate", "llama-3.1-8b", "--gpu", "h100", "--requests-per-second", "1", "--prompt-tokens",
                    "100", "--answer-tokens", "10", *options)  # fmt: skip
    assert result.status == 2
    assert message in result.err
