"""Random questions about servers, drawn like those of benchmarks/compare_answers.py, and their answers in Python."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import cache
from random import Random
from types import ModuleType
from typing import Any

import kvcalc
from kvcalc.errors import KvcalcError
from kvcalc.model.spec import ModelSpec


def answers(name: str) -> ModuleType:
    """A module of benchmarks/answers."""
    return importlib.import_module(f"benchmarks.answers.{name}")


@cache
def declared() -> Any:
    """What the command line declares."""
    return answers("declared").read_declared()


def draw(random: Random, command: str, engine: str | None = None) -> tuple[str, dict[str, Any]]:
    """A model and the options of a random question about it, under `engine` if one is given."""
    without = answers("python_calls").WITHOUT_ARGUMENT
    while True:
        (model, *_), options = answers("generator").draw(random, declared(), command)
        if engine is None or options.get("engine", "vllm") == engine:
            return model, {name: value for name, value in options.items() if name not in without}


def ask(command: str, model: ModelSpec | str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a question, asked in Python. Raises KvcalcError if it is refused."""
    call = answers("python_calls").python_call(command, ["the model"], options, declared())
    built = answers("asking").built
    _, *others = built(call["models"])
    document: dict[str, Any] = getattr(kvcalc, call["function"])(model, *others, **built(call["arguments"]))
    return document


def asked(command: str, model: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The document of a question, or None if it is refused."""
    try:
        return ask(command, model, options)
    except KvcalcError:
        return None


def command_line(command: str, model: str, options: Mapping[str, Any]) -> str:
    """The question as it can be asked again."""
    return " ".join(["kvcalc", command, model, *answers("generator").words_of(options)])


def text_of(document: Mapping[str, Any]) -> str:
    """The document as JSON."""
    return json.dumps(document)
