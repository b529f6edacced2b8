"""The tables of model types in presets/types, besides that of plain decoders (`families.decoder_table`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

from kvcalc.model.presets import shipped_table

_FAMILIES: dict[str, dict[str, str]] = shipped_table("families")

REFUSED = _FAMILIES.pop("_refused")
"""Types of Transformers that generate, but have no cache that can be counted: why."""

STATED = _FAMILIES.pop("_stated")
"""model_type -> published keys that an engine, or the converter of its files, reads by its own rules."""

COMMON_KEYS = frozenset(_FAMILIES.pop("_common")["keys"].split())
"""Keys that every family accepts."""

FAMILIES = {name: family for family, row in _FAMILIES.items() for name in row.get("types", "").split()}
"""model_type -> family."""

REMOTE_FAMILIES = {name: family for family, row in _FAMILIES.items() for name in row.get("remote", "").split()}
"""The same for types that are published with their own code and have no class in Transformers."""


def keys_of(family: str) -> frozenset[str]:
    """The keys that a family reads and that may change the cache."""
    return frozenset(_FAMILIES[family].get("keys", "").split())


def ignored_by_transformers(family: str) -> list[str]:
    """The config keys of a family that its class in Transformers ignores."""
    return _FAMILIES.get(family, {}).get("ignored", "").split()


def module_of(family: str) -> ModuleType:
    """The module that reads a family. Modules are imported on demand, so a start imports only one."""
    name = family if family == "decoder" else _FAMILIES[family].get("module", "layered")
    return import_module(f"kvcalc.model.families.{name}")


def reader_of(family: str) -> Callable[..., Any]:
    """The function that reads a config of a family."""
    module = module_of(family)
    read: Callable[..., Any] = getattr(module, f"read_{family}", None) or module.read
    return read


@cache
def rows_of(table: str) -> dict[str, Any]:
    """The rows of presets/types/TABLE.yaml."""
    return shipped_table(table)


@cache
def row_of(table: str, name: str) -> dict[str, Any]:
    """A row of a table, as `joined` makes it. Empty if there is no such row."""
    rows = rows_of(table)
    return joined(rows, name) if name in rows else {}


def joined(rows: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A row with what it adds to the rows that it is `like`, part by part. KeyError if there is none."""
    found: dict[str, Any] = {}
    for row in (*(joined(rows, other) for other in rows[name].get("like", "").split()), rows[name]):
        for part, value in row.items():
            found[part] = {**(found.get(part) or {}), **value} if isinstance(value, dict) else value
    found.pop("like", None)
    return found


def defaults_of(model_type: str) -> dict[str, object]:
    """What the class of a model type takes for keys that a config leaves out."""
    return row_of("defaults", model_type)


def made(folder: str, name: str, arguments: Mapping[str, Any] | None) -> Any:
    """The function `module.function` of a folder of kvcalc.model that a table names, with `arguments` if it has some.

    Its module is imported now.
    """
    module, _, function = name.partition(".")
    function_of = getattr(import_module(f"kvcalc.model.{folder}.{module}"), function)
    return partial(function_of, **arguments) if arguments else function_of
