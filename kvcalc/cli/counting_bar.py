"""A progress bar on stderr for work that is counted, shown on a terminal if the work takes more than a second."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    shown = 0
    due = time.monotonic() + _AFTER_SECONDS

    def count(done: int, of: int = 0) -> None:
        nonlocal shown, due
        now = time.monotonic()
        if now < due:
            return
        due = now + _EVERY_SECONDS
        line = f"{done:,} {what}"
        if of:
            filled = _CELLS * done // of
            line = f"[{'#' * filled}{' ' * (_CELLS - filled)}] {done:,} of {of:,} {what}"
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
