"""Formulas of tables, as Python writes them: sums, products, quotients, powers, conditions and calls of functions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Pow: operator.pow,
}  # fmt: skip


def value_of(formula: str | int, names: Mapping[str, Any]) -> Any:
    """The value of a formula whose names have these values.

    Raises KeyError for another name, and ValueError for anything else that Python can write.
    """
    return _value(_parsed(formula), names) if isinstance(formula, str) else formula


def names_in(formula: object) -> set[str]:
    """The names in a formula, or in those of a mapping or a list. Raises SyntaxError."""
    if isinstance(formula, (dict, list)):
        return set[str]().union(*map(names_in, formula.values() if isinstance(formula, dict) else formula))
    return {node.id for node in ast.walk(_parsed(str(formula))) if isinstance(node, ast.Name)}


@cache
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return names[name]
        case ast.BinOp(left, sign, right) if type(sign) in _BINARY:
            return _BINARY[type(sign)](_value(left, names), _value(right, names))
        case ast.IfExp(condition, one, other):
            return _value(one if _value(condition, names) else other, names)
        case ast.BoolOp(ast.And(), conditions):
            return all(_value(condition, names) for condition in conditions)
        case ast.UnaryOp(ast.Not(), condition):
            return not _value(condition, names)
        case ast.Compare(left, [ast.Eq()], [right]):
            return _value(left, names) == _value(right, names)
        case ast.Tuple(items):
            return tuple(_value(item, names) for item in items)
        case ast.Subscript(items, place):
            return _value(items, names)[_value(place, names)]
        case ast.Call(ast.Name(name), values, more):
            named = {argument.arg or "": _value(argument.value, names) for argument in more}
            return names[name](*(_value(value, names) for value in values), **named)
    raise ValueError(f"{ast.unparse(node)} is not a formula")
