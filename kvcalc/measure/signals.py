"""SIGTERM and Ctrl-C in one rank of several: heard even while torch waits for a rank that no longer answers.

Python runs a signal's handler between two of its own instructions, and a collective that waits in C++ comes to none:
torchrun, which ends all ranks when one has died, would have to kill this one without a word. So the interpreter's
wakeup file tells a thread of each signal, and where the handler has not run within the grace, the thread ends the
process (https://docs.python.org/3/library/signal.html, "set_wakeup_fd").
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvcalc.errors import RunError
from kvcalc.measure.ranks import Place

GRACE_SECONDS = 3.0

_STOPPED = "stopped from outside, as torchrun does when another rank has ended"


@contextmanager
def heard(place: Place) -> Iterator[None]:
    """Within the block SIGTERM is a RunError (exit 1), Ctrl-C a KeyboardInterrupt; either ends the process, with its
    line and status, where the block does not come round to it. Only the main thread can hear: elsewhere, nothing.

    Where the block fails, SIGTERM is ignored from then on: it must not cut off the line that says why.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reacted = threading.Event()

    def react(number: int, frame: FrameType | None) -> None:
        reacted.set()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise RunError(_STOPPED)

    # Whoever started this may have it ignore Ctrl-C, as a shell does with what runs in the background.
    numbers = [signal.SIGTERM] + [signal.SIGINT] * (signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, react) for number in numbers}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, reacted, place), daemon=True).start()
    try:
        yield
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        before.pop(signal.SIGTERM)
        raise
    finally:
        signal.set_wakeup_fd(wakeup)
        # The thread reads the end of the pipe, and ends.
        os.close(writer)
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(reader: int, reacted: threading.Event, place: Place) -> None:
    with os.fdopen(reader, "rb", buffering=0) as file:
        while heard_of := file.read(1):
            if heard_of[0] in (signal.SIGTERM, signal.SIGINT) and not reacted.wait(GRACE_SECONDS):
                _end(heard_of[0], place)


def _end(number: int, place: Place) -> None:
    """What the command line would have printed and returned, had it come to it."""
    if number == signal.SIGTERM:
        print(f"kvcalc: rank {place.rank} of {place.size}: {_STOPPED}", file=sys.stderr, flush=True)
        os._exit(1)
    if place.rank == 0:
        print("kvcalc: interrupted", file=sys.stderr, flush=True)
    os._exit(130)
