"""A question is checked in the same way wherever it comes from."""

from __future__ import annotations

from typing import Any, cast

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.server.case import make_case
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate, texts

MODEL = kvcalc.load_model("llama-3-8b")
SERVED = SpeedQuestion(input_tokens=1000, output_tokens=100)
WORDS = SpeedQuestion(input_tokens=cast("Any", "1k"), output_tokens=100)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"context_tokens": -1}, "context_tokens -1: must be at least 1"),
        ({"context_tokens": 0}, "context_tokens 0: must be at least 1"),
        ({"context_tokens": 8192.0}, "context_tokens 8192.0: must be a whole number"),
        ({"context_tokens": "8k"}, "context_tokens '8k': must be a whole number"),
        ({"batch_size": 0}, "batch_size 0: must be at least 1"),
        ({"batch_size": True}, "batch_size True: must be a whole number"),
        ({"batch_size": None}, "batch_size None: must be a whole number"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size 0"),
        ({"pipeline_parallel_size": -2}, "pipeline_parallel_size -2"),
        ({"encoder_tokens": 1.5}, "encoder_tokens 1.5"),
        ({"context_tokens": 2**63}, "context_tokens: must be at most 9,223,372,036,854,775,807"),
        ({"batch_size": 10**5000}, "batch_size: must be at most"),
        ({"devices": find_devices("h100"), "speed": SERVED._replace(concurrency=10**20)}, "concurrency: must be at"),
        ({"devices": find_devices("h100"), "speed": WORDS}, "input_tokens '1k': must be"),
        ({"kv_memory_bytes": -1}, "kv_memory_bytes -1"),
        ({"kv_memory_bytes": "40GiB"}, "kv_memory_bytes '40GiB'"),
        ({"dtype": 16}, "dtype 16: must be a string"),
        ({"kv_dtype": None}, "kv_dtype None: must be a string"),
        ({"engine": None}, "engine None: must be a string"),
        ({"engine": "vlm"}, "'vlm': not an engine"),
        ({"engine_settings": {"block-size": "32"}}, "logical has no such setting"),
        ({"engine": "vllm", "engine_settings": {"enforce-eager": True}}, "needs a device"),
        ({"devices": "h100"}, "devices 'h100'"),
        ({"devices": find_devices("h100"), "kv_memory_bytes": 2**40}, "is left after the weights"),
        ({"devices": find_devices("h100"), "speed": SERVED, "context_tokens": 4096}, "--context 4096"),
        ({"devices": find_devices("h100"), "speed": SERVED, "batch_size": 4}, "--batch 4"),
        ({"speed": SERVED}, "need a device"),
    ],
    ids=lambda value: str(value)[:80] if isinstance(value, str) else str([*value]),
)
def test_python_is_refused_in_one_clear_line(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        estimate(MODEL, **asked)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_a_model_may_be_named() -> None:
    assert estimate("llama-3-8b", context_tokens=8192) == estimate(MODEL, context_tokens=8192)
    with pytest.raises(kvcalc.KvcalcError, match="llama-3-9b"):
        estimate("llama-3-9b")
    with pytest.raises(UsageError, match="must be a ModelSpec"):
        estimate(None)


def test_names_and_settings_are_read_as_on_the_command_line() -> None:
    typed = estimate(MODEL, engine="VLLM", engine_settings={"block-size": 32})
    assert typed == estimate(MODEL, engine="vllm", engine_settings={"block-size": "32"})
    off = estimate(MODEL, engine="vllm", engine_settings={"no-async-scheduling": False})
    assert off == estimate(MODEL, engine="vllm")


def test_a_case_at_another_workload_is_the_case_of_that_workload() -> None:
    for name, engine in (("llama-3-8b", "vllm"), ("gemma-3-27b", "sglang"), ("t5-small", "logical")):
        model = kvcalc.load_model(name)
        first = make_case(Question(model, 100, engine=engine))
        moved, asked = first.at(400, 3), make_case(Question(model, 400, 3, engine=engine))
        assert moved.workload._replace(notes=()) == asked.workload._replace(notes=())
        assert moved.spec.layers == asked.spec.layers


def test_notes_say_their_part_and_print_as_before() -> None:
    from kvcalc.planning.answers.estimate import answer_case

    generic = kvcalc.read_config({"model_type": "generic", "num_hidden_layers": 2, "num_attention_heads": 4,
                                  "head_dim": 8}, "generic", "test")  # fmt: skip
    found = answer_case(make_case(Question(generic, 8192, devices=find_devices("h100"))))
    assert [(note.part, note.code) for note in found.notes] == [
        ("model", "no-dtype"), ("fit", "unknown"),
    ]  # fmt: skip
    assert texts(found.document) == list(map(str, found.notes))
    assert texts(found.document)[1].startswith("fit: the weights of generic")
    with pytest.raises(kvcalc.KvcalcError, match="the weights of generic"):
        _ = found.fit
    beyond = answer_case(make_case(Question(MODEL, 10_000, devices=find_devices("h100"))))
    assert ("workload", "beyond-model") in {(note.part, note.code) for note in beyond.notes}
