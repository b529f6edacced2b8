"""Documents for a person: one renderer per command, drawn with rich."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvcalc.output.human.console import make_console


def render(document: dict[str, Any], kind: str, color: bool) -> None:
    """Print `document` with the renderer of command `kind` (estimate, measure, models, models_show, models_check)."""
    module = import_module(f"kvcalc.output.human.{kind}")
    module.render(document, make_console(color))
