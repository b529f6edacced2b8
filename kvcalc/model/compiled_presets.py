"""Read a shipped preset without YAML, from the JSON copy made by the build (presets/compile.py)."""

from __future__ import annotations

import os


def compiled_mapping(path: str, text: str) -> dict[object, object] | None:
    """The mapping in the shipped YAML file at `path`, whose text is `text`. None if there is no JSON copy of this text.

    Importing PyYAML takes about 20 ms, a fifth of the start-up time.
    """
    import datetime
    import json

    folder, file = os.path.split(path)
    name = f"{os.path.splitext(file)[0]}.json"
    # Copies of models are in compiled/ itself. Copies of other presets are in a folder named after their kind.
    presets, kind = os.path.split(folder)
    compiled = os.path.join(presets, "compiled", *([] if kind == "models" else [kind]))
    try:
        with open(os.path.join(compiled, name), encoding="utf-8") as copy:
            found = json.load(copy)
        if found["text"] != text:
            return None
        mapping: dict[object, object] = found["mapping"]
        if kind != "types":  # rows of a table have no date
            mapping["date"] = datetime.date.fromisoformat(found["mapping"]["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no copy, or a damaged one: read the YAML file instead
    return mapping
