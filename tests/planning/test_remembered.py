"""Answers do not depend on the questions before them, although parts of them are remembered."""

from __future__ import annotations

import pytest

from kvcalc.memory import kv_cache
from kvcalc.model.memo import forget
from kvcalc.model.resolve import load_model
from kvcalc.planning.budget import Budget, budget
from kvcalc.planning.capacity import largest_batch
from kvcalc.planning.case import Case, make_case
from kvcalc.planning.estimate import answer
from kvcalc.planning.layout import SpeedQuestion
from kvcalc.planning.question import Question
from kvcalc.throughput.hardware import find_devices

# Full attention, a latent, windows beside full attention, and states.
MODELS = ("llama-3-8b", "deepseek-v2-lite", "gpt-oss-20b", "qwen3-next-80b-a3b")


def ask(name: str, engine: str, tokens: int, batch: int = 1) -> Case:
    return make_case(Question(load_model(name), tokens, batch, engine=engine, devices=find_devices("h100x8")))


@pytest.mark.parametrize("engine", ["logical", "vllm", "sglang", "tensorrt-llm", "llama.cpp"])
def test_an_answer_is_the_same_after_other_questions(engine: str) -> None:
    model, devices = load_model("llama-3-8b"), find_devices("h100")
    contexts = (100, 20_000, None, 4096, 9000)
    questions = [
        Question(model, tokens, batch, engine=engine, devices=devices) for tokens in contexts for batch in (1, 9)
    ]
    served = SpeedQuestion(None, 9000, 500, 40)
    questions += [Question(model, engine=engine, devices=devices, speed=served)]
    forget()
    after_others = [answer(question) for question in questions]
    for question, found in zip(questions, after_others):
        forget()
        assert answer(question) == found


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", MODELS)
def test_quotients_give_the_same_limits_as_searches(name: str, engine: str) -> None:
    for tokens, batch in ((1, 1), (17, 3), (1000, 64), (131_073, 2)):
        case = ask(name, engine, tokens, batch)
        found = budget(case)
        assert isinstance(found, Budget)
        for memory in (-1, 0, 10**6, found.pool_bytes // 7, found.pool_bytes):
            longest = case.rules.longest_context(case.share, case.workload.kv_dtype, batch, memory)
            assert (longest, largest_batch(case, memory, tokens)) == searched(case, memory)


def searched(case: Case, memory: int) -> tuple[int | None, int]:
    """The longest context and the largest batch that fit, from the bytes alone."""
    tokens, batch, dtype = case.workload.context_tokens, case.workload.batch_size, case.workload.kv_dtype
    return (
        kv_cache.longest_context(lambda t: case.rules.batch_bytes(case.share, dtype, t, batch), memory),
        kv_cache.most_that_fit(lambda n: case.rules.batch_bytes(case.share, dtype, tokens, n), memory, 1 << 60),
    )
