"""Is the branch coverage of every room at least the floor that tests/budget.toml has for it?

    pytest --cov --cov-report= ... && python -m tests.coverage_floors

Reads the data that pytest-cov left, and prints a line for each room. Exit code 1 if a room is below its floor, or has
none.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.test_budget import BUDGET


def coverage_by_room() -> dict[str, float]:
    """The share of the lines and branches of each room that ran, in percent. `top` are the modules beside the rooms."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "coverage.json")
        subprocess.run([sys.executable, "-m", "coverage", "json", "-q", "-o", report], check=True)
        files = json.loads(report.read_text())["files"]
    ran, all_of = defaultdict[str, int](int), defaultdict[str, int](int)
    for name, file in files.items():
        parts, figures = Path(name).parts, file["summary"]
        room = parts[1] if len(parts) > 2 else "top"
        ran[room] += figures["covered_lines"] + figures["covered_branches"]
        all_of[room] += figures["num_statements"] + figures["num_branches"]
    return {room: 100 * ran[room] / number for room, number in all_of.items() if number}


def main() -> int:
    """The exit code."""
    rooms, floors = coverage_by_room(), BUDGET["coverage"]
    low = False
    for room in sorted(rooms.keys() | floors.keys()):
        share, floor = rooms.get(room, 0.0), floors.get(room, 101)
        low = low or share < floor
        print(f"{room:12} {share:5.1f} %, at least {floor} %{' - BELOW' if share < floor else ''}")
    return int(low)


if __name__ == "__main__":
    sys.exit(main())
