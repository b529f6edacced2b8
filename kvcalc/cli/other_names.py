"""Other tools' names of options, so that the error for an unknown option says the option to type."""

from __future__ import annotations

import os
from collections.abc import Collection

from kvcalc.errors import nearest
from kvcalc.model.presets import shipped_mapping
from kvcalc.question import __file__ as folder


def choices() -> dict[str, list[str]]:
    """What to type, the first choice first, by the names of others."""
    rows = shipped_mapping(os.path.join(os.path.dirname(folder), "other_names.yaml"), "question", "other_names")
    return {name: listed.split(" | ") for listed, names in rows.items() for name in names.split()}


def hint_for(unknown: str, known: Collection[str]) -> str | None:
    """What to type instead of the option `unknown`. `known` are the options of the command. None for no idea."""
    for choice in choices().get(unknown.lstrip("-").casefold().replace("_", "-"), ()):
        option = choice.split()[0]
        if option in known or not option.startswith("-"):
            return f"use {choice}"
    return nearest(unknown, sorted(option for option in known if option.startswith("--")))
