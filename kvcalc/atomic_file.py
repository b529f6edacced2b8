"""Write a file so that a reader finds the old one or the new one: every file that kvcalc writes is written here."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import NoReturn

from kvcalc.errors import RunError


def check_target(path: str) -> None:
    """Raise RunError (exit 1) if no file can be written to `path`. Call this before a long run.

    It creates a file in the same folder and removes it, because writing is the most reliable check.
    """
    target = target_of(path)
    if target is not None:
        handle, temporary = _open_beside(target, path)
        os.close(handle)
        os.unlink(temporary)


def write_file(data: bytes, path: str) -> None:
    """Write `data` to `path`. The file is replaced atomically (`replace`).

    If `path` is a link, its target is replaced. If it is not a regular file, such as /dev/stdout, it is written
    directly. Raises RunError (exit 1) on errors such as a full disk or a missing permission.
    """
    target = target_of(path)
    try:
        if target is None:
            with open(path, "wb", buffering=0) as file:
                _write_all(file.fileno(), data)
        else:
            replace(target, data, path)
    except OSError as error:
        _fail(path, error)


def replace(target: str, data: bytes, path: str | None = None) -> None:
    """Replace the file at `target`, which keeps its mode. Raises OSError, and RunError (exit 1) with the name `path`.

    A temporary file in the same folder is written, flushed to disk and renamed.
    """
    handle, temporary = _open_beside(target, path or target)
    try:
        try:
            _write_all(handle, data)
        finally:
            os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        move(temporary, target)
    finally:
        # Ctrl-C also ends up here. After the rename there is nothing to remove.
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def move(temporary: str, target: str) -> None:
    """Put the file at `temporary` in the place of `target`, in the same file system. Raises OSError.

    The data must be on the disk before the name is: after a power cut, the file may be shorter otherwise.
    """
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, target)


def target_of(path: str) -> str | None:
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
