"""Everything kvcalc raises on purpose: one class per exit code.

An error knows the status the process ends with and a hint, the next thing to type. The command line prints
`kvcalc: MESSAGE` and, where there is one, the hint on a second line; library users catch `KvcalcError`.
"""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST_NAME = 200
_MOST_NAMES = 2000


class KvcalcError(Exception):
    """A failure with one clear line. `hint` is the next command or value to try, or None."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RunError(KvcalcError):
    """Something failed while running: no torch, a full disk, a lost device."""

    exit_code = 1


class UsageError(KvcalcError):
    """A bad option, or an input that is missing, unreadable or not a mapping."""

    exit_code = 2


class LayoutError(UsageError):
    """A model that cannot be split over devices as asked: another layout may do."""


class ModelError(KvcalcError):
    """A model nobody knows, or a well-formed description that is not understood."""

    exit_code = 3


class GpuError(KvcalcError):
    """A device nobody knows."""

    exit_code = 3


class DoesNotFitError(KvcalcError):
    """What was asked for needs more memory than there is."""

    exit_code = 4


class MismatchError(KvcalcError):
    """Measured bytes differ from the predicted ones, or a number of a log is unexplained."""

    exit_code = 5


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known names closest to `name`, as a hint ("did you mean ...?"), or None where none is near.

    difflib is imported here because only a failing run needs it. It compares letter by letter, so names no person
    typed are left alone, and so are all but the first names of very many.
    """
    from difflib import get_close_matches
    from itertools import islice

    if len(name) > _LONGEST_NAME:
        return None
    folded = {k.casefold(): k for k in islice(known, _MOST_NAMES) if len(k) <= _LONGEST_NAME}
    close = get_close_matches(name.casefold(), folded, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(folded[c] for c in close)}?" if close else None
