"""`plan` and `check` are inverses: what plan prints is read back to the same layout, and it starts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import kvcalc
from kvcalc.engines import start_command
from kvcalc.errors import KvcalcError
from kvcalc.model.resolve import load_model
from kvcalc.planning.check.answer import check, runs
from kvcalc.planning.check.servers import Server, servers_in
from kvcalc.planning.manifests import emit
from kvcalc.planning.plan.document import plan
from kvcalc.planning.plan.targets import Targets
from kvcalc.question.question import Question
from kvcalc.question.request_lengths import lengths_of_pairs
from kvcalc.throughput.hardware import find_devices, find_gpu

MODELS = (
    "llama-3.1-8b", "llama-3.3-70b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-120b", "gpt-oss-20b", "deepseek-v3",
    "gemma-3-27b", "mistral-7b", "qwen3-235b-a22b", "qwen3.6-27b", "nemotron-3-nano-30b-a3b",
)  # fmt: skip
GPUS = ("l40s", "a100", "h100", "h200", "b200", "mi300x")
TRANSFER = {
    "--kv-transfer-config",
    "--disaggregation-transfer-backend",
    "cache_transceiver_config",
}
ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")


def random_plan(seed: int) -> tuple[dict[str, Any], str] | None:
    """A plan and what was asked. None if nothing can be planned."""
    random = Random(seed)
    model, gpu, engine = random.choice(MODELS), random.choice(GPUS), random.choice(ENGINES)
    asked: dict[str, Any] = {
        "input_tokens": random.choice((500, 2000, 7000, 30000)),
        "output_tokens": random.choice((100, 250, 1000)),
        "engine": engine,
        "kv_dtype": random.choice(("auto", "auto", "fp8")),
    }
    load: dict[str, Any] = random.choice(({"concurrency": random.choice((1, 8, 64))}, {"requests_per_second": 4.0}))
    if random.random() < 0.2:
        load = {"requests_per_second": 4.0, "disaggregate": True, "transfer": "infiniband-400g"}
    try:
        document: dict[str, Any] = dict(kvcalc.plan(model, [gpu], **asked, **load))
    except KvcalcError:
        return None
    return (document, f"{model} {gpu} {asked} {load}") if document["best"] else None


def check_plan(seed: int) -> int:
    """Read back what a random plan prints, and return how many texts were read."""
    found = random_plan(seed)
    if found is None:
        return 0
    document, asked = found
    row, number = document["best"], 0
    pools = row.get("disaggregated")
    parts = [{**row, **pools[role]} for role in ("prefill", "decode")] if pools else [row]
    for kind in (start_command(row["engine"]).program, "compose", "k8s"):
        try:
            text = emit(document, kind, "an/image" if "mi300" in row["gpu"] and kind in ("compose", "k8s") else None)
        except KvcalcError:
            continue
        # A compose file has a service for each replica or instance.
        servers = {server_key(server): server for server in servers_in(text)}
        assert len(servers) == len(parts), f"{asked}: {text}"
        for part, server in zip(parts, servers.values()):
            check_row(server, part, asked)
        number += 1
    return number


def server_key(server: Server) -> str:
    return " ".join(word for word in server.words if not word.startswith(("prefill-", "decode-")))


def check_row(server: Server, row: dict[str, Any], asked: str) -> None:
    model = row["model"]
    read = server.read()
    if "<" in read.model or server.reader.engine == "llama.cpp":
        # The plan knows no checkpoint of this type.
        placeholder = words_model(server)
        server = server._replace(words=[model if word == placeholder else word for word in server.words])
    each = row["tensor_parallel_size"] * row["pipeline_parallel_size"] * row["data_parallel_size"]
    answer = check(server, find_devices(f"{row['gpu']}x{each}"))
    assert runs(answer), f"{asked}: {answer['reason']}: {server.words}"
    engine: Any = answer["engine"]
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size")
    assert [engine[name] for name in sizes] == [row[name] for name in sizes], f"{asked}: {server.words}"
    assert answer["kv_cache"]["dtype"] == row["kv_dtype"], asked
    # The buffers of separate instances are not counted in their plan either, which says so.
    named = {option.partition(" (")[0] for option in answer["command"]["not_counted"]}
    assert not named - TRANSFER, answer["command"]
    if row["max_batch_size"] is not None:
        held = answer["fit"]["max_batch_size"]
        assert held is None or held > 0


def words_model(server: Server) -> str:
    return next(word for word in server.words if word.startswith("<"))


@pytest.mark.parametrize("seed", range(20))
def test_what_plan_prints_is_read_back(seed: int) -> None:
    check_plan(seed)


@pytest.mark.long
@pytest.mark.fuzz
def test_what_many_plans_print_is_read_back(request: pytest.FixtureRequest) -> None:
    """20 plans with the default of --cases."""
    for seed in range(20, 20 + request.config.getoption("--cases") // 250):
        check_plan(seed)


def test_plans_are_not_all_empty() -> None:
    assert sum(check_plan(seed) for seed in range(8)) >= 8


LOADS = [{"concurrency": 16}, {"requests_per_second": 2.0, "disaggregate": True, "transfer": "infiniband-400g"}]


def refusal(command: str, input_tokens: int, output_tokens: int) -> str | None:
    """Why the last server that a text starts refuses requests."""
    found = check(
        servers_in(command)[-1], find_devices("h200"), input_tokens=input_tokens, output_tokens=output_tokens
    )  # fmt: skip
    assert runs(found)
    assert found["requests"] is not None
    assert (found["requests"]["max_requests"] == 0) == (found["requests"]["refused"] is not None)
    return found["requests"]["refused"]


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize("lengths", [(16_000, 200), (2_000, 4)], ids=str)
@pytest.mark.parametrize("engine", ENGINES[:3])
def test_a_printed_server_accepts_the_requests(engine: str, lengths: tuple[int, int], load: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"input_tokens": lengths[0], "output_tokens": lengths[1], "engine": engine, **load}
    document = kvcalc.plan("qwen3-8b", ["h200"], **asked)
    assert refusal(emit(document, start_command(engine).program), *lengths) is None


def test_a_server_refuses_what_its_engine_has_no_room_for() -> None:
    """TensorRT-LLM does not divide a prompt over steps of 8,192 tokens; SGLang keeps some of the context free."""
    served = "trtllm-serve Qwen/Qwen3-8B --max_seq_len 16200"
    assert "refuses prompts of 16,000 tokens" in str(refusal(served, 16_000, 200))
    assert refusal(f"{served} --max_num_tokens 16000", 16_000, 200) is None
    assert refusal(served, 8_000, 200) is None
    served = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --context-length"
    assert refusal(f"{served} 2202", 2_000, 200) is None
    assert "they need a context of 2,202 tokens" in str(refusal(f"{served} 2200", 2_000, 200))
    assert "they need a context of 2,007 tokens" in str(refusal(f"{served} 2005", 2_000, 4))
    served = "vllm serve Qwen/Qwen3-8B --max-model-len"
    assert refusal(f"{served} 2200", 2_000, 200) is None
    assert "they need a context of 2,200 tokens" in str(refusal(f"{served} 2199", 2_000, 200))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("lengths", "prompt", "answer"),
    [
        ({"input_tokens": 2048, "output_tokens": 500}, 4156, 1016),
        ({"input_tokens": "lognormal:2048,0.33", "output_tokens": "lognormal:500,0.33"}, 5253, 1283),
        ({"input_tokens": "fixed:2048", "output_tokens": "fixed:500"}, 2048, 500),
    ],
)
def test_the_printed_server_starts_and_takes_the_longest_request(
    engine: str, lengths: dict[str, Any], prompt: int, answer: int
) -> None:
    """Lengths end at their 99.9th percentile, and so does the context that is printed and counted."""
    document: Any = kvcalc.plan("llama-3.1-8b", ["l40s"], engine=engine, requests_per_second=1.0, **lengths)
    (server,) = servers_in(emit(document, start_command(engine).program))
    server = server._replace(words=["llama-3.1-8b" if word.startswith("<") else word for word in server.words])
    asked = check(server, find_devices("l40s"), input_tokens=prompt, output_tokens=answer)
    assert runs(asked)
    assert asked["requests"] is not None
    assert asked["requests"]["refused"] is None
    assert (asked["requests"]["max_requests"] or 0) >= 1
    longest = document["lengths"]["longest_tokens"]
    assert longest == prompt + answer


def test_slots_have_room_for_the_longest_request_of_a_file() -> None:
    """llama-server takes the memory of all slots when it starts."""
    lengths = lengths_of_pairs([(1000, 100)] * 99 + [(20_000, 1000)], "a file")
    document: Any = plan(
        Question(load_model("llama-3.1-8b")), [find_gpu("l40s")], lengths, Targets(None, 1.0), engines=["llama.cpp"]
    )
    (server,) = servers_in(document["best"]["llama_cpp"].replace("'<your GGUF file>'", "llama-3.1-8b"))
    found = check(server, find_devices("l40s"))
    assert runs(found)
    assert found["workload"]["context_tokens"] == 21_000
