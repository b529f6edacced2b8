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
    return status


if __name__ == "__main__":
    sys.exit(main())
