"""Handle SIGTERM and Ctrl-C in one of several ranks, even while torch waits for a rank that no longer responds.

Python runs signal handlers between its own instructions, but a collective that waits in C++ never gets back to them.
torchrun ends all ranks when one has died, and it would have to kill this rank without a message. So a thread receives
every signal through the interpreter's wakeup file. If the handler has not run within the grace period, the thread ends
the process (https://docs.python.org/3/library/signal.html, "set_wakeup_fd").
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
from kvcalc.measure.devices.ranks import Place

# After Ctrl-C somebody waits for an answer. After SIGTERM the reason of another rank's error may still be on its way.
GRACE_SECONDS = {signal.SIGTERM: 3.0, signal.SIGINT: 0.2}

_STOPPED = "stopped by SIGTERM, which torchrun sends if another rank has ended"


@contextmanager
def heard(place: Place) -> Iterator[None]:
    """Inside the block, SIGTERM raises RunError (exit 1) and Ctrl-C raises KeyboardInterrupt.

    If the block does not react, the process ends with the same message and exit code. Only the main thread can handle
    signals. In other threads, this does nothing. If the block fails, SIGTERM is ignored from then on, so that it cannot
    cut off the error message.
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

    # The parent may have set Ctrl-C to be ignored, as a shell does for background processes.
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
        # The thread reads the end of the pipe and stops.
        os.close(writer)
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(reader: int, reacted: threading.Event, place: Place) -> None:
    with os.fdopen(reader, "rb", buffering=0) as file:
        while heard_of := file.read(1):
            grace = GRACE_SECONDS.get(signal.Signals(heard_of[0]))
            if grace is not None and not reacted.wait(grace):
                _end(heard_of[0], place)


def _end(number: int, place: Place) -> None:
    """End the process with the message and exit code that the command line would have used."""
    if number == signal.SIGTERM:
        print(f"kvcalc: rank {place.rank} of {place.size}: {_STOPPED}", file=sys.stderr, flush=True)
        os._exit(1)
    if place.rank == 0:
        print("kvcalc: interrupted", file=sys.stderr, flush=True)
    os._exit(130)
