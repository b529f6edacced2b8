"""Open files, read small text files and list folders, with a one-line error if that fails."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from kvcalc.errors import UsageError

_SHOWN_FILES = 5
_CHUNK_BYTES = 1024 * 1024


@contextmanager
def opened(path: str, *, hint: str | None = None) -> Iterator[tuple[BinaryIO, int]]:
    """The regular file at `path`, opened for reading without a buffer, and its size in bytes.

    Raises UsageError (exit 2) if it is missing, unreadable or not a regular file, because reading a FIFO or a device
    may never end.
    """
    # Check the open handle, so that the checked file is the file that is read. Without O_NONBLOCK, opening a FIFO would
    # wait for a writer.
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, os.O_RDONLY | flags)
        try:
            status = os.fstat(handle)
            if stat.S_ISDIR(status.st_mode):
                raise UsageError(f"{path}: is a folder, not a file")
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{path}: not a regular file", hint)
            with os.fdopen(os.dup(handle), "rb", buffering=0) as file:
                yield file, status.st_size
        finally:
            os.close(handle)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or 'cannot be read'}") from None
    except ValueError:  # a NUL byte in the path
        raise not_a_path(path) from None


def not_a_path(path: str) -> UsageError:
    """The error for text that no system takes as a path, such as one with a NUL byte."""
    return UsageError(f"{path!r}: not a path")


def check_path(path: str) -> None:
    """Raise UsageError (exit 2) for text that cannot be a path: with a NUL byte, or that cannot be encoded."""
    try:
        is_path = b"\0" not in os.fsencode(path)
    except ValueError:
        is_path = False
    if not is_path:
        raise not_a_path(path)


def expanded(path: str) -> str:
    """`path` with the home folder for `~`. Raises UsageError (exit 2) for text that cannot be a path."""
    try:
        return os.path.expanduser(path)
    except ValueError:  # a NUL byte, or a character that cannot be encoded
        raise not_a_path(path) from None


def read_text(path: str, most_bytes: int) -> str:
    """The UTF-8 text of the file at `path`, of at most `most_bytes` bytes. The size is checked before reading.

    Raises UsageError (exit 2) if it is too large or not UTF-8, and what `opened` raises.
    """
    with opened(path, hint="pipe it instead: kvcalc estimate - < FILE") as (file, size):
        if size > most_bytes:
            raise UsageError(f"{path}: {size:,} bytes; at most {most_bytes:,} are read")
        data = file.read(most_bytes + 1)
    return decode(data, path, most_bytes)


def list_folder(path: str) -> list[str]:
    """The names in the folder at `path`, sorted. Raises UsageError (exit 2) if it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or 'cannot be read'}") from None
    except ValueError:  # a NUL byte in the path
        raise not_a_path(path) from None


def one_of(folder: str, what: str, names: Sequence[str]) -> UsageError:
    """The error for a folder with several files, one of which must be named. `what` comes before the names."""
    more = f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
    return UsageError(
        f"{folder}: {what} {', '.join(names[:_SHOWN_FILES])}{more}",
        f"give the path of one, for example {os.path.join(folder, names[0])}",
    )


def read_stdin(most_bytes: int) -> str:
    """All of standard input, with the same checks."""
    return decode(_stdin().read(most_bytes + 1), "stdin", most_bytes)


def chunks_of(path: str, hint: str = "pipe it instead: kvcalc audit - < FILE") -> Iterator[bytes]:
    """The bytes of the file at `path`, or of standard input if it is `-`, in pieces. `hint` is for a FIFO or a device.

    Raises UsageError (exit 2) as `opened` does, and if stdin is closed.
    """
    if path == "-":
        stream = _stdin()
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
    else:
        with opened(path, hint=hint) as (file, _):
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


def _stdin() -> BinaryIO:
    if sys.stdin is None:  # closed by the parent process
        raise UsageError("stdin: closed", "pipe in a config: kvcalc estimate - < config.json")
    if sys.stdin.buffer.isatty():
        print("kvcalc: reading from stdin; press Ctrl-D to end", file=sys.stderr)
    return sys.stdin.buffer


def decode(data: bytes, name: str, most_bytes: int) -> str:
    """UTF-8 bytes as text. Raises UsageError if there are more than `most_bytes` or they are not UTF-8."""
    if len(data) > most_bytes:
        raise UsageError(f"{name}: more than {most_bytes:,} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name}: not a text file (not UTF-8)") from None
