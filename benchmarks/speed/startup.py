"""Measure the CPU time of one answer, as ratios taken in one run.

    python benchmarks/speed/startup.py [--runs N]

`kvcalc estimate llama-3-70b --json`, without and with a device, is compared with a hello-world Typer app that has two
commands. Its human table is compared with the same app printing a small Rich table. The goals are at most 1.5, 1.5 and
1.4. Processes alternate (A B A B ...), and each figure is the median of the ratios within a pair, so that changes in
the machine's speed affect both sides in the same way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.speed.processes import run

# Console scripts as pip writes them, for both sides.
KVCALC = "import sys\nfrom kvcalc.__main__ import main\nsys.exit(main())\n"
HELLO = """\
import typer

app = typer.Typer()


@app.command()
def hello(name: str = "world"):
    print(f"hello {name}")


@app.command()
def table(name: str = "world"):
    from rich.console import Console
    from rich.table import Table

    table = Table("attention", "bytes", "ratio")
    for kind in ("mha", "mqa", "gqa", "mla"):
        table.add_row(kind, "1,024", "1/8")
    Console().print(table)


app()
"""

COMPARISONS = [
    ("estimate --json against a hello-world Typer app", 1.5, ["estimate", "llama-3-70b", "--json"], ["hello"]),
    (
        "estimate --gpu --json against a hello-world Typer app",
        1.5,
        ["estimate", "llama-3-70b", "--gpu", "h100x4", "--json"],
        ["hello"],
    ),
    (
        "the human table against the app printing a Rich table",
        1.4,
        ["estimate", "llama-3-70b", "--format", "human"],
        ["table"],
    ),
]


def main() -> None:
    """Run the comparisons, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21, help="counted runs of each command (default 21)")
    runs = parser.parse_args().runs
    # Both sides run from bytecode, like installed programs.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "kvcalc_script.py"), Path(folder, "hello.py")
        ours.write_text(KVCALC)
        theirs.write_text(HELLO)
        for title, goal, a, b in COMPARISONS:
            commands = [[sys.executable, str(ours), *a], [sys.executable, str(theirs), *b]]
            for command in commands:
                run(command, environment, quiet=False)
            pairs = [tuple(run(command, environment, quiet=False)[0] for command in commands) for _ in range(runs)]
            ratios = [x / y for x, y in pairs]
            median = statistics.median(ratios)
            mine, other = (statistics.median(side) * 1000 for side in zip(*pairs))
            print(
                f"{title}: {median:.2f} (goal {goal}: {'met' if median <= goal else 'missed'}; "
                f"{min(ratios):.2f} to {max(ratios):.2f} over {runs} pairs; CPU {mine:.0f} ms and {other:.0f} ms)"
            )


if __name__ == "__main__":
    main()
