"""The tables of the commands: their options, and which of these are essential. There is one for each in `commands`."""

from __future__ import annotations

import os
from typing import Any

from kvcalc.model.presets import shipped_mapping


def table_of(command: str) -> dict[str, Any]:
    """The table of a command. Empty if its options are declared where it is."""
    path = os.path.join(os.path.dirname(__file__), "commands", f"{command}.yaml")
    return shipped_mapping(path, "commands", command) if os.path.exists(path) else {}


def essential(command: str) -> str | None:
    """The options that -h shows. None for a command that shows all of its options."""
    found: str | None = table_of(command).get("essential")
    return found
