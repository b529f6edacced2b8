"""Save a measure document atomically, and load and check it. This module does not need torch."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import Any, NoReturn

from kvcalc.errors import RunError, UsageError
from kvcalc.model.files import read_text
from kvcalc.schema import SCHEMA_VERSION

# A record has a few kilobytes. The record of a long sweep has more.
_MOST_BYTES = 64 << 20

_PARTS = {"model": dict, "workload": dict, "device": dict, "roof": dict, "runs": list}


def check_target(path: str) -> None:
    """Raise RunError (exit 1) if no record can be written to `path`. Call this before a long run.

    It creates a file in the same folder and removes it, because writing is the most reliable check.
    """
    target = _target_of(path)
    if target is not None:
        handle, temporary = _open_beside(target, path)
        os.close(handle)
        os.unlink(temporary)


def save(document: dict[str, Any], path: str) -> None:
    """Write `document` to `path` as JSON, as `write_file` does."""
    write_file((json.dumps(document, indent=2, allow_nan=False) + "\n").encode(), path)


def write_file(data: bytes, path: str) -> None:
    """Write `data` to `path`. The file is replaced atomically.

    A temporary file in the same folder is written, flushed to disk and renamed. If `path` is a link, its target is
    replaced. If it is not a regular file, such as /dev/stdout, it is written directly. Raises RunError (exit 1) on
    errors such as a full disk or a missing permission.
    """
    target = _target_of(path)
    if target is None:
        try:
            with open(path, "wb", buffering=0) as file:
                _write_all(file.fileno(), data)
        except OSError as error:
            _fail(path, error)
        return
    handle, temporary = _open_beside(target, path)
    try:
        try:
            _write_all(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        os.replace(temporary, target)
    except OSError as error:
        _fail(path, error)
    finally:
        # Ctrl-C also ends up here. After the rename there is nothing to remove.
        with contextlib.suppress(OSError):
            os.unlink(temporary)


class Part:
    """The finished runs of a sweep, in `path` + ".part", in case the sweep is interrupted.

    If `path` is not a regular file, such as /dev/stdout, nothing is kept.
    """

    def __init__(self, path: str) -> None:
        self.path = None if _target_of(path) is None else f"{path}.part"
        self.is_kept = False

    def keep(self, document: dict[str, Any]) -> None:
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


def load(path: str) -> dict[str, Any]:
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
    if version not in (1, SCHEMA_VERSION):
        raise UsageError(f"{path}: schema_version is {version!r}, expected {SCHEMA_VERSION}")
    for number, run in enumerate(document["runs"]):
        if not isinstance(run, dict) or not isinstance(run.get("attention"), str):
            raise UsageError(f"{path}: runs.{number} is not a run of kvcalc measure")
    return document


def _target_of(path: str) -> str | None:
    """The regular file to replace, after following links. None if `path` is something else that can be written."""
    if not path:
        raise RunError("cannot save '': the file name is empty")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return os.path.realpath(path)
    except (OSError, ValueError) as error:
        _fail(path, error)
    if stat.S_ISDIR(mode):
        raise RunError(f"cannot save {path}: it is a folder, not a file")
    return os.path.realpath(path) if stat.S_ISREG(mode) else None


def _open_beside(target: str, path: str) -> tuple[int, str]:
    """Create an empty file in the folder of `target`, only for this process, with the mode from the umask."""
    if os.path.exists(target) and not os.access(target, os.W_OK):
        # A rename needs no write permission on the file itself, but a read-only file should not be replaced.
        raise RunError(f"cannot save {path}: Permission denied")
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:200]}.{os.getpid()}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), temporary
    except OSError as error:
        _fail(path, error)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _fail(path: str, error: OSError | ValueError) -> NoReturn:
    raise RunError(f"cannot save {path}: {getattr(error, 'strerror', None) or error}") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
