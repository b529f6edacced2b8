"""Expand the words in a syntax tree: quotes, variables, and the splitting of what is not quoted."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import translate
from typing import TYPE_CHECKING

from kvcalc.reading.arithmetic import Unknown, integer
from kvcalc.reading.command import LONGEST_WORD, UNKNOWN, Way, too_large, unknown
from kvcalc.reading.state import State, Value
from kvcalc.reading.syntax import named
from kvcalc.writing.escapes import unescaped

if TYPE_CHECKING:
    from tree_sitter import Node

# A piece of a word: its text, or the words of an array, and whether it is split at spaces.
Piece = tuple[str | list[str], bool]
_EXPANSIONS = {
    "simple_expansion", "expansion", "command_substitution", "arithmetic_expansion", "process_substitution",
}  # fmt: skip
_PARTS = _EXPANSIONS | {"string", "raw_string", "ansi_c_string", "concatenation", "translated_string"}
_LONGEST_PATTERN, _LONGEST_CUT, _LONGEST_RANGE = 100, 1000, 1000


def text_of(node: Node) -> str:
    """The text of a node, as it was pasted."""
    return (node.text or b"").decode(errors="surrogateescape")


class Expander(ABC):
    """A shell's expansions, over its state."""

    def __init__(self, state: State, way: Way) -> None:
        self.state, self.way = state, way

    @abstractmethod
    def output_of(self, node: Node) -> str | None:
        """What the commands in a node print, or None if that is not known."""

    def words(self, nodes: Iterable[Node]) -> list[str]:
        """The words that nodes stand for."""
        return [word for node in nodes for word in self._fields(self._pieces(node))]

    def text(self, node: Node | None) -> str:
        """The text that a node stands for where no word is split, as in an assignment."""
        if node is None:
            return ""
        return self._bounded("".join(value if isinstance(value, str) else " ".join(value)
                                     for value, _ in self._pieces(node)))  # fmt: skip

    def value(self, node: Node | None) -> str | list[str]:
        """The value of an assignment: a text, or the words of an array."""
        return self.words(named(node)) if node is not None and node.type == "array" else self.text(node)

    def document(self, node: Node | None) -> str:
        """The text of a here-document in which variables are replaced."""
        if node is None:
            return ""
        pieces = self._between(node, node.start_byte, node.end_byte, r"\\([\\$`])")
        return "".join(value if isinstance(value, str) else " ".join(value) for value, _ in pieces)

    def _fields(self, pieces: Iterable[Piece]) -> list[str]:
        words, word = list[str](), None
        for value, is_split in pieces:
            parts = re.split(self._separators(), value) if is_split and isinstance(value, str) else value
            if isinstance(parts, str):
                word = (word or "") + parts
                self._check_length(word)
                continue
            for place, part in enumerate(parts):
                if place and word is not None:
                    words.append(self._bounded(word))
                    word = None
                if part or not is_split:
                    word = (word or "") + part
        return words if word is None else [*words, self._bounded(word)]

    def _separators(self) -> str:
        """What separates the words of a value, by the variable IFS."""
        separators = self.state.variables.get("IFS", " \t\n")
        return f"[{re.escape(separators)}]+" if isinstance(separators, str) and separators else "(?!)"

    @staticmethod
    def _check_length(word: str) -> None:
        if len(word) > LONGEST_WORD:
            raise too_large(f"a word has at most {LONGEST_WORD:,} characters")

    def _bounded(self, word: str) -> str:
        self._check_length(word)
        self.way.budget.spend(len(word))
        return word

    def _pieces(self, node: Node, is_quoted: bool = False) -> list[Piece]:
        kind, text = node.type, text_of(node)
        if kind == "raw_string":
            return [(text[1:-1], False)]
        if kind == "ansi_c_string":
            return [(unescaped(text[2:-1]), False)]
        if kind in ("string", "translated_string"):
            begin = node.start_byte + text.index('"') + 1
            inner = node if kind == "string" else node.named_children[0]
            # An empty text is a word too, but an empty "$@" is none.
            pieces = self._between(inner, begin, node.end_byte - 1, r'\\([\\$`"\n])', is_quoted=True)
            return pieces or [("", False)]
        if kind in ("concatenation", "command_name"):
            return [piece for child in node.children for piece in self._pieces(child, is_quoted)]
        if kind == "brace_expression":
            ends = [int(text_of(child)) for child in node.named_children if text_of(child).lstrip("-").isdecimal()]
            if len(ends) == 2 and abs(ends[0] - ends[1]) < _LONGEST_RANGE:
                step = 1 if ends[0] <= ends[1] else -1
                return [([str(number) for number in range(ends[0], ends[1] + step, step)], True)]
        if kind not in _EXPANSIONS:
            return [(re.sub(r"\\(\n?)(.?)", r"\2", text, flags=re.DOTALL), False)]
        try:
            value = self._expansion(node)
        except (KeyError, Unknown):
            return [(unknown(text), False)]
        if isinstance(value, list):
            # "${A[*]}" is one word.
            joined = is_quoted and re.match(r"\$(?:\*|\{\w+\[\*\])", text) is not None
            return (
                [(str(self.state.variables.get("IFS", " "))[:1].join(value), False)]
                if joined
                else [(value, not is_quoted)]
            )
        return [(value or "", not is_quoted and not (value or "").startswith(UNKNOWN))]

    def _between(
        self, node: Node, begin: int, end: int, escapes: str, *, is_quoted: bool = True,
        parts: Iterable[str] = _EXPANSIONS,
    ) -> list[Piece]:  # fmt: skip
        """The pieces of a text whose expansions are children of a node. Its own text between them counts as it is."""
        source, pieces, place = node.text or b"", list[Piece](), begin
        children = [child for child in node.children if child.type in parts and begin <= child.start_byte < end]
        for child in (*children, None):
            # The grammar counts spaces before an expansion to it.
            start = end if child is None else child.end_byte - len((child.text or b"").lstrip())
            literal = source[place - node.start_byte : start - node.start_byte].decode(errors="surrogateescape")
            if literal:
                text = re.sub(escapes, lambda match: match[1].strip("\n"), literal)
                pieces.append((text, not is_quoted))
            if child is not None:
                pieces += self._pieces(child, is_quoted)
                place = child.end_byte
        return pieces

    def _expansion(self, node: Node) -> Value:
        """The value of an expansion. Raises KeyError or Unknown if it is not known."""
        if node.type == "simple_expansion":
            return self._first(self.state.value(text_of(node).strip()[1:]), text_of(node))
        if node.type == "arithmetic_expansion":
            return str(integer(self, next(named(node), None)))
        if node.type == "expansion":
            return self._parameter(node)
        output = self.output_of(node)
        if output is None:
            raise KeyError
        if node.type == "process_substitution":
            path = f"/dev/fd/{63 - len(self.state.files)}"
            self.state.files[path] = output
            return path
        return output.rstrip("\n")

    @staticmethod
    def _first(value: Value, name: str) -> Value:
        """An array without an index is its first word."""
        is_whole = not isinstance(value, list) or name.strip().lstrip("$") in ("@", "*")
        return value if is_whole else (value[0] if value else None)

    def _parameter(self, node: Node) -> Value:
        """${NAME}, and its forms with an operator."""
        children = node.children[1:-1]
        place = next((n for n, child in enumerate(children) if child.type != "operator" and child.is_named), 0)
        if not children or not children[place].is_named:
            raise KeyError
        before, target = [text_of(child) for child in children[:place]], children[place]
        operator = text_of(children[place + 1]) if len(children) > place + 1 else ""
        operands = self._operands(node, children[place + 1 :])
        if before not in ([], ["#"], ["!"]) or (before == ["#"] and operator):
            raise KeyError
        try:
            value = self._target(target)
            if before == ["!"]:
                value = self.state.value(str(value))
        except KeyError:
            if operator not in (":-", "-", ":=", "="):
                raise
            value = None
        if before == ["#"]:
            self._check_known(value)
            return str(len(value or ""))
        if operator.rstrip("-=+?") in ("", ":"):
            is_empty = not value if operator.startswith(":") else value is None
            if operator[-1:] == "+":
                return "" if is_empty else self._joined(operands)
            if operator[-1:] in ("-", "=") and is_empty:
                text = self._joined(operands)
                if operator[-1] == "=":
                    self.state.assign(text_of(target), text)
                return text
            if operator != ":":
                return value
        return self._edited(value, operator, operands)

    def _operands(self, node: Node, children: Sequence[Node]) -> list[Piece]:
        if not children:
            return []
        return self._between(
            node, children[0].end_byte, node.end_byte - 1, r"\\(.)", is_quoted=False, parts=_PARTS
        )  # fmt: skip

    @staticmethod
    def _joined(pieces: Iterable[Piece]) -> str:
        return "".join(value if isinstance(value, str) else " ".join(value) for value, _ in pieces)

    @staticmethod
    def _check_known(value: Value) -> None:
        if UNKNOWN in "".join(value or ()):
            raise KeyError

    def _target(self, node: Node) -> Value:
        if node.type != "subscript":
            return self._first(self.state.value(text_of(node)), text_of(node))
        name, index = node.named_children[0], node.named_children[-1]
        value = self.state.value(text_of(name))
        words = value if isinstance(value, list) else [] if value is None else [value]
        if text_of(index) in ("@", "*"):
            return words
        place = integer(self, index)
        return words[place] if -len(words) <= place < len(words) else None

    def _edited(self, value: Value, operator: str, operands: list[Piece]) -> Value:
        """${NAME%.*}, ${NAME##*/}, ${NAME/a/b}, ${NAME^^}, ${NAME:1:2}."""
        self._check_known(value)
        edit = self._joined(operands)
        if operator == ":":
            begin, _, length = edit.partition(":")
            first = int(begin) if begin.strip().lstrip("-").isdecimal() else self._unknown()
            last = int(length) if length.strip().isdecimal() else None if not length else self._unknown()
            # "${@:1}" begins with $1, and the first word of an array has the number 0.
            first -= value is not None and value is self.state.positional and first > 0
            return (value or "")[first : None if last is None else first + last]
        if not isinstance(value, str) or len(edit) > _LONGEST_PATTERN:
            raise KeyError
        if operator in ("^^", ",,") and not edit:
            return value.upper() if operator == "^^" else value.lower()
        if operator in ("/", "//"):
            old, _, new = edit.partition("/")
            if not old or re.search(r"[*?\[]", old):
                raise KeyError
            return value.replace(old, new, -1 if operator == "//" else 1)
        if operator not in ("#", "##", "%", "%%"):
            raise KeyError
        if len(value) > _LONGEST_CUT:
            raise KeyError
        pattern, places = re.compile(translate(edit)), list(range(len(value) + 1))
        cuts = places if operator in ("#", "%%") else places[::-1]
        if operator.startswith("#"):
            return next((value[cut:] for cut in cuts if pattern.match(value[:cut])), value)
        return next((value[:cut] for cut in cuts if pattern.match(value[cut:])), value)

    @staticmethod
    def _unknown() -> int:
        raise KeyError


def children_of(node: Node, *types: str) -> Iterator[Node]:
    """The children of these types."""
    return (child for child in node.children if child.type in types)


def lost_words(node: Node) -> Iterator[str]:
    """Words that the grammar skips between the parts of a command: - before <<, or a backslash and a space."""
    source, place = node.text or b"", node.start_byte
    for child in node.children:
        between = source[place - node.start_byte : child.start_byte - node.start_byte].replace(b"\\\n", b"")
        place = child.end_byte
        yield from (word.decode(errors="surrogateescape").replace("\\", " ") for word in between.split())
