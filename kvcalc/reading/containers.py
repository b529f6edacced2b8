"""`docker run`: its options, the image, and the words for the image's program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvcalc.errors import UsageError
from kvcalc.model.files import read_text
from kvcalc.reading.command import Command
from kvcalc.reading.programs import file_text

# The options of `docker run` that take no value (docker run --help, podman run --help).
_FLAGS, _LETTERS = {
    "--detach", "--init", "--interactive", "--no-healthcheck", "--oom-kill-disable", "--privileged", "--publish-all",
    "--quiet", "--read-only", "--rm", "--sig-proxy", "--tty", "--replace", "--no-hosts", "--rmi", "--tls-verify",
    "--use-api-socket",
}, "ditPq"  # fmt: skip
_LARGEST_FILE = 1 << 20
_VARIABLE = re.compile(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=(.*)")


def in_container(command: Command, program: str) -> Command:
    """The command that `docker run` starts in a container, from the words after `run`. `exec` starts it in another one.

    Raises UsageError (exit 2) for an option without its value, or without an image.
    """
    words = list(command.words)
    variables, unread, entry, devices = dict[str, str](), list[str](), None, None
    for option, value in _options(words, program):
        if option in ("-e", "--env"):
            name, equals, text = value.partition("=")
            if equals or name in command.environment:
                variables[name] = text if equals else command.environment[name]
        elif option == "--env-file":
            variables = {**variables_of_file(value, command.files, unread), **variables}
        elif option == "--entrypoint":
            entry = [value] if value else []  # an empty one starts the words
        elif option == "--gpus":
            _, named, numbers = value.strip("\"'").partition("device=")
            devices = numbers if named else value.strip("\"'")
            devices = str(len(devices.split(","))) if named else devices
    if not words:
        raise UsageError(f"docker {program}: the command names no image")
    image, *rest = words
    number = int(devices) if devices is not None and devices.isdecimal() and len(devices) < 7 else None
    return command._replace(
        words=[*(entry or ()), *rest], environment=variables, image=image if program == "run" else None,
        is_program=entry is not None or program == "exec", num_devices=number, unread=tuple(unread), is_closed=False,
    )  # fmt: skip


def _options(words: list[str], program: str) -> list[tuple[str, str]]:
    """The options before the image, which are removed from the words: -tid, -p8000:8000, -e A=B, --name=x."""
    options: list[tuple[str, str]] = []
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            if option in _FLAGS:
                continue
        else:
            letters = word[1:].lstrip(_LETTERS)
            if not letters:
                continue
            option, value = f"-{letters[0]}", letters[1:].removeprefix("=")
            equals = "=" if value or letters[1:] else ""
        if not equals:
            if not words:
                raise UsageError(f"docker {program}: {option} has no value")
            value = words.pop(0)
        options.append((option, value))
    return options


def variables_of_file(path: str, files: Mapping[str, str], unread: list[str]) -> dict[str, str]:
    """The variables in a file of lines NAME=VALUE. A file that is not here is added to `unread`."""
    text = file_text(path, files)
    if text is None:
        try:
            text = read_text(path, _LARGEST_FILE)
        except UsageError:
            unread.append(f"variables of {path}")
            return {}
    matches = (_VARIABLE.match(line) for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {match[1]: match[2].strip() for match in matches if match is not None}


def variables_of(rows: object) -> dict[str, str]:
    """Variables as a mapping or as a list of NAME=VALUE. Those without a value come from an unknown environment."""
    if isinstance(rows, Mapping):
        return {str(name): written(value) for name, value in rows.items() if value is not None}
    texts: Sequence[object] = rows if isinstance(rows, list) else []
    return dict(row.split("=", 1) for row in texts if isinstance(row, str) and "=" in row)


def written(value: object) -> str:
    """A value of YAML as a word: true and not True, and JSON for lists and mappings."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, (dict, list)):
        import json

        return json.dumps(value, default=str)
    return str(value)
