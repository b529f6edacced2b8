"""Commands for a shell: words that reach a program exactly, and that a terminal can show.

`split` reads what `join` writes, so a command can be kept as text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from kvcalc.errors import UsageError
from kvcalc.writing.terminal import one_line


class Operator(str):
    """A word that the shell itself reads."""

    __slots__ = ()


AND, INTO = Operator("&&"), Operator(">")
_OPERATORS = {operator: operator for operator in (AND, INTO)}
# What `_quoted` writes. There is no quote inside $'...', because it is escaped there.
_PIECE = r"""\$'(?P<escaped>[^']*)'|'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<plain>[^\s'"$]+)"""

# A quoted text, with or without an end, or a comment, which begins at the start of a word. An apostrophe between two
# letters opens no quote over several lines: it is English text around the commands.
_QUOTED = re.compile(
    r"""\\. | (?P<comment>(?:(?<=[\s;&|()])|\A)\#.*) | (?<=[A-Za-z])'(?=[A-Za-z])[^']*\Z
    | \$'(?:[^'\\]|\\.)*(?:'|(?P<escaped>\\?\Z)) | '[^']*(?:'|(?P<single>\Z))
    | "(?:[^"\\]|\\.)*(?:"|(?P<double>\\?\Z))""",
    re.VERBOSE | re.DOTALL,
)
_QUOTES = {"escaped": "$'", "single": "'", "double": '"'}
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{1,2})|([0-7]{1,3})|([abefnrtv'\"\\?]))")
_LETTERS = dict(zip(b"abefnrtv'\"\\?", b"\a\b\x1b\f\n\r\t\v'\"\\?"))

# A command whose output is put into a word, and a character that stands around its number while a line is read.
_COMMAND, _HELD, _DEEPEST = re.compile(r"\$\([^()]*\)"), "\ue000", 8
_PLACE = re.compile(rf"{_HELD}(\d+){_HELD}", re.ASCII)


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


def words_of(line: str) -> list[str] | None:
    """The words and the operators of a line that a person has written. None if a quote has no end.

    Raises UsageError (exit 2) if substituted commands are nested too deeply.
    """
    line, _ = without_comment(line)
    # A substituted command is a part of a word, also without quotes.
    commands: list[str] = []

    def number(found: re.Match[str]) -> str:
        commands.append(found[0])
        return f"{_HELD}{len(commands) - 1}{_HELD}"

    line = line.replace(_HELD, "")
    for _ in range(_DEEPEST):
        line, substituted = _COMMAND.subn(number, line)
        if not substituted:
            break
    else:
        raise UsageError(f"commands in $(...) are nested more than {_DEEPEST} levels deep")
    # Python's shlex has no $'...', which `join` writes.
    line = re.sub(r"\$'((?:[^'\\]|\\.)*)'", lambda found: shlex.quote(_unescaped(found[1])), line, flags=re.DOTALL)
    reader = shlex.shlex(line, posix=True, punctuation_chars=";&|<>()")
    reader.whitespace_split, reader.commenters = True, ""
    try:
        words = list(reader)
    except ValueError:
        return None
    # A command holds the numbers of the commands in it.
    for place, command in enumerate(commands):
        commands[place] = _PLACE.sub(lambda found: commands[int(found[1])], command)
    return [_PLACE.sub(lambda found: commands[int(found[1])], word) for word in words]


def without_comment(line: str, quote: str = "") -> tuple[str, str]:
    """A line without its comment, and the quote that is open at its end. `quote` is open where it begins."""
    is_open = ""

    def text(found: re.Match[str]) -> str:
        nonlocal is_open
        is_open = _QUOTES.get(found.lastgroup or "", "")
        return "" if found["comment"] is not None else found[0]

    return _QUOTED.sub(text, quote + line)[len(quote) :], is_open


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
    return _unescaped(piece["escaped"])


def _unescaped(text: str) -> str:
    """What bash reads in $'...' (QUOTING in its manual), up to a NUL. A backslash before another letter is one."""

    def byte(found: re.Match[bytes]) -> bytes:
        if found[3] is not None:
            return bytes([_LETTERS[found[3][0]]])
        return bytes([int(found[1], 16) if found[1] else int(found[2], 8) & 255])

    data = _ESCAPE.sub(byte, text.encode(errors="surrogateescape"))
    return data.partition(b"\0")[0].decode(errors="surrogateescape")
