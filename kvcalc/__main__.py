"""`python -m kvcalc`, and the console script's entry point."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line on sys.argv; the process's exit status. Ctrl-C while modules load is no trace either."""
    try:
        from kvcalc.cli.app import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    ranks = sys.modules.get("kvcalc.measure.ranks")
    if ranks is not None:
        ranks.leave(status)
    return _close_stdout(status)


def _close_stdout(status: int) -> int:
    """The status, or 1 in place of 0 if what stdout still held cannot be written.

    A write that failed, on a full disk, stays in the buffer. The interpreter would try it again at its end, and exit
    with 120 whatever the status; it leaves a closed stdout alone.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.close()
    except OSError:
        return status or 1
    return status


if __name__ == "__main__":
    sys.exit(main())
