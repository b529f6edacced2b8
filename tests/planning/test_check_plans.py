"""`plan` and `check` are inverses: what plan prints is read back to the same layout, and it starts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError
from kvcalc.planning.check.answer import check
from kvcalc.planning.check.servers import Server, servers_in
from kvcalc.planning.manifests.compose import compose
from kvcalc.planning.manifests.kubernetes import kubernetes
from kvcalc.planning.manifests.server import server_of
from kvcalc.throughput.hardware import find_devices

MODELS = (
    "llama-3.1-8b", "llama-3.3-70b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-120b", "gpt-oss-20b", "deepseek-v3",
    "gemma-3-27b", "mistral-7b", "qwen3-235b-a22b",
)  # fmt: skip
GPUS = ("l40s", "a100", "h100", "h200", "b200", "mi300x")
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
    row = document["best"]
    texts = [one["command"] for one in document["commands"]]
    for kind, write in (("compose", compose), ("k8s", kubernetes)):
        try:
            texts.append(write(server_of(document, kind, None)))
        except KvcalcError:
            continue
    for text in texts:
        servers = servers_in(text)
        assert servers, f"{asked}: no server in {text}"
        check_row(servers[0], row, asked)
    return len(texts)


def check_row(server: Server, row: dict[str, Any], asked: str) -> None:
    model = row["model"]
    read = server.read()
    if "<" in read.model or server.reader.model_options[0] == "m":
        # The plan knows no checkpoint of this type.
        placeholder = words_model(server)
        server = server._replace(words=[model if word == placeholder else word for word in server.words])
    each = row["tensor_parallel_size"] * row["pipeline_parallel_size"] * row["data_parallel_size"]
    answer = check(server, find_devices(f"{row['gpu']}x{each}"))
    assert answer["starts"], f"{asked}: {answer['reason']}: {server.words}"
    engine: Any = answer["engine"]
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size")
    assert [engine[name] for name in sizes] == [row[name] for name in sizes], f"{asked}: {server.words}"
    assert answer["kv_cache"]["dtype"] == row["kv_dtype"], asked
    assert not answer["command"]["not_counted"], answer["command"]
    if row["max_batch_size"] is not None:
        held = answer["fit"]["max_batch_size"]
        assert held is None or held > 0


def words_model(server: Server) -> str:
    return next(word for word in server.words if word.startswith("<"))


@pytest.mark.parametrize("seed", range(40))
def test_what_plan_prints_is_read_back(seed: int) -> None:
    check_plan(seed)


@pytest.mark.fuzz
def test_what_many_plans_print_is_read_back(request: pytest.FixtureRequest) -> None:
    """50 plans with the default of --cases."""
    for seed in range(40, 40 + request.config.getoption("--cases") // 100):
        check_plan(seed)


def test_plans_are_not_all_empty() -> None:
    assert sum(check_plan(seed) for seed in range(8)) >= 8
