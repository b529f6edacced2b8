"""`python -m kvcalc`, and the console script's entry point."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line on sys.argv; the process's exit status. Ctrl-C while modules load is no trace either."""
    try:
        from kvcalc.cli.app import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
