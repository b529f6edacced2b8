"""Over a grid of contexts and batches, more never takes less, and what fits agrees with the limits.

Memories and most grid points are random. By default every preset has a grid, under one of the engines in turn;
`pytest -m fuzz --cases 35000` asks every preset under every engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, product
from random import Random
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError
from kvcalc.model.spec import ModelSpec, period
from tests.conftest import preset_names

pytestmark = pytest.mark.fuzz

# Older releases, and TensorRT-LLM's with several pools, have rules of their own.
ENGINES = (
    "logical", "transformers", "vllm", "vllm@0.11", "sglang", "sglang@0.5.3", "tensorrt-llm", "tensorrt-llm@1.3.0rc28",
    "llama.cpp", "mlx",
)  # fmt: skip
CASES_PER_GRID = 10
# Around the sizes of blocks, windows and steps.
CONTEXTS = (1, 16, 17, 31, 32, 33, 64, 65, 1000, 1024, 1025, 2048, 2049, 4096, 4097, 8192, 8193)


class Grid:
    """The points of a sweep of one model, by context and batch, and the limits of the same questions."""

    def __init__(self, random: Random, model: str, engine: str) -> None:
        self.spec: ModelSpec = kvcalc.load_model(model)
        self.engine = engine
        self.contexts = sorted({*CONTEXTS, random.randint(2, 9000), random.randint(9000, 200_000)})
        self.batches = sorted({1, 2, 3, 8, random.randint(4, 64)})
        asked: dict[str, Any] = {
            "context_tokens": random.choice(self.contexts),
            "batch_size": random.choice(self.batches),
        }
        held = kvcalc.estimate(self.spec, engine=engine, **asked)["kv_cache"]["bytes_per_device"]
        self.memory = max(1, held + random.choice((-1, 0, 0, held // 3)))
        sweep = kvcalc.sweep(
            self.spec,
            contexts=self.contexts,
            batches=self.batches,
            engines=[engine],
            kv_memory_bytes=self.memory,
        )
        self.points: dict[tuple[int, int], Mapping[str, Any]] = {
            (point["context_tokens"], point["batch_size"]): point for point in sweep["points"]
        }
        self.asked = [(random.choice(self.contexts), batch) for batch in self.batches[-2:]]

    def fit(self, context: int, batch: int) -> Mapping[str, Any] | None:
        """What fits in the same memory, asked of one point. None if it is refused."""
        asked: dict[str, Any] = {"context_tokens": context, "batch_size": batch, "engine": self.engine}
        try:
            return kvcalc.estimate(self.spec, kv_memory_bytes=self.memory, **asked)["fit"]
        except KvcalcError:
            return None

    def contradictions(self) -> Iterator[str]:
        """What cannot be true of points that are next to each other, and of the limits."""
        yield from self.of_neighbours()
        for context, batch in self.asked:
            fit = self.fit(context, batch)
            if fit is None:
                continue
            longest, largest = fit["memory_context_tokens"], fit["max_batch_size"]
            for tokens in self.contexts:
                if (fits := self.points[tokens, batch]["fits"]) is not (longest is None or tokens <= longest):
                    yield f"batch {batch}: the longest context is {longest:,}, but fits is {fits} at {tokens}"
            for number in self.batches:
                if (fits := self.points[context, number]["fits"]) is not (largest is None or number <= largest):
                    yield f"context {context}: the largest batch is {largest}, but fits is {fits} at {number}"

    def of_neighbours(self) -> Iterator[str]:
        """Points that take less, or fit, where the next smaller one takes more, or does not fit."""
        places = product(range(len(self.contexts)), range(len(self.batches)))
        for column, row in places:
            here = self.points[self.contexts[column], self.batches[row]]
            for further in ((column + 1, row), (column, row + 1)):
                if further[0] == len(self.contexts) or further[1] == len(self.batches):
                    continue
                there = self.points[self.contexts[further[0]], self.batches[further[1]]]
                where = f"{here['context_tokens']} x {here['batch_size']}"
                # The compressors of DeepSeek-V4 empty their buffers.
                if there["total_bytes"] < here["total_bytes"] and period(self.spec) == 1:
                    yield f"{where}: {here['total_bytes']} bytes, {there['total_bytes']} for more"
                if there["fits"] and not here["fits"]:
                    yield f"{where} does not fit, and more does"


def pairs(seed: int) -> Iterator[tuple[str, str]]:
    """Every preset with an engine, again and again, each time with another engine."""
    turn = seed
    while True:
        for place, model in enumerate(preset_names()):
            yield model, ENGINES[(place + turn) % len(ENGINES)]
        turn += 1


def test_every_preset_meets_every_engine() -> None:
    everything = {*product(preset_names(), ENGINES)}
    assert {*islice(pairs(3), len(everything))} == everything


def test_more_never_takes_less_and_limits_agree_with_verdicts(pytestconfig: pytest.Config) -> None:
    seed, cases = pytestconfig.getoption("--fuzz-seed"), pytestconfig.getoption("--cases")
    random, wrong, asked = Random(seed), list[str](), 0
    for model, engine in islice(pairs(seed), max(len(preset_names()), cases // CASES_PER_GRID)):
        try:
            grid = Grid(random, model, engine)
        except KvcalcError:  # a model or a length that the engine does not take
            continue
        asked += 1
        wrong += [f"{model} {engine} in {grid.memory}: {text}" for text in grid.contradictions()]
    assert asked
    assert not wrong, "\n".join(wrong[:20])


# Models with windows or states, whose caches TensorRT-LLM divides among pools.
WITH_POOLS = """
    gemma-3-27b gemma-3-1b gpt-oss-120b gemma-4-31b qwen3-next-80b-a3b nemotron-3-nano-30b-a3b qwen3.5-122b-a10b
"""


@pytest.mark.parametrize(
    ("model", "engine"),
    [*((model, "tensorrt-llm@1.3.0rc28") for model in WITH_POOLS.split()), ("deepseek-v4-flash", "transformers")],
)
def test_pools_and_compressors_take_no_less_for_more(model: str, engine: str) -> None:
    for seed in range(3):
        assert [*Grid(Random(seed), model, engine).contradictions()] == []
