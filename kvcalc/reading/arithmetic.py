"""Numbers and conditions of a shell: $((A * 2)), [ -z "$A" ], [[ $A == b* ]]."""

from __future__ import annotations

import operator
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol

from kvcalc.reading.command import UNKNOWN

if TYPE_CHECKING:
    from tree_sitter import Node

    from kvcalc.reading.state import State

_LARGEST = 1 << 63
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod,
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_COMPARISONS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


class Unknown(Exception):
    """The value is not known."""


class Reads(Protocol):
    """What a number or a condition asks of a shell."""

    state: State

    def text(self, node: Node | None) -> str:
        """The text that a node stands for."""


def integer(shell: Reads, node: Node | None) -> int:
    """The value of an arithmetic expression. Raises Unknown."""
    if node is None:
        raise Unknown
    parts = node.named_children
    if node.type == "parenthesized_expression" and parts:
        return integer(shell, parts[0])
    if node.type == "binary_expression" and len(node.children) == 3:
        sign = (node.children[1].text or b"").decode()
        left, right = integer(shell, node.children[0]), integer(shell, node.children[2])
        if sign not in _ARITHMETIC or (sign in ("/", "%") and (right <= 0 or left < 0)):
            raise Unknown
        value = int(_ARITHMETIC[sign](left, right))
    elif node.type == "unary_expression" and parts and node.children[0].type == "-":
        value = -integer(shell, parts[-1])
    else:
        text = shell.text(node)
        if text.isidentifier():  # variables need no $ here
            try:
                name = shell.state.value(text)
            except KeyError:
                raise Unknown from None
            text = name if isinstance(name, str) and name else "0"
        value = number(text)
    if abs(value) >= _LARGEST:
        raise Unknown
    return value


def number(text: str) -> int:
    """A whole number. Raises Unknown."""
    digits = text.strip().removeprefix("-")
    if not digits.isdecimal() or not digits.isascii() or len(digits) > 19:
        raise Unknown
    return int(text)


def holds(shell: Reads, node: Node) -> bool:
    """Whether a condition between brackets holds. Raises Unknown."""
    parts = node.named_children
    if node.type == "negated_command" and parts:
        return not holds(shell, parts[0])
    if node.type in ("test_command", "parenthesized_expression") and len(parts) == 1:
        return holds(shell, parts[0])
    if node.type == "unary_expression":
        sign = (node.children[0].text or b"").decode()
        return not holds(shell, parts[-1]) if sign == "!" else compare([sign, shell.text(parts[-1])])
    if node.type == "binary_expression" and len(node.children) == 3:
        left, right = node.children[0], node.children[2]
        sign = (node.children[1].text or b"").decode()
        if sign in ("&&", "-a", "||", "-o"):
            return _both(shell, left, right, is_all=sign in ("&&", "-a"))
        return compare([shell.text(left), sign, shell.text(right)], is_pattern=right.type != "string")
    return compare([shell.text(node)])


def _both(shell: Reads, left: Node, right: Node, *, is_all: bool) -> bool:
    """Two conditions, one of which may decide alone."""
    unknown = 0
    for node in (left, right):
        try:
            if holds(shell, node) is not is_all:
                return not is_all
        except Unknown:
            unknown += 1
    if unknown:
        raise Unknown
    return is_all


def compare(words: list[str], *, is_pattern: bool = False) -> bool:
    """The condition in the words of `test`. Raises Unknown for files and for values that are not known."""
    if any(UNKNOWN in word for word in words):
        raise Unknown
    match words:
        case [text]:
            return bool(text)
        case ["!", *rest]:
            return not compare(rest)
        case ["-n" | "-z" as sign, text]:
            return bool(text) is (sign == "-n")
        case [left, "=" | "==" | "!=" as sign, right]:
            return (fnmatchcase(left, right) if is_pattern else left == right) is (sign != "!=")
        case [left, sign, right] if sign in _COMPARISONS:
            return bool(_ARITHMETIC[_COMPARISONS[sign]](number(left), number(right)))
    raise Unknown
