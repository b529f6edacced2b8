"""Every name and alias of the shipped presets, without reading their files.

The build writes compiled/_names.json. It is used only if the files have the sizes that they had then; else the files
are read. So the time to find a name does not grow with the number of presets.
"""

from __future__ import annotations

import json
import os

from kvcalc.records import NamedTuple


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
            found = json.load(file)
        if found["sizes"] != sizes:
            return None
        return {name.casefold(): Alias(name, preset) for name, preset in found["names"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None  # no list, or a damaged one
