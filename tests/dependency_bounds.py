"""The lowest and the highest releases that pyproject.toml allows, for environments that test both ends.

    python -m tests.dependency_bounds lowest     name==lower bound
    python -m tests.dependency_bounds highest    the ranges, for an installation without constraints

torch and transformers are left out: an open range of torch may download gigabytes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
EXTRAS = ("measure", "hub", "plot", "gguf", "benchmarks")
_LEFT_OUT = ("torch", "transformers", "kvcalc")


def requirements() -> list[str]:
    """The requirements of the package and its extras. A TOML parser is only in Python 3.11 and later."""
    text = PROJECT.read_text(encoding="utf-8")
    lists = [_list(text, "dependencies")] + [_list(text, extra) for extra in EXTRAS]
    found = [one for each in lists for one in each]
    return [one for one in found if re.split(r"[<>=\[]", one)[0] not in _LEFT_OUT]


def _list(text: str, key: str) -> list[str]:
    match = re.search(rf"^{key} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ValueError(f"{PROJECT.name} has no list {key}")
    lines = (line.partition("#")[0] for line in match[1].splitlines())
    return [one for line in lines for one in re.findall(r'"([^"]+)"', line)]


def lowest(requirement: str) -> str:
    """`name==VERSION` with the lower bound of `name>=VERSION,<...`."""
    match = re.fullmatch(r"([\w.-]+)>=([\d.]+)(?:,<[\d.]+)?", requirement)
    if match is None:
        raise ValueError(f"{requirement}: no lower bound")
    return f"{match[1]}=={match[2]}"


if __name__ == "__main__":
    wanted = lowest if sys.argv[1:] == ["lowest"] else str
    print("\n".join(map(wanted, requirements())))
