"""Answers do not depend on the questions before them, although parts of them are remembered."""

from __future__ import annotations

import pytest

from kvcalc.memory import kv_cache
from kvcalc.model.hf_config import read_config
from kvcalc.model.memo import forget
from kvcalc.model.resolve import load_model
from kvcalc.planning.answers.estimate import answer
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.server.budget import Budget, budget
from kvcalc.server.capacity import largest_batch, max_running_requests
from kvcalc.server.case import Case, make_case
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
            longest = case.allocation.longest_context(case.share, case.workload.kv_dtype, batch, memory)
            assert (longest, largest_batch(case, memory, tokens)) == searched(case, memory)


def searched(case: Case, memory: int) -> tuple[int | None, int]:
    """The longest context, and the largest batch that fits and runs, from the bytes of each batch alone."""
    tokens, batch, dtype = case.workload.context_tokens, case.workload.batch_size, case.workload.kv_dtype
    fitting = kv_cache.most_that_fit(
        lambda n: case.allocation.batch_bytes(case.share, dtype, tokens, n), memory, 1 << 60
    )
    most = max_running_requests(case, memory, tokens)
    return (
        kv_cache.longest_context(lambda t: case.allocation.batch_bytes(case.share, dtype, t, batch), memory),
        fitting if most is None else min(fitting, most),
    )


# Transformers' classes make another model of these configs than their own code does.
READ_OTHERWISE = {
    "mimo": {
        "model_type": "mimo_v2_flash", "num_hidden_layers": 6, "hidden_size": 4096, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "sliding_window": 128,
        "hybrid_layer_pattern": [0, 1, 1, 0, 1, 0], "vocab_size": 1000,
    },
    "flat llava": {
        "model_type": "llava", "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
        "num_hidden_layers": 40, "num_key_value_heads": 40, "vocab_size": 32000, "mm_hidden_size": 1024,
    },
}  # fmt: skip


@pytest.mark.parametrize("config", READ_OTHERWISE.values(), ids=READ_OTHERWISE)
def test_a_second_question_is_about_the_model_that_the_engine_reads(config: dict[str, object]) -> None:
    model = read_config(config, "own", "test")
    assert model.as_transformers is not None
    first = Question(model, 8192, 4, engine="transformers")
    second = first._replace(kv_memory_bytes=10**9)
    forget()
    answer(first)
    after = answer(second)
    forget()
    assert after == answer(second)
