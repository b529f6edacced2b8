"""Ctrl-C while Python cannot run its handlers: during imports, and while torch computes.

And the start of the same command in another process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

from kvcalc.writing.terminal import one_line

_MESSAGE = b"kvcalc: interrupted\n"
_STATUS = 130


@contextlib.contextmanager
def exiting_on_ctrl_c() -> Iterator[None]:
    """Inside the block, Ctrl-C prints one line and ends the process with exit code 130. For imports.

    Python drops a KeyboardInterrupt that is raised in a callback or a finalizer. Importing torch runs many of those, so
    the command would continue. At this point there is nothing to clean up. Loading torch's libraries takes up to half a
    second, in which Python runs no handler at all, so another process prints the line at once. The block has no effect
    outside the main thread, or if Python's default handler does not handle Ctrl-C.
    """
    if not _is_default():
        yield
        return
    announcer = _Announcer() if "torch" not in sys.modules and hasattr(os, "fork") else None

    def end(number: int, frame: object) -> None:
        if announcer is None:
            _say()
        else:
            announcer.wait()
        os._exit(_STATUS)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if announcer is not None:
            announcer.close()


@contextlib.contextmanager
def ending_on_ctrl_c(stop: Callable[[], object]) -> Iterator[None]:
    """Inside the block, Ctrl-C calls `stop`, prints one line, and ends the process at once with exit code 130.

    Python runs signal handlers in the main thread, between its own instructions, but an operation of torch can take
    seconds. So another thread receives the signal through the interpreter's wakeup file; torch lets it run meanwhile
    (https://docs.python.org/3/library/signal.html, "set_wakeup_fd"). The operating system frees the memory. The block
    has no effect outside the main thread, or if Python's default handler does not handle Ctrl-C.
    """
    if not _is_default():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        with os.fdopen(reader, "rb", buffering=0) as file:
            while number := file.read(1):
                if number[0] == signal.SIGINT:
                    with contextlib.suppress(Exception):
                        stop()
                    _say()
                    os._exit(_STATUS)

    signal.signal(signal.SIGINT, lambda number, frame: None)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The thread reads the end of the pipe and stops.
        os.close(writer)


class _Announcer:
    """A process that prints the line as soon as this process receives Ctrl-C, even if it is inside a C library."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Both processes receive the Ctrl-C of a terminal, and this one must not die of it before it ignores it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._pid = os.fork()
        if not self._pid:
            self._listen(reader)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.close(reader)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def _listen(self, reader: int) -> None:
        try:
            os.close(self._writer)
            while number := os.read(reader, 1):
                if number[0] == signal.SIGINT:
                    _say()
                    break
        finally:
            os._exit(0)

    def wait(self) -> None:
        """Wait until the line has been printed."""
        with contextlib.suppress(OSError):
            os.waitpid(self._pid, 0)

    def close(self) -> None:
        """End the process without a line."""
        signal.set_wakeup_fd(self._before)
        os.close(self._writer)
        self.wait()


def _is_default() -> bool:
    """Whether this is the main thread and Python's default handler handles Ctrl-C."""
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def _say() -> None:
    with contextlib.suppress(OSError):
        os.write(2, _MESSAGE)


def again(option: str, value: str, why: str) -> None:
    """Print `why` on stderr and replace this process by the same command with `option value` at its end.

    Returns without doing anything if this process was not started by the command line, or if it already had this
    option, which did not help.
    """
    arguments = sys.argv[1:]
    if sys.orig_argv[-len(arguments) :] != arguments or (option, value) in pairwise(arguments):
        return
    print(one_line(why), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], option, value])  # noqa: S606 - no shell is wanted
