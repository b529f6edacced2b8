"""The short answers of a search decide as the whole ones do."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError
from kvcalc.planning.cases.lengths import lengths_of_pairs
from kvcalc.planning.plan.shapes import all_shapes, stage_shapes
from kvcalc.planning.plan.targets import Targets
from kvcalc.planning.plan.traffic import Platform, Probe, Traffic, probe
from kvcalc.question.question import CacheReuse, Question
from kvcalc.throughput.hardware import find_gpu

DECIDES = ("free_bytes", "free_low_bytes")


def found(traffic: Traffic, kind: Platform, shape: Any, running: int, is_brief: bool) -> Any:
    try:
        one = probe(traffic, kind, shape, running, is_brief)
    except KvcalcError as error:
        return str(error)
    serving = one.serving if one.trouble is None or one.speed is not None else None
    fit: Any = one.memory.fit
    figures = [fit[name] for name in DECIDES]
    return one.running, one.trouble, one.is_tight, one.expert_parallel_size, figures, serving, isinstance(one, Probe)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "deepseek-v3", "qwen3-next-80b-a3b"])
def test_a_brief_probe_is_the_whole_one(name: str, engine: str) -> None:
    draw, model = Random(name + engine), kvcalc.load_model(name)
    fits = set()
    for _ in range(12):
        gpu = find_gpu(draw.choice(("h100", "b200", "mi300x", "l40s")))
        pairs = [(draw.randint(100, 9000), draw.randint(10, 2000)) for _ in range(draw.choice((1, 5)))]
        reuse = draw.choice((None, None, CacheReuse(prefix_tokens=64)))
        targets = Targets(None, 5.0, None, draw.choice((None, 0.03)))
        question = Question(model, reuse=reuse)
        traffic = Traffic(question, lengths_of_pairs(pairs, "x"), targets, True, draw.random() < 0.3, True)
        kind = Platform(gpu, 64, engine)
        every = all_shapes if engine != "llama.cpp" else lambda gpu, _, engine: stage_shapes(gpu, engine)
        shape, running = draw.choice(every(gpu, question, engine)), draw.choice((1, 3, 40, 700, 5000))
        whole = found(traffic, kind, shape, running, False)
        assert found(traffic, kind, shape, running, True) == whole, (shape, running)
        fits.add(isinstance(whole, tuple) and whole[1] is None)
    assert True in fits or name != "llama-3.1-8b"
