"""Commands for a shell: words that reach a program exactly, and that a terminal can show.

`split` reads what `join` writes, so a command can be kept as text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from kvcalc.writing.escapes import unescaped
from kvcalc.writing.terminal import one_line


class Operator(str):
    """A word that the shell itself reads."""

    __slots__ = ()


AND, INTO = Operator("&&"), Operator(">")
_OPERATORS = {operator: operator for operator in (AND, INTO)}
# What `_quoted` writes. There is no quote inside $'...', because it is escaped there.
_PIECE = r"""\$'(?P<escaped>[^']*)'|'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<plain>[^\s'"$]+)"""


def join(words: Iterable[str]) -> str:
    """A command for bash and zsh.

    Words with control characters, invisible characters or bytes that are not UTF-8 are written as $'...'.
    """
    return " ".join(word if isinstance(word, Operator) else _quoted(word) for word in words)


def script(words: Iterable[str]) -> str:
    """A command for any POSIX shell, for a file: it may contain what a terminal cannot show."""
    return " ".join(word if isinstance(word, Operator) else shlex.quote(word) for word in words)


def split(command: str) -> list[str]:
    """The words of a command that `join` has written."""
    words = re.findall(rf"(?:{re.sub('[?]P<[a-z]+>', '?:', _PIECE)})+", command)
    return [_OPERATORS.get(word) or "".join(map(_meant, re.finditer(_PIECE, word))) for word in words]


def comment(text: str) -> str:
    """A line that the shell skips."""
    return f"# {one_line(text)}"


def lines(texts: Iterable[str]) -> str:
    """Commands and comments, one a line."""
    return "".join(f"{text}\n" for text in texts)


def written_first(text: str, file: str, words: Iterable[str]) -> list[str]:
    """A command after one that writes `text` into `file`. `echo` would read backslashes in some shells."""
    return ["printf", r"%s\n", text, INTO, file, AND, *words]


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(c if c.isprintable() and c not in r"\'!" else _escaped(c) for c in word) + "'"


def _escaped(character: str) -> str:
    # Bytes of a file's name that are not UTF-8 are U+DC80 to U+DCFF in Python. No name has another surrogate.
    errors = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors=errors))


def _meant(piece: re.Match[str]) -> str:
    if piece["escaped"] is None:
        return piece["single"] or piece["double"] or piece["plain"] or ""
    return unescaped(piece["escaped"])
