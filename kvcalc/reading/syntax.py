"""Syntax trees of shell text, by tree-sitter. Lines that are not shell are skipped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from time import process_time
from typing import TYPE_CHECKING

from kvcalc.errors import UsageError
from kvcalc.reading.command import Budget, too_large

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_LONGEST, _MOST_REPAIRS = 1 << 19, 40
# A text up to this many bytes is parsed within half a second, whatever it is; and the bytes of a piece of a longer one.
_SHORT, _PIECE = 1 << 14, 1 << 9
_BRACKETS, _MOST_BRACKETS = re.compile(rb"[({`)}]|\$[\"']"), 5000
_PIPES, _MOST_PIPES, _BLANKS = (b"|", b"`"), 500, re.compile(rb"[ \t\r]+\n")
_PIPELINE_END = re.compile(rb"(?<![\\|&])\n|(?<!\\)\n(?=[ \t]*\|)")
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
    _check_depth(data)
    _check_speed(data, budget)
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


def _check_speed(data: bytes, budget: Budget) -> None:
    """Parse a long text with a quarter of the time that is left, after which it ends. UsageError (exit 2) if it does.

    The parser takes time in proportion to the square of a hostile text, minutes for 500 KB of `<<<`, and stops for no
    limit: its callback for that is a crash before tree-sitter 0.26.1. The one for pieces never frees them, so texts of
    the usual length are only parsed as a whole.
    """
    if len(data) > _SHORT:
        now = process_time()
        end = now + (budget.end - now) / 4
        _parser().parse(lambda offset, _: data[offset : offset + _PIECE] if process_time() < end else b"")
        budget.check_time(end)


def _check_depth(data: bytes) -> None:
    """Raise UsageError (exit 2) for a text with too many brackets, or a pipeline of too many programs.

    With a syntax error after them, the parser's time and memory grow with the square of the number that are still
    open: 1.7 GB for 4,000 programs or backticks, 550 MB for 8,000 times `$"(`. Programs on several lines are joined by
    a sign at the end of a line; a line that begins with one is a row of a table.
    """
    if len(_BRACKETS.findall(data)) > _MOST_BRACKETS:
        raise too_large(f"a script has at most {_MOST_BRACKETS:,} brackets")
    if sum(map(data.count, _PIPES)) > _MOST_PIPES:
        for pipeline in _PIPELINE_END.split(_BLANKS.sub(b"\n", data)):
            if sum(map(pipeline.count, _PIPES)) > _MOST_PIPES:
                raise too_large(f"a pipeline has at most {_MOST_PIPES} programs")


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
