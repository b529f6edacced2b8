"""Presets: one YAML file per model under presets/models, holding facts in the published config.json's own key names."""

from __future__ import annotations

import os
from typing import NamedTuple

from kvcalc.errors import ModelError, UsageError, nearest
from kvcalc.model.files import read_text

MAX_PRESET_BYTES = 256 * 1024
_MAX_DEPTH = 32
_REQUIRED = ("name", "source", "date", "config")
_ALLOWED = (*_REQUIRED, "aliases", "note")


class Preset(NamedTuple):
    """A preset as its file states it. `date` is when the facts were published or read, ISO 8601; `path` its file."""

    name: str
    aliases: tuple[str, ...]
    source: str
    date: str
    note: str | None
    config: dict[str, object]
    path: str


def presets_folder() -> str:
    """The folder of presets/models: inside the package in a wheel, beside it in a checkout or an editable install."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    inside = os.path.join(package, "presets", "models")
    return inside if os.path.isdir(inside) else os.path.join(os.path.dirname(package), "presets", "models")


def preset_names() -> list[str]:
    """The names of all presets, sorted. Reads the folder, not the files. RunError where an install has lost them."""
    try:
        entries = os.listdir(presets_folder())
    except OSError:
        entries = []
    return sorted(entry[: -len(".yaml")] for entry in entries if entry.endswith(".yaml"))


def find_preset(name: str) -> Preset | None:
    """The preset called `name`, by its own name or an alias, letter case aside; None where there is none.

    A name costs one file. An alias costs a text search of each file, and YAML is parsed only where it occurs.
    """
    folder = presets_folder()
    wanted = name.casefold()
    names = preset_names()
    if wanted in names:
        return load_preset(os.path.join(folder, f"{wanted}.yaml"))
    for other in names:
        path = os.path.join(folder, f"{other}.yaml")
        if wanted in read_text(path, MAX_PRESET_BYTES).casefold():
            preset = load_preset(path)
            if wanted in (alias.casefold() for alias in preset.aliases):
                return preset
    return None


def unknown_preset(name: str) -> ModelError:
    """The error for a model nobody knows, with the nearest names."""
    known: set[str] = set()
    for preset in map(load_preset, map(_path_of, preset_names())):
        known.update((preset.name, *preset.aliases))
    hint = nearest(name, known) or "list them: kvcalc models; or give the path of a config.json"
    return ModelError(f"model {name!r} is not known", hint)


def all_presets() -> list[Preset]:
    """Every preset, parsed and checked, by name."""
    return [load_preset(_path_of(name)) for name in preset_names()]


def load_preset(path: str) -> Preset:
    """The preset in the file at `path`, its form checked; its config is checked by the reader it goes through.

    Raises UsageError (exit 2) where the file is missing, unreadable, no YAML or no mapping, and ModelError (exit 3)
    where a key is missing, misspelt or of the wrong kind.
    """
    name = os.path.basename(path)
    mapping = _parse(read_text(path, MAX_PRESET_BYTES), name)
    for key in mapping:
        if key not in _ALLOWED:
            raise ModelError(
                f"{name}: {key!r} is not a preset's key", nearest(str(key), _ALLOWED) or f"keys: {', '.join(_ALLOWED)}"
            )
    for key in _REQUIRED:
        if mapping.get(key) is None:
            raise ModelError(f"{name}: {key} is missing", f"a preset has: {', '.join(_REQUIRED)}")
    config = mapping["config"]
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise ModelError(f"{name}: config must be a mapping of config.json keys")
    aliases = mapping.get("aliases") or []
    if not isinstance(aliases, list):
        raise ModelError(f"{name}: aliases must be a list of names")
    return Preset(
        name=_text(mapping["name"], name, "name"),
        aliases=tuple(_text(alias, name, "aliases") for alias in aliases),
        source=_text(mapping["source"], name, "source"),
        date=_date(mapping["date"], name),
        note=None if mapping.get("note") is None else _text(mapping["note"], name, "note"),
        config=config,
        path=path,
    )


def _path_of(name: str) -> str:
    return os.path.join(presets_folder(), f"{name}.yaml")


def _text(value: object, name: str, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ModelError(f"{name}: {key} must be text")
    return value


def _date(value: object, name: str) -> str:
    import datetime

    if not isinstance(value, datetime.date):
        raise ModelError(f"{name}: date must be a date such as 2024-04-18")
    return value.isoformat()


def _parse(text: str, name: str) -> dict[object, object]:
    """YAML text to a mapping, plain data only.

    The events are checked before anything is built: PyYAML follows nesting with C recursion and can be crashed by
    depth, shares what an alias names (which bombs rely on), and keeps the last of duplicate keys in silence.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(text, Loader=loader), yaml, name)
        data = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader: plain data, no objects
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{name}: not YAML{where}: {getattr(error, 'problem', None) or 'unreadable'}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{name}: not a mapping of keys to values")
    return data


def _check_events(events: object, yaml: object, name: str) -> None:
    """Refuse anchors, aliases, tags, duplicate keys and deep nesting."""
    levels: list[_Level] = []
    for event in events:  # type: ignore[attr-defined]  # yaml.parse is untyped
        kind = type(event).__name__
        if kind == "AliasEvent" or getattr(event, "anchor", None) is not None:
            raise UsageError(f"{name}: anchors and aliases (&, *) are not allowed", "write the value out")
        if getattr(event, "tag", None) is not None:
            raise UsageError(f"{name}: tags (!) are not allowed", "write plain values")
        if kind in ("MappingEndEvent", "SequenceEndEvent"):
            levels.pop()
        elif kind in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent"):
            if levels and levels[-1].next_is_key():
                key = getattr(event, "value", None)
                if key in levels[-1].keys:
                    line = event.start_mark.line + 1
                    raise ModelError(f"{name}: key {key!r} stands twice, the second time on line {line}")
                levels[-1].keys.add(key)
            if kind != "ScalarEvent":
                levels.append(_Level(is_mapping=kind == "MappingStartEvent"))
                if len(levels) > _MAX_DEPTH:
                    raise UsageError(f"{name}: nested more than {_MAX_DEPTH} levels deep")


class _Level:
    """An open mapping or sequence while events are checked: the keys so far, and whether a key comes next."""

    def __init__(self, is_mapping: bool) -> None:
        self.is_mapping = is_mapping
        self.keys: set[object] = set()
        self.at_key = False

    def next_is_key(self) -> bool:
        """Step over one node; whether that node is a mapping's key."""
        self.at_key = self.is_mapping and not self.at_key
        return self.at_key
