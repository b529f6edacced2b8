"""Compare the recorded figures with today's, or record them again. The package's docstring has the commands."""

from __future__ import annotations

import argparse
import json

from tests.recorded import FILES, answers_of, differences, path_of, read


def main() -> None:
    """Print what is different, or write the files."""
    parser = argparse.ArgumentParser(prog="python -m tests.recorded")
    parser.add_argument("--write", action="store_true", help="draw the questions again and record today's answers")
    write = parser.parse_args().write
    for kind, engine in FILES:
        if write:
            rows = "".join(json.dumps(row) + "\n" for row in answers_of(kind, engine))
            path_of(kind, engine).write_text(rows, encoding="utf-8")
            continue
        for row in read(kind, engine):
            if different := differences(row):
                print(f"{row}: {different}")


main()
