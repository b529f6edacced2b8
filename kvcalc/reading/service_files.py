"""Commands in Dockerfiles, in units of systemd and in configurations of supervisord."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping

from kvcalc.reading.command import Command, unknown
from kvcalc.reading.containers import variables_of_file
from kvcalc.reading.manifests import interpolated
from kvcalc.reading.programs import installed
from kvcalc.records import NamedTuple

_INSTRUCTION = re.compile(r"\s*(FROM|ARG|ENV|ENTRYPOINT|CMD|RUN|COPY|WORKDIR|[A-Z]+)\s+(.*)", re.DOTALL | re.IGNORECASE)
_LONGEST = 1 << 16
# What may stand before the first stage of a Dockerfile.
_BEFORE = re.compile(r"\s*(?:#|ARG\s)", re.IGNORECASE)
_COPIED = re.compile(r"^COPY[ \t]+<<-?['\"]?(\w+)['\"]?[ \t]+(\S+)\n(.{0,8192}?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^\s*\[(Service|program:[^\]\n]{1,80})\]\s*$", re.MULTILINE)
_KEY = re.compile(r"\s*(\w+)\s*=\s*(.*)", re.DOTALL)
_PREFIXES = "-@+!:|"  # of ExecStart (systemd.service)
_PLACE = re.compile(r"\$\{(\w+)\}|(\$\$)")


def commands_in_files(text: str, files: Mapping[str, str]) -> list[Command]:
    """The commands of a Dockerfile or of the services in a text. Empty if it is none of them."""
    text = text.replace("\r\n", "\n")
    if len(text) > _LONGEST:
        return []
    first = next((row.split() for row in text.splitlines() if row.strip() and not _BEFORE.match(row)), [])
    if first[1:] and first[0].upper() == "FROM":
        return [_of_dockerfile(text, files)]
    parts = _SECTION.split(text)
    return [
        command for name, body in zip(parts[1::2], parts[2::2]) for command in _of_section(name, body, files)
    ]  # fmt: skip


def _lines(text: str) -> Iterator[str]:
    """The lines of a file, of which a backslash joins several. Comments may stand between them."""
    rows = [row for row in text.splitlines() if not row.lstrip().startswith("#")]
    return iter(re.sub(r"\\[ \t]*\n", " ", "\n".join(rows)).split("\n"))


class _Stage(NamedTuple):
    """An image that a Dockerfile builds. `entry` is None where it has the base image's own."""

    image: str
    command: list[str]
    environment: dict[str, str]
    packages: dict[str, str]
    entry: list[str] | None = None


def _of_dockerfile(text: str, files: Mapping[str, str]) -> Command:
    """The program of the last image that is built."""
    copied = {match[2]: match[3] for match in _COPIED.finditer(text)}
    stage, stages, variables = _Stage("", [], {}, {}), dict[str, _Stage](), dict[str, str]()
    for match in filter(None, map(_INSTRUCTION.match, _lines(_COPIED.sub("", text)))):
        kind, rest = match[1].upper(), match[2].strip()
        if kind == "FROM":
            names = [word for word in interpolated(rest, variables, unset="").split() if not word.startswith("--")]
            image = names[0] if names else ""
            stage = stages.get(image) or _Stage(image, [], {}, {})
            stages[names[-1] if names else ""] = stage
        elif kind in ("ENV", "ARG"):
            added = _assigned(interpolated(rest, {**variables, **stage.environment}, unset=""))
            variables |= added
            stage = stage if kind == "ARG" else stage._replace(environment={**stage.environment, **added})
        elif kind == "RUN":
            added = {name: release for name, release in installed(_split(rest)).items() if release}
            stage = stage._replace(packages={**stage.packages, **added})
        elif kind == "ENTRYPOINT":
            stage = stage._replace(entry=_form(rest), command=[])
        elif kind == "CMD":
            stage = stage._replace(command=_form(rest))
        stages |= dict.fromkeys([*stages][-1:], stage)
    # A shell that runs the text of ENTRYPOINT gets no words from CMD.
    entry = stage.entry or []
    words = entry if entry[:2] == ["/bin/sh", "-c"] else [*entry, *stage.command]
    return Command(
        words, stage.environment, {**files, **copied}, stage.image or None, stage.entry is not None,
        packages=stage.packages,
    )  # fmt: skip


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _assigned(text: str) -> dict[str, str]:
    """The variables of ENV or ARG: NAME=VALUE ..., or NAME VALUE."""
    words = _split(text)
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])} if words[1:] else {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def _form(text: str) -> list[str]:
    """The words of a list in JSON, or those of the shell that runs a text."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        words = None
    is_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return words if is_list else ["/bin/sh", "-c", text]


def _of_section(name: str, body: str, files: Mapping[str, str]) -> Iterator[Command]:
    """The commands of a unit of systemd, or of a program of supervisord."""
    is_unit, environment, unread, texts = name == "Service", dict[str, str](), list[str](), list[str]()
    body = re.split(r"^\s*\[", body, maxsplit=1, flags=re.MULTILINE)[0]
    body = body if is_unit else re.sub(r"\n[ \t]+", " ", body)  # supervisord continues indented lines
    for match in filter(None, map(_KEY.match, _lines(body))):
        key, text = match[1], match[2].strip()
        if key == "Environment":
            environment |= dict(word.split("=", 1) for word in _split(text) if "=" in word)
        elif key == "environment":
            reader = shlex.shlex(text, posix=True)
            reader.whitespace, reader.whitespace_split = ",", True
            environment |= dict(word.strip().split("=", 1) for word in _listed(reader) if "=" in word)
        elif key == "EnvironmentFile":
            environment |= variables_of_file(text.lstrip("-"), files, unread)
        elif key == ("ExecStart" if is_unit else "command"):
            texts.append(text.lstrip(_PREFIXES) if is_unit else text.replace("%%", "%"))
    for text in texts:
        parts = _split(text)
        words = [word for part in parts for word in _expanded(part, environment, unread)] if is_unit else parts
        yield Command(words, environment, files, None, unread=tuple(unread))


def _listed(reader: shlex.shlex) -> list[str]:
    try:
        return list(reader)
    except ValueError:
        return []


def _expanded(word: str, environment: Mapping[str, str], unread: list[str]) -> list[str]:
    """A word of systemd: ${NAME} is a part of a word, and $NAME alone is split (COMMAND LINES in systemd.service)."""

    def value(name: str) -> str:
        return environment.get(name, unknown(f"${name}") if unread else "")

    if re.fullmatch(r"\$\w+", word):
        return value(word[1:]).split()
    return [_PLACE.sub(lambda match: "$" if match[2] else value(match[1]), word)]
