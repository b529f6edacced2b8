"""Save a measure document atomically, and load and check it. This module does not need torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from kvcalc.atomic_file import target_of, write_file
from kvcalc.errors import RunError, UsageError
from kvcalc.model.files import read_text
from kvcalc.schema import READABLE_VERSIONS, SCHEMA_VERSION

# A record has a few kilobytes. The record of a long sweep has more.
_MOST_BYTES = 64 << 20

Record = dict[str, Any]
"""A record as it was read. Its parts are checked where they are used."""

_PARTS = {"model": dict, "workload": dict, "device": dict, "roof": dict, "runs": list}


def save(document: Mapping[str, object], path: str) -> None:
    """Write `document` to `path` as JSON, as `write_file` does."""
    write_file((json.dumps(document, indent=2, allow_nan=False) + "\n").encode(), path)


class Part:
    """The finished runs of a sweep, in `path` + ".part", in case the sweep is interrupted.

    If `path` is not a regular file, such as /dev/stdout, nothing is kept.
    """

    def __init__(self, path: str) -> None:
        self.path = None if target_of(path) is None else f"{path}.part"
        self.is_kept = False

    def keep(self, document: Mapping[str, object]) -> None:
        """Write `document`. If that is not possible, the run goes on."""
        if self.path is not None:
            with contextlib.suppress(RunError):
                save(document, self.path)
                self.is_kept = True

    def remove(self) -> None:
        """Remove the file, if this run has written it."""
        if self.path is not None and self.is_kept:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def load(path: str) -> Record:
    """Load the record at `path`.

    Raises UsageError (exit 2) if it cannot be read, is not JSON, or is not a `kvcalc measure` document of this schema.
    """
    try:
        document = json.loads(read_text(path, _MOST_BYTES), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict) or any(not isinstance(document.get(k), t) for k, t in _PARTS.items()):
        raise UsageError(f"{path}: not a record of kvcalc measure", "write one with kvcalc measure MODEL --save FILE")
    version = document.get("schema_version")
    # A record of version 1 has the same figures; only its warnings are plain text.
    if version not in READABLE_VERSIONS:
        raise UsageError(f"{path}: schema_version is {version!r}, expected {SCHEMA_VERSION}")
    for number, run in enumerate(document["runs"]):
        if not isinstance(run, dict) or not isinstance(run.get("attention"), str):
            raise UsageError(f"{path}: runs.{number} is not a run of kvcalc measure")
    return document


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
