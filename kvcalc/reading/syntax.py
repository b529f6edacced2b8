"""Syntax trees of shell text, by tree-sitter. Lines that are not shell are skipped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from kvcalc.errors import UsageError
from kvcalc.reading.command import Budget, too_large

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_LONGEST, _MOST_REPAIRS = 1 << 19, 40
_HERE_DOCUMENT = re.compile(rb"<<-?[ \t]*(['\"]?)(\w+)\1")
_ASSIGNED = re.compile(rb"(?:^|[\s;])(\w+)\+?=")
# Marks of unknown values, and what is no character of a file. Bytes that are not UTF-8 are U+DC80 to U+DCFF.
_NO_TEXT = re.compile("[\0\ue000\ue001\ud800-\udc7f\udd00-\udfff]")
_SPACE_ARGUMENT = re.compile(r"(?<=[ \t])\\[ \t]+$", re.MULTILINE)
# Lines whose loss changes which of the following commands run.
_CONTROL = re.compile(
    rb"(?:el)?if\s.*|(?:while|until)\s.*|for\s+\w+\s+in\s.*|case\s.*\sin\b.*|.*\)\s*\{"
    rb"|(?:then|else|fi|do|done|esac|\}|.*;;)\s*;?"
)


class Script:
    """The tree of a text, and the lines that are no shell."""

    def __init__(self, root: Node, skipped: list[str]) -> None:
        self.root, self.skipped = root, skipped


def parse(text: str, budget: Budget) -> Script:
    """The syntax tree of a text. UsageError (exit 2) for a text that is too long, or whose branches are incomplete."""
    if len(text) > _LONGEST:
        raise too_large(f"at most {_LONGEST:,} characters are read")
    # A backslash before spaces at a line's end continues no line: it is an argument. The grammar overlooks it.
    text = _SPACE_ARGUMENT.sub("' '", _NO_TEXT.sub("", text))
    data, skipped = text.encode(errors="surrogateescape"), list[str]()
    for repairs in range(_MOST_REPAIRS):
        root = _parser().parse(data).root_node
        if not root.has_error:
            return Script(root, skipped)
        budget.check_time()
        if not repairs and (cut := _with_whole_documents(data)) != data:
            data = cut
            continue
        begin, end = _logical_line(data, _broken_place(root))
        line = data[begin:end]
        if _CONTROL.fullmatch(line.strip()):
            raise UsageError(f"{_text(line)!a}: the shell's branch or loop is not complete", "paste the whole script")
        skipped.append(_text(line))
        # A variable that a lost line sets has no known value: `read` says so.
        names = b" ".join(_ASSIGNED.findall(line))
        data = data[:begin] + (b"read " + names if names else b"") + data[end:]
    raise UsageError("the text is not a shell script", "paste the command of the server alone")


@cache
def _parser() -> Parser:
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def _text(line: bytes) -> str:
    return line.decode(errors="replace").strip()[:60]


def _with_whole_documents(data: bytes) -> bytes:
    """The text without the lines that begin a here-document which does not end."""
    lines = data.split(b"\n")
    last = {line.strip(): place for place, line in enumerate(lines)}
    for place, line in enumerate(lines):
        start = _HERE_DOCUMENT.search(line)
        if start is not None and last.get(start[2], -1) <= place:
            lines[place] = b""
    return b"\n".join(lines)


def _broken_place(root: Node) -> int:
    """The byte at which the first error is. Of a missing word, it is the beginning of what lacks it."""
    node = root
    while True:
        # An error may hold whole statements, and then what has no end.
        broken = next((child for child in node.children if _is_broken(child, in_error=node.is_error)), None)
        if broken is None or broken.is_missing:
            return node.start_byte
        if not broken.children:
            return broken.start_byte
        node = broken


def _is_broken(node: Node, *, in_error: bool) -> bool:
    is_sign = in_error and not node.is_named and node.type not in ";&\n"
    return node.has_error or node.is_error or node.is_missing or is_sign


def _logical_line(data: bytes, place: int) -> tuple[int, int]:
    """The line at a byte, with the lines that a backslash joins to it."""
    begin, end = data.rfind(b"\n", 0, place) + 1, data.find(b"\n", place)
    while begin and data[:begin].endswith(b"\\\n"):
        begin = data.rfind(b"\n", 0, begin - 1) + 1
    while end >= 0 and data[end - 1 : end] == b"\\":
        end = data.find(b"\n", end + 1)
    return begin, len(data) if end < 0 else end


def named(node: Node) -> Iterator[Node]:
    """The parts of a node without comments and punctuation."""
    return (child for child in node.named_children if child.type != "comment")
