"""The errors that kvcalc raises: one or more classes per exit code.

Each error has an exit code and an optional hint: what to type next. The command line prints `kvcalc: MESSAGE` and, if
there is a hint, prints it on a second line. Library users catch `KvcalcError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_LONGEST_NAME = 200
_MOST_NAMES = 2000


class KvcalcError(Exception):
    """An error with a one-line message. `hint` is the next command or value to try, or None.

    Spaces replace the line breaks of a text from outside.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = " ".join(message.splitlines())
        super().__init__(self.message)
        self.hint = hint


class RunError(KvcalcError):
    """A run-time failure: torch is missing, the disk is full, the device is lost."""

    exit_code = 1


class BrokenDeviceError(RunError):
    """The device can no longer be used by this process. A new process can go on, without the `backend` that did it.

    `backend` is None if no single attention kernel is the cause.
    """

    backend: str | None = None


class UsageError(KvcalcError):
    """A bad option, or an input file that is missing, unreadable or not a mapping."""

    exit_code = 2


class LayoutError(UsageError):
    """A model cannot be split over devices in the given layout, or its engine refuses to start so. Another may work."""

    document: Mapping[str, Any] | None = None


class SettingError(UsageError):
    """An engine's setting that cannot be parsed, whatever the model is. It refuses all rows of a list."""


class ModelError(KvcalcError):
    """An unknown model, or a well-formed config that is not supported."""

    exit_code = 3


class CacheTypeError(ModelError):
    """A checkpoint whose config was not read, and which may ask for an fp8 cache."""


class GpuError(KvcalcError):
    """An unknown device."""

    exit_code = 3


class DoesNotFitError(KvcalcError):
    """The model and its cache need more memory than the devices have, or the engine refuses to start.

    `document` is the answer to the question if it is one, such as the `CheckRefusal` of `kvcalc check`.
    """

    exit_code = 4
    document: Mapping[str, Any] | None = None


class MismatchError(KvcalcError):
    """Measured bytes differ from the prediction, or a number in a log is unexplained."""

    exit_code = 5


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known names closest to `name`, as a hint ("did you mean ...?"), or None if no name is close.

    difflib is imported here because only failing runs need it. It is slow on long texts, so names longer than 200
    characters are ignored, and so are names after the first 2,000.
    """
    from difflib import get_close_matches
    from itertools import islice

    if len(name) > _LONGEST_NAME:
        return None
    folded = {k.casefold(): k for k in islice(known, _MOST_NAMES) if len(k) <= _LONGEST_NAME}
    close = get_close_matches(name.casefold(), folded, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(folded[c] for c in close)}?" if close else None
