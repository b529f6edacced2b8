"""Recorded figures: what the engines held when each question was first asked.

    python -m tests.recorded            which figures are different now?
    python -m tests.recorded --write    draw the questions again and record today's answers

The oracles (published figures, vLLM's own planner, Transformers) say what is right, for some questions. The recorded
figures of many random questions say what has changed, for every engine and option. A change that is meant is recorded
again, and its commit says why.
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
ENGINES = {
    "logical": 40,
    "transformers": 90,
    "vllm": 170,
    "sglang": 170,
    "tensorrt-llm": 170,
    "llama.cpp": 170,
    "mlx": 90,
}
"""The engines, and the number of questions that each answers."""

FIGURES = {
    "kv_cache": ("stored_bytes", "total_bytes", "bytes_per_sequence", "bytes_per_token", "bytes_per_device",
                 "devices_total_bytes", "decode_read_bytes"),
    "engine": ("block_size", "bytes_per_block", "request_bytes", "num_gpu_blocks", "kv_cache_tokens"),
    "fit": ("weights_bytes", "activation_bytes", "reserve_bytes", "free_bytes", "max_context_tokens", "max_batch_size"),
}  # fmt: skip
"""The recorded figures, in the order of a row."""


class Recorded(NamedTuple):
    """A question, and its figures. Those that the document does not have are null."""

    command: str
    model: str
    options: dict[str, Any]
    figures: list[int | None]

    def __str__(self) -> str:
        return command_line(self.command, self.model, self.options)


def figures_of(document: Mapping[str, Any]) -> list[int | None]:
    """The figures of an answer, in the order of FIGURES."""
    return [(document.get(part) or {}).get(name) for part, names in FIGURES.items() for name in names]


def names_of(figures: list[int | None], others: list[int | None]) -> list[str]:
    """The names of the figures that differ, with both values."""
    names = [f"{part}.{name}" for part, names in FIGURES.items() for name in names]
    return [f"{name} {old} -> {new}" for name, old, new in zip(names, figures, others) if old != new]


def path_of(engine: str) -> Path:
    """The file with an engine's recorded figures."""
    return Path(__file__).parent / f"{engine}.jsonl"


def read(engine: str) -> list[Recorded]:
    """The recorded questions about an engine."""
    return [Recorded(*json.loads(line)) for line in path_of(engine).read_text(encoding="utf-8").splitlines()]


def answers_of(engine: str) -> Iterator[Recorded]:
    """Random questions about an engine that are answered, with today's figures. Half are about rare types of models."""
    random = Random(f"{SEED} {engine}")
    types = one_of_each_type()
    random.shuffle(types)
    left = ENGINES[engine]
    while left:
        command = random.choice(("estimate", "estimate", "fit"))
        model, options = draw(random, command, engine)
        if left % 2:
            types = [*types[1:], model := types[0]]
        if (document := asked(command, model, options)) is not None:
            yield Recorded(command, model, options, figures_of(document))
            left -= 1
