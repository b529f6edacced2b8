"""Options of a test before its own."""

from __future__ import annotations

from collections.abc import Sequence

# Options that may be given more than once.
_SEVERAL = ("--without-backend",)


def last_given(arguments: Sequence[object]) -> list[object]:
    """`arguments` without the options that are given again later, as short options of a test before its own."""
    found = [*arguments]
    for at in range(len(arguments) - 1, -1, -1):
        name = str(found[at])
        if name.startswith("--") and name not in _SEVERAL and name in map(str, found[at + 1 :]):
            has_value = not str(found[at + 1]).startswith("--")
            del found[at : at + 1 + has_value]
    return found
