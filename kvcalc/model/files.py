"""Read a small text file, or say in one line why not."""

from __future__ import annotations

import os
import stat
import sys

from kvcalc.errors import UsageError


def read_text(path: str, most_bytes: int) -> str:
    """The UTF-8 text of the regular file at `path`, of at most `most_bytes` bytes.

    Raises UsageError (exit 2) where it is missing, unreadable, too large, no regular file or no UTF-8. The size is
    checked before reading; a FIFO or a device is refused, since reading it may never end.
    """
    try:
        # Opened first and looked at through the handle, so that the file checked is the file read. O_NONBLOCK: opening
        # a FIFO would otherwise wait for a writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        try:
            status = os.fstat(handle)
            if stat.S_ISDIR(status.st_mode):
                raise UsageError(f"{path}: a folder, and no file")
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{path}: not a regular file", "pipe it instead: kvcalc estimate - < FILE")
            if status.st_size > most_bytes:
                raise UsageError(f"{path}: {status.st_size:,} bytes, and no such file needs more than {most_bytes:,}")
            with os.fdopen(os.dup(handle), "rb") as file:
                data = file.read(most_bytes + 1)
        finally:
            os.close(handle)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or 'cannot be read'}") from None
    except ValueError:  # a NUL byte in the path
        raise UsageError(f"{path!r}: not a path") from None
    return decode(data, path, most_bytes)


def read_stdin(most_bytes: int) -> str:
    """All of standard input, under the same limits."""
    if sys.stdin is None:  # closed by whoever started this process
        raise UsageError("stdin: closed", "pipe a config in: kvcalc estimate - < config.json")
    return decode(sys.stdin.buffer.read(most_bytes + 1), "stdin", most_bytes)


def decode(data: bytes, name: str, most_bytes: int) -> str:
    """UTF-8 bytes to text; UsageError where they are too many or no text."""
    if len(data) > most_bytes:
        raise UsageError(f"{name}: more than {most_bytes:,} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name}: not a text file (no UTF-8)") from None
