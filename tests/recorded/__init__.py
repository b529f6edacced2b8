"""Recorded figures: what the engines held and served when each question was recorded.

    python -m tests.recorded            which figures are different now?
    python -m tests.recorded --write    record today's answers to the same questions
    python -m tests.recorded --draw     draw other questions and record their answers

The oracles (published figures, vLLM's own planner, Transformers) say what is right, for some questions. The recorded
figures of many random questions say what has changed, for every engine and option. A change that is meant is recorded
again, and its commit says why. Bytes are exact. Times are kept to four digits; a new fit of the constants changes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.conftest import one_of_each_type
from tests.relations.drawing import asked, command_line, draw

SEED = 20261126
MEMORY = {
    "logical": 40,
    "transformers": 90,
    "vllm": 170,
    "sglang": 170,
    "tensorrt-llm": 170,
    "llama.cpp": 170,
    "mlx": 90,
}
"""The engines, and the number of questions about memory that each answers."""
LOADS = {"vllm": 30, "sglang": 30, "tensorrt-llm": 30, "llama.cpp": 20}
"""The engines that serve requests, and the number of simulations and plans of each."""
POOLS = {"vllm": 10, "sglang": 10, "tensorrt-llm": 10}
"""The engines with separate prefill and decode instances, and the number of simulations and plans of these."""
NUMBERS = {"memory": MEMORY, "loads": LOADS, "pools": POOLS}
FILES = [(kind, engine) for kind, numbers in NUMBERS.items() for engine in numbers]

_MEMORY = """
kv_cache.stored_bytes kv_cache.total_bytes kv_cache.bytes_per_sequence kv_cache.bytes_per_token
kv_cache.bytes_per_device kv_cache.devices_total_bytes kv_cache.decode_read_bytes engine.block_size
engine.bytes_per_block engine.request_bytes engine.num_gpu_blocks engine.kv_cache_tokens fit.weights_bytes
fit.activation_bytes fit.reserve_bytes fit.free_bytes fit.max_context_tokens fit.memory_context_tokens
fit.max_batch_size
"""
_SIMULATED = """
results.duration_seconds results.tokens_per_second results.good_requests
results.mean_running_requests results.preemptions results.preempted_requests results.cached_tokens
results.most_used_blocks times.0.mean_seconds times.0.p99_seconds times.1.mean_seconds times.2.p99_seconds
times.3.mean_seconds
"""
_PLANNED = """
gpu fits num_devices replicas tensor_parallel_size pipeline_parallel_size data_parallel_size expert_parallel_size
requests_per_replica utilization free_bytes max_batch_size ttft_seconds ttft_low_seconds ttft_high_seconds tpot_seconds
tpot_high_seconds tokens_per_second cost_per_hour reason next_layout next_mode
"""
_POOL = "instances tensor_parallel_size requests_per_instance requests_held max_requests_per_second free_bytes".split()
_SPLIT = " ".join(f"disaggregated.{pool}.{name}" for pool in ("prefill", "decode") for name in _POOL)
_SPLIT += (
    " disaggregated.transfer.bytes_per_device disaggregated.transfer.seconds disaggregated.ttft_parts.queue_seconds"
)
FIGURES = {
    "estimate": _MEMORY.split(),
    "fit": _MEMORY.split(),
    "simulate": _SIMULATED.split(),
    "plan": [f"plans.{row}.{name}" for row in range(3) for name in (_PLANNED + _SPLIT).split()],
}
"""The paths of a command's recorded figures, in the order of a row."""


class Recorded(NamedTuple):
    """A question, and its figures. Those that the document does not have are null."""

    command: str
    model: str
    options: dict[str, Any]
    figures: list[Any]

    def __str__(self) -> str:
        return command_line(self.command, self.model, self.options)


def figures_of(command: str, document: Mapping[str, Any]) -> list[Any]:
    """The figures of an answer, in the order of FIGURES. Trailing nulls are left out."""
    figures = [_look_up(document, path.split(".")) for path in FIGURES[command]]
    while figures and figures[-1] is None:
        figures.pop()
    return figures


def _look_up(document: Any, path: list[str]) -> Any:
    """The value at a path, or None. Times are rounded."""
    for name in path:
        if isinstance(document, list):
            document = document[int(name)] if int(name) < len(document) else None
        else:
            document = (document or {}).get(name)
    return float(f"{document:.4g}") if isinstance(document, float) else document


def differences(recorded: Recorded) -> str:
    """The recorded figures that are different now, with both values; "refused" if the question is not answered."""
    document = asked(recorded.command, recorded.model, recorded.options)
    if document is None:
        return "refused"
    paths, old, new = FIGURES[recorded.command], recorded.figures, figures_of(recorded.command, document)
    length = max(len(old), len(new))
    pairs = zip(paths, old + [None] * (length - len(old)), new + [None] * (length - len(new)))
    # Bytes and counts are integers: 2.0 is another figure than 2.
    return ", ".join(
        f"{path} {before} -> {now}" for path, before, now in pairs if (type(before), before) != (type(now), now)
    )


def answered_again(recorded: Recorded) -> Recorded:
    """The same question with today's figures, or as it was if it is refused now."""
    document = asked(recorded.command, recorded.model, recorded.options)
    return recorded if document is None else recorded._replace(figures=figures_of(recorded.command, document))


def path_of(kind: str, engine: str) -> Path:
    """The file with an engine's recorded figures."""
    return Path(__file__).parent / kind / f"{engine}.jsonl"


def read(kind: str, engine: str) -> list[Recorded]:
    """The recorded questions about an engine."""
    return [Recorded(*json.loads(line)) for line in path_of(kind, engine).read_text(encoding="utf-8").splitlines()]


def answers_of(kind: str, engine: str) -> Iterator[Recorded]:
    """Random questions about an engine that are answered, with today's figures.

    Half of the questions about memory are about rare types of models.
    """
    random = Random(f"{SEED} {kind} {engine}")
    types = one_of_each_type()
    random.shuffle(types)
    commands = ("estimate", "estimate", "fit") if kind == "memory" else ("simulate", "simulate", "plan")
    left = NUMBERS[kind][engine]
    while left:
        command = random.choice(commands)
        model, options = draw(random, command, engine)
        if kind == "pools" and not options.keys() & {"disaggregate", "prefill-replicas"}:
            continue
        if kind == "memory" and left % 2:
            types = [*types[1:], model := types[0]]
        if (document := asked(command, model, options)) is not None:
            yield Recorded(command, model, options, figures_of(command, document))
            left -= 1
