"""Presets: one YAML file per model, with facts under the published config.json's own key names.

The presets that ship with kvcalc are in presets/models. Users may have their own folders (`preset_folders`). A user's
preset overrides the shipped one with the same name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from kvcalc.errors import KvcalcError, ModelError, UsageError, nearest
from kvcalc.model.compiled_presets import compiled_mapping, same_text
from kvcalc.model.files import read_text
from kvcalc.model.preset_folders import shipped_files, shipped_folder, user_files
from kvcalc.records import NamedTuple

MAX_PRESET_BYTES = 256 * 1024
_REQUIRED = ("name", "source", "date", "config")
_ALLOWED = ("name", "family", "aliases", "source", "date", "note", "as_published", "unconfirmed", "tower", "config")


class Preset(NamedTuple):
    """A preset as its file states it. `date` is when the facts were published or read (ISO 8601). `path` is its file.

    `family` is the publisher's line of models (Llama, Qwen), or None if a user's file does not state it. `is_users` is
    true if the file did not ship with kvcalc. `as_published`: the config is a published file as it is, so its keys that
    kvcalc does not read are no mistakes. `unconfirmed`: no published file with these sizes was read, and each answer
    says so. `has_unknown_tower`: the model has a vision or audio tower (`tower: unknown`), and the config is that of
    the language model alone.
    """

    name: str
    family: str | None
    aliases: tuple[str, ...]
    source: str
    date: str
    note: str | None
    config: dict[str, object]
    path: str
    is_users: bool
    as_published: bool = False
    unconfirmed: bool = False
    has_unknown_tower: bool = False


class Problem(NamedTuple):
    """A user's preset file that cannot be used, and why."""

    path: str
    error: KvcalcError


class Presets(NamedTuple):
    """All presets by name, and the user's files that could not be used."""

    presets: list[Preset]
    problems: list[Problem]


