"""Read a shipped preset without YAML, from the JSON copy made by the build (presets/compile.py)."""

from __future__ import annotations

import os


def same_text(path: str, text: object) -> dict[object, object] | None:
    """The mapping in the JSON copy at `path`. None if there is no copy, or if it was made from other texts."""
    import json

    try:
        with open(path, encoding="utf-8") as copy:
            document = json.load(copy)
        mapping: dict[object, object] = document["mapping"]
        return mapping if document["text"] == text and isinstance(mapping, dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no copy, or a damaged one: read the YAML file instead


def compiled_mapping(path: str, text: str) -> dict[object, object] | None:
    """The mapping in the shipped YAML file at `path`, whose text is `text`. None if there is no JSON copy of this text.

    Importing PyYAML takes about 20 ms, a fifth of the start-up time.
    """
    import datetime

    folder, file = os.path.split(path)
    name = f"{os.path.splitext(file)[0]}.json"
    # Copies of models are in compiled/ itself. Copies of other presets are in a folder named after their kind.
    presets, kind = os.path.split(folder)
    compiled = os.path.join(presets, "compiled", *([] if kind == "models" else [kind]))
    mapping = same_text(os.path.join(compiled, name), text)
    if mapping is not None:
        try:
            mapping["date"] = datetime.date.fromisoformat(str(mapping["date"]))
        except (ValueError, KeyError):
            return None
    return mapping
