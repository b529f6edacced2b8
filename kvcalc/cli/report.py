"""`--report FILE`: the answer as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from kvcalc.errors import UsageError


def check_report(given: Mapping[str, Any]) -> None:
    """Raise UsageError (exit 2) or RunError (exit 1) if no report can be written. Call this before a long run."""
    if given["report"] == "":
        raise UsageError("--report '': the file name is empty", "for example --report answer.html")
    if given["report"] is not None:
        from kvcalc.atomic_file import check_target

        check_target(given["report"])


def write_report(ctx: typer.Context, document: Mapping[str, Any], kind: str) -> None:
    """Write the report of `document` if --report is given. `kind` is the document's name in the schema.

    The file is replaced atomically. Raises RunError (exit 1) if it cannot be written.
    """
    path = ctx.params["report"]
    if path is None:
        return
    from kvcalc.atomic_file import write_file
    from kvcalc.output.report import make_report

    command = repeated(ctx.info_name or "", ctx.meta.get("kvcalc.arguments", ()))
    write_file(make_report(document, kind, command).encode(errors="backslashreplace"), path)


def repeated(name: str, arguments: Sequence[str]) -> str:
    """The command line that asks the same question, without --report."""
    words = list(arguments)
    kept = [
        word
        for place, word in enumerate(words)
        if word != "--report" and not word.startswith("--report=") and (place == 0 or words[place - 1] != "--report")
    ]
    from kvcalc.writing import shell  # only a report repeats the command

    return shell.join(["kvcalc", name, *kept])
