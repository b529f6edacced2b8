"""Every name and alias of the shipped presets, without reading their files.

The build writes compiled/_names.json. It is used only if the files have the sizes that they had then; else the files are
read. So the time to find a name does not grow with the number of presets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache

from kvcalc.model.preset_folders import shipped_files
from kvcalc.records import NamedTuple


class Alias(NamedTuple):
    """A name as its preset spells it, and the preset's name. A preset's own name is an alias here too."""

    name: str
    preset: str


@cache
def aliases(folder: str) -> Mapping[str, Alias]:
    """The aliases of the presets in the shipped `folder`, by their names in lower case."""
    with os.scandir(folder) as entries:
        sizes = {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".yaml")}
    try:
        with open(os.path.join(os.path.dirname(folder), "compiled", "_names.json"), encoding="utf-8") as file:
            found = json.load(file)
        if found["sizes"] == sizes:
            return {name.casefold(): Alias(name, preset) for name, preset in found["names"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        pass  # no list, or a damaged one
    from kvcalc.model.presets import load_preset

    loaded = [load_preset(path, is_users=False) for _, path in shipped_files(folder)]
    return {n.casefold(): Alias(n, preset.name) for preset in loaded for n in (preset.name, *preset.aliases)}


@cache
def published(folder: str) -> Mapping[str, tuple[Alias, ...]]:
    """The aliases that have an organisation, by their names without it, in lower case."""
    found: dict[str, tuple[Alias, ...]] = {}
    for name, alias in aliases(folder).items():
        if "/" in name:
            last = name.partition("/")[2]
            found[last] = (*found.get(last, ()), alias)
    return found
