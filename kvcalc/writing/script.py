"""The statements of a shell script: enough of a shell to find the commands that start servers."""

from __future__ import annotations

import re

from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple
from kvcalc.writing.shell import without_comment, words_of

_OPERATORS = set(";&|()<>\n")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:(:?)-([^}]{0,1000}))?\}|(\w+))")
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
# The number of a redirected stream, as in `2>log`. In `-tp 4 > log`, the 4 is a word of the command.
_STREAM = re.compile(r"(?<=\s)\d(?=[<>])")
# A backslash that continues a line. A space after it was pasted with it.
_CONTINUED = re.compile(r"(?<!\\)(?:\\\\)*(\\[ \t]*)$")
# Bounds of a script for a server. The characters are those of its words and variables, after expansion.
_MOST_COMMANDS, _LONGEST, _LARGEST = 10_000, 1 << 16, 1 << 23
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
    UsageError (exit 2) if all of it has an unclosed quote, or if it is larger than a script for a server.
    """
    files: dict[str, str] = {}
    variables: dict[str, str] = {}
    statements: list[Statement] = []
    lines = text.splitlines()
    last = {line.strip(): place for place, line in enumerate(lines)}
    next_line, size, is_unclosed = 0, 0, False
    while next_line < len(lines):
        command, after = _command_at(lines, next_line)
        here = None if command is None else _HERE_DOCUMENT.search(command)
        if command is not None and here is not None and last.get(here[2], -1) >= after:
            end = after
            while lines[end].strip() != here[2]:
                end += 1
            target = re.search(r">\s*([^\s<>]+)", command.replace(here[0], ""))
            if target is not None:
                files[target[1]] = "\n".join(lines[after:end])
            next_line = end + 1
            continue
        words = None if command is None else words_of(_STREAM.sub("", command))
        if words is None:
            is_unclosed, next_line = True, next_line + 1
            continue
        next_line = after
        added, characters = _statements(words, variables, files)
        statements += added
        size += characters
        if len(statements) > _MOST_COMMANDS or size > _LARGEST:
            raise _too_large(f"a script has at most {_MOST_COMMANDS:,} commands and {_LARGEST:,} characters")
    if is_unclosed and not statements:
        raise UsageError("the command has an unclosed quote", "put the whole command in quotes")
    return Script(statements, files)


def _command_at(lines: list[str], begin: int) -> tuple[str | None, int]:
    """The command that begins in a line, and the number of the line after it. None if a quote in it has no end.

    A backslash or a quoted text may continue it over several lines.
    """
    parts, quote, size = list[str](), "", 0
    for place in range(begin, len(lines)):
        line, quote = without_comment(lines[place], quote)
        continued = _CONTINUED.search(line)
        size += len(line)
        if size > _LONGEST:
            if quote:
                break
            raise _too_large(f"a command has at most {_LONGEST:,} characters")
        if continued is None and not quote:
            return "".join([*parts, line]), place + 1
        parts.append(line + "\n" if continued is None else line[: continued.start(1)] + " ")
    return None if quote else "".join(parts), len(lines)


def _too_large(text: str) -> UsageError:
    return UsageError(f"the script is too large: {text}", "paste the command of the server alone")


def _statements(words: list[str], variables: dict[str, str], files: dict[str, str]) -> tuple[list[Statement], int]:
    """The statements of a line, and the number of characters in them. What it assigns goes into `variables`, and what
    it prints into `files`.
    """
    statements: list[Statement] = []
    parts: list[list[str]] = [[]]
    characters = 0
    for word in words:
        if word and set(word) <= _OPERATORS and not set(word) & set("<>"):
            parts.append([])
        else:
            parts[-1].append(word)
    for part in parts:
        own: dict[str, str] = {}
        part = [text for word in part for text in _expanded(word, variables)]
        characters += sum(map(len, part))
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
            statements.append(Statement(part[:end], {**variables, **own}))
            characters += sum(map(len, statements[-1].variables))
    return statements, characters


def _expanded(word: str, variables: dict[str, str]) -> list[str]:
    """A word with the variables that are known in it: the words of a variable that holds options."""
    size = len(word)

    def value(found: re.Match[str]) -> str:
        nonlocal size
        text = variables.get(found[1] or found[4], found[0] if found[3] is None else found[3])
        if found[2] and not text:  # ${NAME:-default}, not ${NAME-default}
            text = found[3]
        size += len(text)
        if size > _LONGEST:
            raise _too_large(f"a word has at most {_LONGEST:,} characters")
        return text

    text = _VARIABLE.sub(value, word)
    if text == word or _VARIABLE.fullmatch(word) is None:
        return [text]
    # Nothing says whether the word was quoted. A value without quotes vanishes if it is empty.
    words = text.split()
    return words if not words or words[0].startswith("-") else [text]