def presets_folder() -> str:
    """The folder of the presets that ship with kvcalc."""
    return shipped_folder(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def shipped_table(name: str) -> dict[str, Any]:
    """The table in presets/types/NAME.yaml: rows by name."""
    return shipped_mapping(os.path.join(os.path.dirname(presets_folder()), "types", f"{name}.yaml"), "types", name)


def shipped_mapping(path: str, kind: str, name: str) -> dict[str, Any]:
    """The mapping in a shipped YAML file that is not a preset. The build's copy of it is compiled/KIND/NAME.json."""
    text = read_text(path, MAX_PRESET_BYTES)
    compiled: Any = same_text(_compiled(kind, f"{name}.json"), text)
    return _parsed(text, path) if compiled is None else dict(compiled)


def shipped_mappings(kind: str, files: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The mappings in several such files, of which `files` has the paths by name. Their copy is compiled/_KIND.json."""
    texts = {name: read_text(path, MAX_PRESET_BYTES) for name, path in files.items()}
    compiled: Any = same_text(_compiled(f"_{kind}.json"), texts)
    if compiled is not None:
        return dict(compiled)
    return {name: _parsed(text, files[name]) for name, text in texts.items()}


def _compiled(*names: str) -> str:
    return os.path.join(os.path.dirname(presets_folder()), "compiled", *names)


def _parsed(text: str, path: str) -> dict[str, Any]:
    from kvcalc.model.yaml_mapping import parse_mapping

    return dict(parse_mapping(text, path))  # type: ignore[arg-type]


def find_preset(name: str) -> Preset | None:
    """The preset whose name or alias is `name`, ignoring case, or None.

    Names come before aliases, and a user's presets before shipped ones. To find a name or a shipped alias, one file is
    read; for the aliases of users' presets, the text of every such file is searched. Raises the errors of
    `load_preset` if the file with that name is broken, and UsageError (exit 2) if two of the user's files claim the
    name.
    """
    wanted = name.casefold()
    users, folder = user_files(), presets_folder()
    paths = [path for stem, path in users if stem == wanted]
    if paths:
        return _only(name, [_load_own(path) for path in paths])
    path = os.path.join(folder, f"{wanted}.yaml")
    if os.path.basename(wanted) == wanted and os.path.isfile(path):
        return load_preset(path, is_users=False)
    return _only(name, _with_alias(wanted, [path for _, path in users])) or _shipped_alias(wanted, users)


def all_presets() -> list[Preset]:
    """Every preset that can be used, parsed and checked, sorted by name."""
    return list_presets().presets


def shipped_presets() -> list[Preset]:
    """The presets that ship with kvcalc, sorted by name, without the user's own."""
    return [_load_listed(path) for _, path in shipped_files(presets_folder())]


@cache
def shipped_aliases() -> Mapping[str, Alias]:
    """The names and aliases of the shipped presets, in lower case."""
    compiled = compiled_aliases(presets_folder())
    if compiled is not None:
        return compiled
    return {n.casefold(): Alias(n, preset.name) for preset in shipped_presets() for n in (preset.name, *preset.aliases)}


@cache
def published_aliases() -> Mapping[str, tuple[Alias, ...]]:
    """The shipped presets' names on the Hub, by the part after the organisation, in lower case."""
    by_name: dict[str, tuple[Alias, ...]] = {}
    for name, alias in shipped_aliases().items():
        if "/" in name:
            last = name.partition("/")[2]
            by_name[last] = (*by_name.get(last, ()), alias)
    return by_name


def list_presets() -> Presets:
    """Every preset, sorted by name, with the user's overrides, and the user's files that could not be used."""
    taken: dict[str, Preset] = {}
    by_name: dict[str, Preset] = {}
    problems: list[Problem] = []
    for _, path in user_files():
        try:
            preset = _load_own(path)
            other = next((taken[n] for n in names_of(preset) if n in taken), None)
            if other is not None:
                raise _clash(next(n for n in names_of(preset) if n in taken), other.path, path)
        except KvcalcError as error:
            problems.append(Problem(path, error))
            continue
        taken.update(dict.fromkeys(names_of(preset), preset))
        by_name[preset.name.casefold()] = preset
    for name, path in shipped_files(presets_folder()):
        if name not in by_name:
            by_name[name] = _load_listed(path)
    return Presets([by_name[name] for name in sorted(by_name)], problems)


def _load_listed(path: str) -> Preset:
    """The shipped preset in a file, which is read again only if it has changed: lists read all of them."""
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:  # `load_preset` says why
        changed = 0
    return _loaded(path, changed)


@lru_cache(maxsize=1024)
def _loaded(path: str, _changed: int) -> Preset:
    return load_preset(path, is_users=False)


def names_of(preset: Preset) -> list[str]:
    """The preset's name and aliases, in lower case."""
    return [name.casefold() for name in (preset.name, *preset.aliases)]


def load_preset(path: str, *, is_users: bool = True) -> Preset:
    """The preset in the file at `path`. Its form is checked here; its config is checked when it is read.

    Raises UsageError (exit 2) if the file is missing, unreadable, not YAML or not a mapping, and ModelError (exit 3)
    if a key is missing, misspelt or has a value of the wrong type. A shipped preset must name its family.
    """
    name = path if is_users else os.path.basename(path)
    text = read_text(path, MAX_PRESET_BYTES)
    mapping: dict[object, object] | None = None if is_users else compiled_mapping(path, text)
    if mapping is None:
        from kvcalc.model.yaml_mapping import parse_mapping

        mapping = parse_mapping(text, name)
    for key in mapping:
        if key not in _ALLOWED:
            raise ModelError(
                f"{name}: unknown key {key!r}", nearest(str(key), _ALLOWED) or f"keys: {', '.join(_ALLOWED)}"
            )
    for key in _REQUIRED if is_users else (*_REQUIRED, "family"):
        if mapping.get(key) is None:
            raise ModelError(f"{name}: {key} is missing", f"a preset has: {', '.join(_REQUIRED)}")
    if mapping.get("tower") not in (None, "unknown"):
        raise ModelError(f"{name}: tower must be unknown", "a tower of a known size is in the config")
    config = mapping["config"]
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise ModelError(f"{name}: config must be a mapping of config.json keys")
    aliases = mapping.get("aliases") or []
    if not isinstance(aliases, list):
        raise ModelError(f"{name}: aliases must be a list of names")
    preset = Preset(
        name=_text(mapping["name"], name, "name"),
        family=_optional_text(mapping.get("family"), name, "family"),
        aliases=tuple(_text(alias, name, "aliases") for alias in aliases),
        source=_text(mapping["source"], name, "source"),
        date=_date(mapping["date"], name),
        note=_optional_text(mapping.get("note"), name, "note"),
        config=config,
        path=path,
        is_users=is_users,
        as_published=mapping.get("as_published") is True,
        unconfirmed=mapping.get("unconfirmed") is True,
        has_unknown_tower=mapping.get("tower") is not None,
    )
    names = names_of(preset)
    if len(set(names)) < len(names):
        twice = next(known for known in names if names.count(known) > 1)
        raise ModelError(f"{name}: {twice!r} appears twice among its name and aliases")
    return preset


def check_name(preset: Preset) -> None:
    """Raise ModelError if a preset's name differs from its file name, because presets are found by file name."""
    stem = os.path.splitext(os.path.basename(preset.path))[0]
    if preset.name.casefold() != stem.casefold():
        raise ModelError(
            f"{preset.path}: the preset's name is {preset.name!r}, but the file's is {stem!r}",
            f"rename the file to {preset.name}.yaml",
        )


def _load_own(path: str) -> Preset:
    preset = load_preset(path)
    check_name(preset)
    return preset


def _only(name: str, found: list[Preset]) -> Preset | None:
    """The user's preset that claims `name`, or None. Raises UsageError (exit 2) if two do."""
    if len(found) > 1:
        raise _clash(name, found[0].path, found[1].path)
    return found[0] if found else None


def _clash(name: str, path: str, other: str) -> UsageError:
    return UsageError(f"{name!r} is the name of two presets: {path} and {other}", "rename one, or remove an alias")


def _with_alias(wanted: str, paths: list[str]) -> list[Preset]:
    """The user's presets with that alias. Broken files are skipped, because they may be unrelated to it."""
    presets = []
    for path in paths:
        try:
            if wanted in read_text(path, MAX_PRESET_BYTES).casefold():
                preset = _load_own(path)
                if wanted in names_of(preset):
                    presets.append(preset)
        except KvcalcError:
            continue
    return presets


def _shipped_alias(wanted: str, users: list[tuple[str, str]]) -> Preset | None:
    """The shipped preset with that alias, or the user's preset that overrides it."""
    alias = shipped_aliases().get(wanted)
    if alias is None:
        return None
    preset = load_preset(os.path.join(presets_folder(), f"{alias.preset}.yaml"), is_users=False)
    presets = [_load_own(path) for stem, path in users if stem == preset.name.casefold()]
    return _only(preset.name, presets) or preset


def _text(value: object, name: str, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ModelError(f"{name}: {key} must be text")
    return value


def _optional_text(value: object, name: str, key: str) -> str | None:
    return None if value is None else _text(value, name, key)


def _date(value: object, name: str) -> str:
    import datetime

    if type(value) is not datetime.date:  # a datetime is a date too, but has a time
        raise ModelError(f"{name}: date must be a date such as 2024-04-18")
    return value.isoformat()


# Every name and alias of the shipped presets, without reading their files.
# The build writes compiled/_names.json. It is used only if the files have the sizes that they had then; else the files
# are read. So the time to find a name does not grow with the number of presets.


class Alias(NamedTuple):
    """A name as its preset spells it, and the preset's name. A preset's own name is an alias here too."""

    name: str
    preset: str


def compiled_aliases(folder: str) -> dict[str, Alias] | None:
    """The aliases of the presets in the shipped `folder`, by their names in lower case.

    None if there is no list, or if it is not of these files.
    """
    try:
        with os.scandir(folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".yaml")}
        with open(os.path.join(os.path.dirname(folder), "compiled", "_names.json"), encoding="utf-8") as file:
            document = json.load(file)
        if document["sizes"] != sizes:
            return None
        return {name.casefold(): Alias(name, preset) for name, preset in document["names"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None  # no list, or a damaged one
