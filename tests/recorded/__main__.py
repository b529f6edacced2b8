"""Compare the recorded figures with today's, or record them again. The package's docstring has the commands."""

from __future__ import annotations

import argparse
import json

from tests.recorded import FILES, answered_again, answers_of, differences, path_of, read


def main() -> None:
    """Print what is different, or write the files."""
    parser = argparse.ArgumentParser(prog="python -m tests.recorded")
    parser.add_argument("--write", action="store_true", help="record today's answers to the same questions")
    parser.add_argument("--draw", action="store_true", help="draw other questions and record their answers")
    given = parser.parse_args()
    for kind, engine in FILES:
        if given.write or given.draw:
            found = answers_of(kind, engine) if given.draw else map(answered_again, read(kind, engine))
            rows = "".join(json.dumps(row) + "\n" for row in found)
            path_of(kind, engine).write_text(rows, encoding="utf-8")
            continue
        for row in read(kind, engine):
            if different := differences(row):
                print(f"{row}: {different}")


main()
