"""The one place where an answer becomes text on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvcalc.errors import UsageError, nearest

FORMATS = ("human", "tsv", "csv", "json")


class Output(NamedTuple):
    """How an answer is wanted: a format, or the path of one bare value."""

    format: str
    path: str | None
    color: bool


def choose(
    format: str | None, json: bool, path: str | None, no_color: bool, formats: tuple[str, ...] = FORMATS
) -> Output:
    """The output the options ask for, of those a command has: human on a terminal, tsv elsewhere. UsageError where they
    contradict."""
    if json and format not in (None, "json"):
        raise UsageError(f"--json and --format {format} contradict each other")
    if path is not None and (json or format is not None):
        raise UsageError("--get prints one bare value; leave --json and --format out")
    if format is not None and format not in formats:
        raise UsageError(
            f"--format {format!r}: not a format", nearest(format, formats) or f"one of {', '.join(formats)}"
        )
    chosen = "json" if json else format or ("human" if sys.stdout.isatty() else "tsv")
    return Output(chosen, path, color=not no_color)


def emit(document: dict[str, Any], output: Output, kind: str) -> None:
    """Print `document` as `output` says. `kind` names the command's human renderer in kvcalc.output.human.

    Warnings go to stderr where the format does not carry them (human, --get, and tables).
    """
    if output.path is not None:
        from kvcalc.output.paths import bare, look_up

        text = bare(look_up(document, output.path)) + "\n"
        _warn(document)
    elif output.format == "json":
        import json

        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    elif output.format in ("tsv", "csv"):
        from kvcalc.output.tabular import is_table, tabulate

        text = tabulate(document, output.format)
        if is_table(document):
            _warn(document)
    else:
        from kvcalc.output.human import render

        render(document, kind, output.color)
        sys.stdout.flush()
        _warn(document)
        return
    sys.stdout.write(text)
    sys.stdout.flush()


def check_path(output: Output, kind: str) -> None:
    """Refuse a --get path which no document of `kind` has, before a long run is spent on it."""
    if output.path is not None:
        from kvcalc.output.paths import check_against_schema
        from kvcalc.schema import load_schema

        check_against_schema(load_schema(), kind, output.path)


def _warn(document: dict[str, Any]) -> None:
    warn(document.get("warnings", ()))


def warn(warnings: Iterable[str]) -> None:
    """Print warnings, one a line, to stderr."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
