"""Compare the recorded figures with today's, or record them again. The package's docstring has the commands."""

from __future__ import annotations

import argparse
import json

from tests.recorded import ENGINES, answers_of, figures_of, names_of, path_of, read
from tests.relations.drawing import asked


def main() -> None:
    """Print what is different, or write the files."""
    parser = argparse.ArgumentParser(prog="python -m tests.recorded")
    parser.add_argument("--write", action="store_true", help="draw the questions again and record today's answers")
    if parser.parse_args().write:
        for engine in ENGINES:
            rows = "".join(json.dumps(row) + "\n" for row in answers_of(engine))
            path_of(engine).write_text(rows, encoding="utf-8")
        return
    for engine in ENGINES:
        for row in read(engine):
            document = asked(row.command, row.model, row.options)
            now = "refused" if document is None else ", ".join(names_of(row.figures, figures_of(document)))
            if now:
                print(f"{row}: {now}")


main()
