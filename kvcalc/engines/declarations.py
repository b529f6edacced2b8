"""What each engine declares in `engine.yaml` of its folder: its name, its class, and its options under its own names.

Reading it loads no engine. An engine is a folder with such a file.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from kvcalc.limits import BOUNDS, TOKENS
from kvcalc.model.presets import shipped_mapping, shipped_mappings, shipped_table
from kvcalc.records import NamedTuple

FILE = "engine.yaml"


class Option(NamedTuple):
    """One option of an engine.

    `metavar` is None for a flag. `default` describes what the engine does without the option. `divides_memory` is true
    if the option divides a device's memory, so that it needs a device. `since` is the first release with the option, if
    an older one that kvcalc knows lacks it. `most` is the largest count that it takes; `engine.yaml` says what it
    counts (`kvcalc/limits.py`). `untimed` is what takes time with the option and is not counted in the speed.
    """

    name: str
    metavar: str | None
    help: str
    default: str | None = None
    aliases: tuple[str, ...] = ()
    divides_memory: bool = False
    since: str = ""
    most: int = TOKENS
    untimed: str = ""

    @property
    def described(self) -> str:
        """The help and the default, as sentences."""
        return f"{self.help}." + (f" Default: {self.default}." if self.default else "")


ENGINES: dict[str, tuple[str, str]] = {}
"""Engine name -> its folder in this package, and its class there, in the order of lists."""

OPTIONS: dict[str, tuple[Option, ...]] = {}
"""Engine name -> its options."""

FACTS: dict[str, dict[str, Any]] = {}
"""Engine name -> what its class declares there and not in code: the values of attributes of `Engine`."""

LOGS: list[str] = []
"""The engines whose start-up logs are read: their folders have a module `log` with a `LogReader`, `LOG`."""

SERVERS: list[str] = []
"""The engines that kvcalc can start: their folders have a module `command` with a `StartCommand`, `COMMAND`."""

_HERE = os.path.dirname(__file__)
_NAMES = {"name", "class", "place", "has_log", "has_command", "facts", "options"}


def declare(folder: str, declared: dict[str, Any]) -> None:
    """Add an engine. Raises ValueError or TypeError for a declaration with an unknown key, or without its name."""
    if not declared.keys() <= _NAMES:
        raise ValueError(f"{folder}: an engine has no {' or '.join(sorted(declared.keys() - _NAMES))}")
    name = declared["name"]
    options = tuple(_option(option, row) for option, row in (declared.get("options") or {}).items())
    ENGINES[name], OPTIONS[name] = (folder, declared["class"]), options
    FACTS[name] = {fact: _frozen(value) for fact, value in (declared.get("facts") or {}).items()}
    if declared.get("has_log"):
        LOGS.append(name)
    if declared.get("has_command"):
        SERVERS.append(name)


@cache
def table(engine: str, name: str) -> dict[str, Any]:
    """The table in NAME.yaml of an engine's folder. It is read when it is needed, unlike the declarations."""
    return shipped_mapping(_file(engine, name), "engines", f"{ENGINES[engine][0]}.{name}")


def has_table(engine: str, name: str) -> bool:
    """Whether an engine's folder has NAME.yaml."""
    return os.path.exists(_file(engine, name))


def _file(engine: str, name: str) -> str:
    return os.path.join(_HERE, ENGINES[engine][0], f"{name}.yaml")


@cache
def types_of(engine: str, name: str) -> frozenset[str]:
    """The model types in the list NAME of `models.yaml` in an engine's folder."""
    return frozenset(table(engine, "models")[name].split())


def unread_types(engine: str) -> frozenset[str]:
    """The model types whose layout is not known in an engine that does not list its known types."""
    rows = shipped_table("unread")
    return frozenset(f"{rows['anywhere']} {rows[engine]}".split())


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _option(name: str, row: dict[str, Any]) -> Option:
    counted = row.get("most", "tokens")
    if counted not in BOUNDS:
        raise ValueError(f"{name}: kvcalc has no bound for {counted!r}, it has {', '.join(BOUNDS)}")
    given = {"metavar": None, **row, "aliases": tuple(row.get("aliases", ())), "most": BOUNDS[counted]}
    return Option(name, **given)


def _declare_all() -> None:
    files = {folder: os.path.join(_HERE, folder, FILE) for folder in os.listdir(_HERE)}
    declared = shipped_mappings("engines", {folder: path for folder, path in files.items() if os.path.exists(path)})
    for folder in sorted(declared, key=lambda folder: int(declared[folder]["place"])):
        declare(folder, declared[folder])


_declare_all()
