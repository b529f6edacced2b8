"""How long the ways through the package are: of a question to its case, and of imports inside one folder."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvcalc
from kvcalc.model.drafting import Speculation
from kvcalc.model.memo import forget
from kvcalc.model.variants import WhatIf
from kvcalc.question.fields import FIELDS
from kvcalc.question.question import CacheReuse, ImagesAsked, Question, SpeedQuestion
from kvcalc.server.case import make_case
from kvcalc.throughput.hardware import find_devices
from tests.test_borders import MODULES, PACKAGE, SOURCES, name_of

# The most modules that are given a question on its way to a case.
GIVEN = 12
# The longest chain of imports inside a folder.
DEPTH = 8

ON_VLLM: dict[str, Any] = {"engine": "vllm", "tensor_parallel_size": 8}
WITH_REQUESTS = {
    **ON_VLLM, "devices": find_devices("h200x8"), "speed": SpeedQuestion(input_tokens=2000, output_tokens=500),
}  # fmt: skip
WITH_DRAFTS = {**WITH_REQUESTS, "speculative": Speculation("mtp", 1, 1.7), "reuse": CacheReuse(prefix_tokens=512)}
# A model, the other fields, and the most modules that run at all on the way. This counts every check of a model, an
# engine or a number, and may only fall.
QUESTIONS: dict[str, tuple[str, dict[str, Any], int]] = {
    "bytes": ("llama-3-70b", ON_VLLM, 28),
    "requests": ("llama-3-70b", WITH_REQUESTS, 34),
    "drafts and a common prefix": ("deepseek-v3", WITH_DRAFTS, 50),
}


def modules_of(question: Question) -> tuple[set[str], set[str]]:
    """The modules of which a function is given the question or a record that holds it, and all that run."""
    given: set[str] = set()
    running: set[str] = set()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_globals.get("__name__", "")
        # What a named tuple does is no step of the way.
        if event == "call" and name.startswith("kvcalc.") and name != "kvcalc.records":
            running.add(name)
            code = frame.f_code
            values = [frame.f_locals.get(one) for one in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
            if any(holds_question(value) for value in values):
                given.add(name)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        make_case(question)
    finally:
        sys.setprofile(before)
    return given, running


def holds_question(value: object) -> bool:
    return isinstance(value, Question) or (isinstance(value, tuple) and any(isinstance(one, Question) for one in value))


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_passes_few_modules_on_its_way_to_a_case(name: str) -> None:
    model, fields, most = QUESTIONS[name]
    make_case(Question(kvcalc.load_model(model), **fields))  # imports everything
    forget()
    given, running = modules_of(Question(kvcalc.load_model(model), **fields))
    assert {"kvcalc.server.case", "kvcalc.server.resolve"} <= given
    assert len(given) <= GIVEN, sorted(given)
    assert len(running) <= most, sorted(running)


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, also in its functions, but not for type checkers alone."""
    tree = ast.parse(path.read_text())
    typed = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    skipped = {id(part) for node in typed for part in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped:
            found.update({str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found & MODULES


PATHS = {name_of(path): path for path in SOURCES}


@cache
def chain_of(module: str) -> tuple[str, ...]:
    """The longest chain of imports from a module to others in its folder."""
    path = PATHS[module]
    inside = [name for name in imports_of(path) if PATHS[name].parent == path.parent and name != module]
    return module, *max(map(chain_of, inside), key=len, default=())


@pytest.mark.parametrize("folder", sorted({path.parent.relative_to(PACKAGE).as_posix() for path in SOURCES}))
def test_chains_of_imports_inside_a_folder_are_short(folder: str) -> None:
    modules = [name for name, path in PATHS.items() if path.parent == PACKAGE / folder]
    longest = max(map(chain_of, modules), key=len)
    assert len(longest) <= DEPTH, " > ".join(longest)


def test_each_field_is_declared_and_a_function_has_its_type() -> None:
    for record in (Question, SpeedQuestion, CacheReuse, ImagesAsked, Speculation, WhatIf):
        assert set(record._fields) <= FIELDS.keys(), record
    types = _annotations("question/question.py", "Question")
    for path in ("api/memory.py", "api/serving.py", "api/files.py"):
        for node in ast.parse((PACKAGE / path).read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name not in ("audit", "score"):
                for argument in node.args.kwonlyargs:
                    name, written = argument.arg, argument.annotation and ast.unparse(argument.annotation)
                    if name in types and name != "devices":
                        assert written == types[name], f"kvcalc.{node.name}({name})"


def _annotations(path: str, record: str) -> dict[str, str]:
    """The annotations of a record as its source has them: while kvcalc runs, it keeps none."""
    (node,) = (
        node
        for node in ast.walk(ast.parse((PACKAGE / path).read_text()))
        if isinstance(node, ast.ClassDef) and node.name == record
    )
    return {
        one.target.id: ast.unparse(one.annotation)
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }


@pytest.mark.parametrize("folder", ["api", "planning", "question", "simulation"])
def test_no_function_takes_keywords_that_it_does_not_name(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None:
                # Only the decorator of Python's functions, which checks the names.
                assert ast.unparse(node.args.kwarg.annotation or node.args.kwarg) == "P.kwargs", f"{path}: {node.name}"
