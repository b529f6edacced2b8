"""A line is answered as if it were alone, whatever questions came before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvcalc.cli.alike import split
from kvcalc.cli.batch import Questions
from kvcalc.json_lines import Line

SERVED = {"gpu": "h100", "input_tokens": 2048, "output_tokens": 500}


def _answer(questions: Questions, fields: dict[str, Any]) -> Any:
    return questions.answer(Line(2, json.dumps(fields).encode()))


def _check(lines: Sequence[dict[str, Any]]) -> None:
    """Every line must have the answer that it has alone."""
    questions = Questions()
    for fields in lines:
        assert _answer(questions, fields) == _answer(Questions(), fields), fields


@pytest.mark.parametrize("engine", ["logical", "transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize("model", ["llama-3-8b", "gpt-oss-120b", "deepseek-v3", "qwen3-next-80b-a3b"])
def test_other_counts(model: str, engine: str) -> None:
    asked = {"model": model, "engine": engine, "gpu": "h200x8"}
    serving = {**asked, "input_tokens": 2048, "output_tokens": 500}
    _check(
        [
            {**asked, "context": 8192, "batch": 4},
            {**asked, "context": 300_000, "batch": 1},  # beyond the models' limits: another note
            {**asked, "context": 8192, "batch": 4},
            {**asked, "context": 1, "batch": 5000},
            {**asked, "batch": 7},
            {**asked},
            {**serving, "concurrency": 16},
            {**serving, "concurrency": 400},
            {**serving, "input_tokens": 200_000, "concurrency": 4},
            {**serving, "input_tokens": 100_000},  # as many as fit
        ]
    )


@pytest.mark.parametrize(
    "lines",
    [
        # The same count as a text, under another name, and as another kind of number.
        [{**SERVED, "model": "llama-3-8b"}, {**SERVED, "model": "llama-3-8b", "input_tokens": "1k"}],
        [{"model": "llama-3-8b", "context": "8k"}, {"model": "llama-3-8b", "context": "16k"}],
        [{"model": "llama-3-8b", "gpu": "h100", "input-tokens": 99, "output-tokens": 9, "concurrency": n}
         for n in (1, 2, 3)],
        [{"model": "llama-3-8b", "max_model_len": 4096, "context": n} for n in (4096, 8192)],
        [{"model": "llama-3-8b", "max_model_len": n} for n in (4096, 8192)],
        [{"model": "llama-3-8b", "tp": value} for value in (1, True, 1.0, "1", 2)],
        [{"model": "llama-3-8b", "batch": value} for value in (1, True, 1.0, 2.0, "3", None, 0, -1, 10**13)],
        # Counts that contradict the rest of the question.
        [{**SERVED, "model": "llama-3-8b", **more}
         for more in ({}, {"batch": 4}, {"context": 2548}, {"context": 9}, {"batch": 1})],
        [{"model": "llama-3-8b", "engine": "sglang", "context_length": 8192, "context": n} for n in (4096, 9000)],
        [{"model": "llama-3-8b", "concurrency": n} for n in (1, 2)],
        # Questions whose other parts depend on the counts.
        [{"model": "bart-large", "context": n} for n in (100, 200)],
        [{"model": "deepseek-v3", "gpu": "h200x8", "engine": "vllm", "speculative": "mtp:1", "context": n}
         for n in (100, 9000)],
        [{"model": "llama-3-8b", "engine": "vllm,sglang", "context": n} for n in (100, 200)],
        [{"model": "nobody", "context": n} for n in (100, 200)],
    ],
)  # fmt: skip
def test_counts_in_other_forms_and_questions_that_depend_on_them(lines: list[dict[str, Any]]) -> None:
    _check(lines)


def test_a_count_is_no_part_of_the_key() -> None:
    first, second = split({"model": "a", "context": 1, "tp": 2}), split({"model": "a", "context": 5, "tp": 2})
    assert first is not None
    assert second is not None
    assert first.key == second.key
    assert (first.counts, second.counts) == ({"context": 1}, {"context": 5})
    assert split({"model": "a", "context": [1]}) is None
