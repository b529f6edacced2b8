"""Start the command again in a new process, with one more option."""

from __future__ import annotations

import os
import sys
from itertools import pairwise

from kvcalc.writing.terminal import one_line


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
