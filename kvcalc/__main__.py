"""`python -m kvcalc`, and the entry point of the console script."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """Run the command line on sys.argv and return the exit code. Ctrl-C prints no traceback, even during imports."""
    # Modules and answers are trees without cycles. Searching them for cycles takes 5 % of the time of an answer.
    gc.set_threshold(100_000, 50, 50)
    try:
        from kvcalc.output.streams import prepare_streams

        prepare_streams()
        from kvcalc.cli.app import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    ranks = sys.modules.get("kvcalc.measure.devices.ranks")
    if ranks is not None:
        ranks.leave(status)
    from kvcalc.output.streams import close_stdout

    return close_stdout(status)


if __name__ == "__main__":
    sys.exit(main())
