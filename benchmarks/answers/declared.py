"""What the kvcalc on the path declares: its models, devices, commands, and the options of its commands and engines."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from benchmarks.answers.asking import run

# An option in a help screen: perhaps a short name, the name, and perhaps a metavar.
_OPTION = re.compile(r"^  (?:-\w+, | {4})(--[\w-]+)(?: ([^ ]+))?(?=  |$)")
# The indent of a description's further lines, which is as wide as the longest name in any list of options.
_INDENT = " " * 18


class Option(NamedTuple):
    """An option as the help shows it. `metavar` is None for a flag, `text` is the description."""

    name: str
    metavar: str | None
    text: str = ""

    @property
    def default(self) -> str | None:
        """The default, if it is one number or word."""
        found = re.search(r"Default: (\S+)\.$", self.text)
        return found and found[1]


class Declared(NamedTuple):
    """All that questions are drawn from."""

    models: list[dict[str, Any]]
    engines: dict[str, list[Option]]
    commands: dict[str, frozenset[str]]


def read_declared() -> Declared:
    """Read everything from the command line's own output."""
    models = json.loads(run(["models", "--json"])[1])["models"]
    commands = re.findall(r"^  ([a-z]+)  +\S", run(["--help"])[1], re.MULTILINE)
    helps = {command: run([command, "--help"])[1] for command in commands}
    named = re.search(r"NAME is one of ([^;]+); all", helps["estimate"])
    if named is None:
        raise SystemExit("kvcalc estimate --help does not list the engines")
    names = ["logical", *" ".join(named[1].split()).split(", ")]
    common = set(options_of(helps["estimate"]))
    screens = {name: run(["estimate", "--engine", name, "--help"])[1] for name in names}
    engines = {name: [option for option in options_of(text) if option not in common] for name, text in screens.items()}
    options = {command: frozenset(option.name for option in options_of(text)) for command, text in helps.items()}
    return Declared(models, engines, options)


def options_of(text: str) -> list[Option]:
    """The options on a help screen, in order. A description is beside the option's name, or on the next lines."""
    found: list[Option] = []
    for line in text.splitlines():
        match = _OPTION.match(line)
        if match:
            found.append(Option(match[1].removeprefix("--"), match[2], line[match.end() :].strip()))
        elif found and line.startswith(_INDENT):
            found[-1] = found[-1]._replace(text=f"{found[-1].text} {line.strip()}".strip())
    return found
