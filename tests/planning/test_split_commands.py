"""The command of each pool, read by `kvcalc check`, is the pool of the plan: the same bytes and requests."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import disaggregation_of
from kvcalc.model.drafting import Speculation
from kvcalc.planning.answers.estimate import answer
from kvcalc.planning.check.asked import asked_by
from kvcalc.planning.check.servers import of_release, servers_in
from kvcalc.server.budget import Budget, budget
from kvcalc.server.capacity import fitting_batch, largest_batch, max_running_requests
from kvcalc.server.case import make_case
from kvcalc.throughput.hardware import find_devices
from tests.conftest import at_night

LOAD: dict[str, Any] = {"input_tokens": 16_000, "output_tokens": 500, "requests_per_second": 2.0}
SHORT: dict[str, Any] = {"input_tokens": 2048, "output_tokens": 300, "requests_per_second": 14.0}
DP: dict[str, Any] = {"data_parallel_size": 8}
# Few requests within a short time per token, so that the limit is not what fits.
FEW: dict[str, Any] = {"max_tpot_seconds": 0.008}
PLANS = [
    ("sglang", "gpt-oss-20b", "h100", LOAD),
    ("sglang", "gpt-oss-20b", "h100", {**LOAD, **FEW}),
    ("sglang@0.5.14", "gpt-oss-20b", "h100", LOAD),
    at_night("sglang@0.5.9", "gpt-oss-20b", "h100", LOAD),
    ("sglang", "qwen3-32b", "h100", LOAD),
    ("sglang", "qwen3-32b", "h100", {**SHORT, "strict": True}),
    ("sglang", "deepseek-v3", "h200", {**LOAD, **DP}),
    ("sglang", "deepseek-v3", "h200", {**SHORT, "speculative": Speculation("mtp", 1, 1.8)}),
    ("sglang", "qwen3-next-80b-a3b", "h100", LOAD),
    at_night("sglang", "gemma-3-27b", "h100", SHORT),
    ("sglang", "llama-3.1-8b", "l40s", {**SHORT, "engine_settings": {"max-running-requests": "20"}}),
    ("vllm", "gpt-oss-20b", "h100", LOAD),
    ("vllm", "qwen3-32b", "h100", SHORT),
    ("vllm", "deepseek-v3", "h200", {**LOAD, **DP}),
    at_night("vllm", "qwen3-next-80b-a3b", "h100", LOAD),
    ("vllm", "deepseek-v4-flash", "h200", LOAD),
    ("tensorrt-llm", "gpt-oss-20b", "h100", LOAD),
    ("tensorrt-llm", "qwen3-32b", "h100", SHORT),
    ("tensorrt-llm", "deepseek-v3", "h200", {**LOAD, **DP}),
    at_night("tensorrt-llm", "gemma-3-27b", "h100", LOAD),
]


@pytest.mark.parametrize(("engine", "model", "gpu", "asked"), PLANS)
def test_the_command_of_a_pool_is_the_pool(engine: str, model: str, gpu: str, asked: dict[str, Any]) -> None:
    document: Any = kvcalc.plan(model, [gpu], engine=engine, disaggregate=True, transfer="infiniband-400g", **asked)
    (pools,) = [row["disaggregated"] for row in document["plans"] if row["disaggregated"]]
    prompt, output, reserved = asked["input_tokens"], asked["output_tokens"], disaggregation_of(engine).reserved_tokens
    for role, held in (("prefill", prompt + 1), ("decode", prompt + max(output, -(-output // 2) + reserved))):
        pool = pools[role]
        (server,) = [of_release(one, engine.partition("@")[2] or None) for one in servers_in(pools["commands"][role])]
        server = server._replace(words=[model if word.startswith("<") else word for word in server.words])
        devices = find_devices(f"{gpu}x{pool['num_devices'] // pool['instances']}")
        accepted = asked["speculative"].acceptance_length if "speculative" in asked else None
        question, notes = asked_by(server.read(), server.reader, devices, acceptance_length=accepted)
        assert not [note for note in notes if "drafting" in note.text]
        # Bytes: the memory that is free with the requests that the plan has in the cache.
        tokens = min(held, question.context_tokens or held)
        found = answer(question._replace(context_tokens=tokens, batch_size=pool["requests_held"])).fit
        assert found["free_bytes"] - pool["transfer_buffer_bytes"] == pool["free_bytes"], role
        # Requests: as many fit, and no more of them run than the limit of the command.
        room = budget(make_case(question))
        assert isinstance(room, Budget)
        less = found["free_bytes"] - (found["free_low_bytes"] or 0) if asked.get("strict") else 0
        memory = room.pool_bytes - pool["transfer_buffer_bytes"] - less
        fitting, running = fitting_batch(room.case, memory, held), largest_batch(room.case, memory, held)
        assert fitting is not None
        assert running is not None
        assert pool["requests_held"] <= running <= pool["max_requests_held"] <= fitting
        if running < fitting:
            assert running == max_running_requests(room.case, None)
