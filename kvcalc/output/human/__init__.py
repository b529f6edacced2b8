"""Documents for a person: one renderer per command, drawn with rich."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvcalc.output.human.console import make_console


def render(document: dict[str, Any], kind: str, color: bool) -> None:
    """Print `document` with the renderer of document `kind` (estimate, measure, models, models_show, ...)."""
    module = import_module(f"kvcalc.output.human.{kind}")
    module.render(document, make_console(color))
