"""A server has the same figures whoever asks: `fit`, `estimate`, and `check` of the command that `fit` prints."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvcalc.errors import KvcalcError
from kvcalc.model.resolve import load_model
from kvcalc.planning.answers.document import estimate
from kvcalc.planning.answers.fit import fit
from kvcalc.planning.answers.models import list_models
from kvcalc.planning.check.answer import check
from kvcalc.planning.check.servers import of_release, servers_in
from kvcalc.question.question import Question
from kvcalc.throughput.hardware import find_devices

_GPUS = ("h100", "h100x2", "h200x8", "l4", "a100", "rtx-4090", "rtx-5090x2", "mi300x", "b200x4", "l40s", "t4", "v100")
_ENGINES = ("auto", "auto", "auto", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "vllm@0.11.0", "sglang@0.5.9")
_PARTS = ("workload", "kv_cache", "weights", "fit", "server", "smallest")


def _random_question(random: Random, names: list[str]) -> Question:
    model, engine = load_model(random.choice(names)), random.choice(_ENGINES)
    longest = model.longest_context or 4096
    context = random.choice((None, None, random.randint(1, longest), 2 * longest))
    kv_dtype = random.choice(("auto", "auto", "fp8")) if "llama" not in engine else "auto"
    size = random.choice((None, None, 1, 2, 4))
    return Question(
        model, context_tokens=context, kv_dtype=kv_dtype, engine=engine, tensor_parallel_size=size,
        devices=find_devices(random.choice(_GPUS)),
    )  # fmt: skip


def random_servers(seed: int, number: int) -> Any:
    """Random questions about servers, each with the answer of `fit` and a command that `check` can read."""
    random, names = Random(seed), [row["name"] for row in list_models()["models"]]
    count = 0
    while count < number:
        question = _random_question(random, names)
        try:
            document: Any = fit(question)
        except KvcalcError:
            continue
        command = (document["server"] or {"command": None})["command"]
        if command is None or "<" in command:
            continue
        count += 1
        yield question, document, command


@pytest.mark.parametrize("seed", range(6))
def test_fit_check_and_estimate_agree_in_every_figure(seed: int) -> None:
    for question, document, command in random_servers(seed, 50):
        told = f"{command} on {question.devices}"
        estimated: Any = estimate(question)
        for part in set(_PARTS) - {"smallest"}:
            assert estimated[part] == document[part], f"{told}: {part}"
        (server,) = servers_in(command)
        release = document["engine"]["version"] if "@" in question.engine else None
        devices = question.devices
        assert devices is not None
        checked: Any = check(
            of_release(server, release), devices._replace(num_devices=document["hardware"]["num_devices"])
        )
        for part in _PARTS:
            if part == "server":
                ours = {**document["server"], "command": None}
                assert {**checked["server"], "command": None} == ours, told
            else:
                assert checked[part] == document[part], f"{told}: {part}"
        assert checked["starts"] == document["server"]["starts"], told
