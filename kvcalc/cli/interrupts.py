"""Ctrl-C while modules load, which some of them would swallow."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Within the block Ctrl-C ends the process there and then, with its line and status 130.

    A KeyboardInterrupt is lost where it strikes in a callback or a finalizer, of which loading torch runs many, and the
    command would go on. Nothing is held yet that would have to be given back. Only where Ctrl-C is Python's own to
    handle, in the main thread; elsewhere the block is left alone.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def leave(number: int, frame: object) -> None:
        os.write(2, b"kvcalc: interrupted\n")
        os._exit(130)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
