"""Prints documents as human-readable text: one renderer per command."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvcalc.output.human.console import make_console

# Document kinds whose renderer is in another command's module: kind -> (module, function).
_BESIDE = {
    "models_show": ("models", "render_show"),
    "models_fit": ("models", "render_fit"),
    "models_check": ("models", "render_check"),
    "gpus_show": ("gpus", "render_show"),
    "measure_compare": ("measure", "render_compare"),
    "measure_profile": ("measure", "render_profile"),
    "engines": ("compare", "render_engines"),
    "check": ("fit", "render_check"),
}


def render(document: dict[str, Any], kind: str, color: bool, **shown: bool) -> None:
    """Print `document` with the renderer of its `kind` (estimate, measure, models, models_show, ...)."""
    module, function = _BESIDE.get(kind, (kind, "render"))
    getattr(import_module(f"kvcalc.output.human.{module}"), function)(document, make_console(color), **shown)
