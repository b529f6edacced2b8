"""A progress bar on stderr for work that is counted, shown on a terminal if the work takes more than a second.

It has the rate, and the time left.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import Optional

_AFTER_SECONDS, _EVERY_SECONDS, _CELLS = 1.0, 0.1, 24

Counter = Callable[..., None]
"""Called with how much is done, and how much there is, if that is known."""


@contextmanager
def counting_bar(what: str) -> Iterator[Optional[Counter]]:
    """A function to call with the progress. None if stderr is not a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    shown = before = 0
    started = time.monotonic()
    due = started + _AFTER_SECONDS

    def count(done: int, of: int = 0) -> None:
        nonlocal shown, due, started, before
        now = time.monotonic()
        if done < before:  # another count begins
            started = now
        before = done
        if now < due:
            return
        due = now + _EVERY_SECONDS
        line = f"{done:,} {what}"
        if of:
            filled = _CELLS * done // of
            line = f"[{'#' * filled}{' ' * (_CELLS - filled)}] {done:,} of {of:,} {what}"
        rate = done / max(now - started, 1e-3)
        line += f", {rate:,.0f}/s" if rate >= 1 else ""
        line += f", {(of - done) / rate:,.0f} s left" if of and rate else ""
        line = line[: get_terminal_size().columns - 1]
        print(f"\r{line:<{shown}}", end="", file=sys.stderr, flush=True)
        shown = len(line)

    try:
        yield count
    finally:
        if shown:
            print(f"\r{'':<{shown}}\r", end="", file=sys.stderr, flush=True)


def of_all_runs(count: Optional[Counter]) -> Optional[Counter]:
    """A function to call with the progress of each of several runs, which counts all of them. None for None."""
    if count is None:
        return None
    before = last = 0

    def counted(done: int, of: int = 0) -> None:
        nonlocal before, last
        if done < last:  # another run has begun
            before += last
        last = done
        count(before + done)

    return counted
