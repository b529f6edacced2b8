"""No room of kvcalc grows without paying, and the share of its lines that say what code does does not fall."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from typing import Any

from tests.conftest import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BUDGET: dict[str, Any] = tomllib.loads((ROOT / "tests" / "budget.toml").read_text(encoding="utf-8"))
TREES = {
    path.relative_to(ROOT / "kvcalc"): ast.parse(path.read_text(encoding="utf-8"))
    for path in (ROOT / "kvcalc").rglob("*.py")
}
# A room that has this share of its budget left gives it back.
_LEFT = 0.03
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def statements() -> Counter[str]:
    """The statements of each room; `top` are the modules beside the rooms."""
    rooms = Counter[str]()
    for path, tree in TREES.items():
        room = path.parts[0] if len(path.parts) > 1 else "top"
        rooms[room] += sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    return rooms


def test_every_room_keeps_to_its_budget() -> None:
    rooms, budget = statements(), BUDGET["statements"]
    assert rooms.keys() == budget.keys()
    over = {room: f"{number} of {budget[room]}" for room, number in rooms.items() if number > budget[room]}
    assert not over, "CONTRIBUTING.md says how a feature pays"


def test_a_room_gives_back_what_it_does_not_need() -> None:
    budget = BUDGET["statements"]
    left = {room: budget[room] - number for room, number in statements().items()}
    assert not {room: number for room, number in left.items() if number > max(20, _LEFT * budget[room])}


def test_docstrings_are_no_smaller_share_of_the_lines() -> None:
    documented = lines = 0
    for path, tree in TREES.items():
        lines += len((ROOT / "kvcalc" / path).read_text(encoding="utf-8").splitlines())
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
                text = node.body[0]
                documented += (text.end_lineno or 0) - text.lineno + 1
    assert documented / lines >= BUDGET["docstrings"]
