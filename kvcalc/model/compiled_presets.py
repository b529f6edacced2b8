"""A shipped preset without YAML: the JSON the build made of it (presets/compile.py)."""

from __future__ import annotations

import os


def compiled_mapping(path: str, text: str) -> dict[object, object] | None:
    """What the shipped YAML file at `path`, whose `text` is given, says; None where there is no copy made of that text.

    Importing PyYAML costs about 20 ms, a fifth of the tenth of a second a start may take.
    """
    import datetime
    import json

    folder, file = os.path.split(path)
    name = f"{os.path.splitext(file)[0]}.json"
    # Copies of models lie in compiled itself, those of other kinds in a folder of their kind's name.
    presets, kind = os.path.split(folder)
    compiled = os.path.join(presets, "compiled", *([] if kind == "models" else [kind]))
    try:
        with open(os.path.join(compiled, name), encoding="utf-8") as copy:
            found = json.load(copy)
        if found["text"] != text:
            return None
        mapping: dict[object, object] = found["mapping"]
        mapping["date"] = datetime.date.fromisoformat(found["mapping"]["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no copy, or a damaged one: the YAML file is what counts
    return mapping
