"""The reference pages that a release adds to the manual. They are made from the program, and are not in the repository.

    python -m tests.reference FOLDER

writes commands.md, json.md, models.md and devices.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests import json_reference


def commands() -> str:
    """Every command with its whole help."""
    from kvcalc.cli.app import COMMANDS

    parts = ["# Commands\n"]
    for name in COMMANDS:
        words = [sys.executable, "-m", "kvcalc", name, "--help"]
        env = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}
        shown = subprocess.run(words, env=env, check=True, capture_output=True, encoding="utf-8").stdout
        parts.append(f"## kvcalc {name}\n\n```text\n{shown.rstrip()}\n```\n")
    return "\n".join(parts)


def _table(title: str, rows: list[dict[str, object]], columns: dict[str, str]) -> Iterator[str]:
    yield f"# {title}\n\n| {' | '.join(columns.values())} |\n|{'---|' * len(columns)}\n"
    for row in rows:
        cells = ["" if row[key] is None else str(row[key]) for key in columns]
        yield f"| {' | '.join(cells)} |\n"


def models() -> str:
    """Every preset with the bytes that an estimate without options has."""
    from kvcalc.planning.answers.models import list_models

    columns = {
        "name": "model", "family": "family", "attention": "attention", "num_layers": "layers",
        "bytes_per_token": "bytes per token", "fixed_bytes_per_sequence": "fixed bytes", "source": "source",
    }  # fmt: skip
    return "".join(_table("Models", [dict(row) for row in list_models()["models"]], columns))


def devices() -> str:
    """Every device."""
    from kvcalc.planning.answers.gpus import list_gpus

    columns = {
        "name": "device", "vendor": "vendor", "memory_bytes": "bytes", "bandwidth_bytes_per_second": "bytes per second",
        "tdp_watts": "W", "source": "source",
    }  # fmt: skip
    return "".join(_table("Devices", [dict(row) for row in list_gpus()["gpus"]], columns))


PAGES = {"commands.md": commands, "json.md": json_reference.page, "models.md": models, "devices.md": devices}


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (folder / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
