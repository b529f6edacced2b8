"""Print a document to stdout, and its notes to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvcalc.errors import DoesNotFitError, LayoutError, UsageError, nearest
from kvcalc.notes import is_warning, sentence
from kvcalc.output.streams import discard_stdout
from kvcalc.records import NamedTuple
from kvcalc.writing.terminal import one_line

if TYPE_CHECKING:
    import kvcalc.documents as documents

FORMATS = ("human", "tsv", "csv", "json")

# Notes that repeat what the human output shows: the verdict with its figures, and a context without a limit.
_ON_SCREEN = (("fit", "does-not-fit"), ("fit", "no-limit"))


class Output(NamedTuple):
    """How to print a document: a format, or the path of one bare value."""

    format: str
    path: str | None
    color: bool

    def emit(self, document: Mapping[str, Any], kind: str, **shown: Any) -> None:
        """Print `document`. `kind` names the command's human renderer in kvcalc.output.human, which takes `shown`.

        Notes go to stderr with the human format and with tables, which do not include them. If the reader of stdout has
        closed it (`| head`), this returns as usual, so that the command can still exit with its verdict.
        """
        try:
            self._print(document, kind, shown)
        except BrokenPipeError:
            discard_stdout()

    def _print(self, document: Mapping[str, Any], kind: str, shown: Mapping[str, Any]) -> None:
        warnings = document.get("warnings", ())
        if self.path is not None:
            from kvcalc.output.paths import look_up
            from kvcalc.writing.cells import bare

            text = bare(look_up(document, self.path, kind)) + "\n"
        elif self.format == "json":
            import json

            text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        elif self.format in ("tsv", "csv"):
            from kvcalc.output.rows import is_table, tabulate

            text = tabulate(document, self.format)
            if is_table(document):
                warn(warnings)
        else:
            from kvcalc.output.human import render
            from kvcalc.writing.terminal import printable_document

            render(printable_document(document), kind, self.color, **shown)
            sys.stdout.flush()
            warn(warning for warning in warnings if (warning["part"], warning["code"]) not in _ON_SCREEN)
            return
        sys.stdout.write(text)
        sys.stdout.flush()

    def emit_refusal(self, document: Mapping[str, Any], kind: str) -> None:
        """Print the document of a refusal for a script. People read the error that follows.

        The path of a field that only answers have is null.
        """
        if self.path is None and self.format == "human":
            return
        try:
            self.emit(document, kind)
        except UsageError:
            sys.stdout.write("null\n")

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Print the document of an error about a server that its engine refuses to start, and raise the error again."""
        try:
            yield
        except (DoesNotFitError, LayoutError) as error:
            if error.document is not None:
                self.emit_refusal(error.document, "server_refusal")
            raise

    def emit_text(self, text: str, warnings: Iterable[documents.Warning]) -> None:
        """Print a file, and `warnings` to stderr."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            discard_stdout()
        warn(warnings)

    def check_path(self, kind: str) -> None:
        """Raise UsageError if no document of `kind` has the --get path. Call this before a long run."""
        if self.path is not None:
            from kvcalc.output.paths import check_against_schema
            from kvcalc.schema import load_schema

            check_against_schema(load_schema(), kind, self.path)


def choose(
    format: str | None, json: bool, path: str | None, no_color: bool, formats: tuple[str, ...] = FORMATS, *,
    is_list: bool = False,
) -> Output:  # fmt: skip
    """The output that the options select, else the environment variable KVCALC_FORMAT.

    The default is human, but for lists (`is_list`) tsv if stdout is not a terminal. `formats` are the formats of the
    command. Raises UsageError for any other format and for contradictory options.
    """
    if json and format not in (None, "json"):
        raise UsageError(f"--json and --format {format} contradict each other")
    if path is not None and (json or format is not None):
        raise UsageError("--get prints one bare value and cannot be combined with --json or --format")
    named, source = format, "--format "
    if format is None:
        named, source = os.environ.get("KVCALC_FORMAT") or None, "KVCALC_FORMAT="
    if json:
        named = "json"
    elif named is not None and path is None and named not in formats:
        raise UsageError(f"{source}{named!r}: not a format", nearest(named, formats) or f"one of {', '.join(formats)}")
    chosen = named or ("tsv" if is_list and not sys.stdout.isatty() else "human")
    return Output(chosen, path, color=not no_color)


def warn(warnings: Iterable[documents.Warning]) -> None:
    """Print a document's warnings and notes to stderr, one per line, wrapped if stderr is a terminal."""
    for warning in warnings:
        from kvcalc.output.wrapping import tell

        tell(f"{'warning' if is_warning(warning) else 'note'}: {one_line(sentence(warning))}")
