"""The statements of a shell script: enough of a shell to find the commands that start servers."""

from __future__ import annotations

import re

from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple
from kvcalc.writing.shell import words_of

_OPERATORS = set(";&|()<>\n")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
# The number of a redirected stream, as in `2>log`. In `-tp 4 > log`, the 4 is a word of the command.
_STREAM = re.compile(r"(?<=\s)\d(?=[<>])")
_NOT_WORDS = ("export", "exec", "nohup", "sudo", "env", "time", "then", "do", "else")


class Statement(NamedTuple):
    """The words of a command, and the variables that were set for it."""

    words: list[str]
    variables: dict[str, str]


class Script(NamedTuple):
    """The statements of a script, and the files that it writes."""

    statements: list[Statement]
    files: dict[str, str]


def parse_script(text: str) -> Script:
    """The statements of a script. Variables have the values that the script itself gives them.

    What is no shell is skipped line by line, so that the script may be a page with text around its commands. Raises
    UsageError (exit 2) if it has one line only and that has an unclosed quote.
    """
    files: dict[str, str] = {}
    variables: dict[str, str] = {}
    found: list[Statement] = []
    lines = [_STREAM.sub("", line) for line in re.sub(r"[ \t]*\\[ \t]*\r?\n", " ", text).splitlines()]
    is_alone = len(lines) == 1
    while lines:
        line = lines.pop(0)
        here = _HERE_DOCUMENT.search(line)
        if here is not None and here[2] in (one.strip() for one in lines):
            body = []
            while lines and lines[0].strip() != here[2]:
                body.append(lines.pop(0))
            lines.pop(0)
            target = re.search(r">\s*([^\s<>]+)", line.replace(here[0], ""))
            if target is not None:
                files[target[1]] = "\n".join(body)
            continue
        words = words_of(line)
        while words is None and lines and line.count("'") % 2 and len(line) < 100_000:
            line += "\n" + lines.pop(0)  # a quoted text of several lines
            words = words_of(line)
        if words is None:
            if is_alone:
                raise UsageError("the command has an unclosed quote", "put the whole command in quotes")
            continue
        found += _statements(words, variables, files)
    return Script(found, files)


def _statements(words: list[str], variables: dict[str, str], files: dict[str, str]) -> list[Statement]:
    """The statements of a line. What it assigns goes into `variables`, and what it prints into `files`."""
    found: list[Statement] = []
    parts: list[list[str]] = [[]]
    for word in words:
        if word and set(word) <= _OPERATORS and not set(word) & set("<>"):
            parts.append([])
        else:
            parts[-1].append(word)
    for part in parts:
        own: dict[str, str] = {}
        part = [_expanded(word, variables) for word in part]
        while part and (part[0] in _NOT_WORDS or _ASSIGNMENT.fullmatch(part[0])):
            if (assigned := _ASSIGNMENT.fullmatch(part[0])) is not None:
                own[assigned[1]] = assigned[2]
            part = part[1:]
        if not part:
            variables.update(own)
        elif part[0] in ("printf", "echo") and ">" in part:
            files[part[-1]] = " ".join(word for word in part[1 : part.index(">")] if word != r"%s\n")
        else:
            end = next((place for place, word in enumerate(part) if word and set(word) <= _OPERATORS), None)
            found.append(Statement(part[:end], {**variables, **own}))
    return found


def _expanded(word: str, variables: dict[str, str]) -> str:
    """A word with the variables that are known in it."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return variables.get(name, found[2] if found[2] is not None else found[0])

    return _VARIABLE.sub(value, word)
