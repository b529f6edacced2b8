"""The parts of tests.mutants name files that exist, and a mutant is tried with the tests that run its lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.mutants import PARTS, changes, files_of, mutants


@pytest.mark.parametrize("name", PARTS)
def test_the_parts_exist(name: str) -> None:
    assert (ROOT / name).exists()


def test_every_file_belongs_to_one_part() -> None:
    """A folder's mutants are made once, though a file or folder in it may be a part of its own."""
    of_names = [file for name in PARTS for file in files_of(name)]
    assert len(of_names) == len(set(of_names))
    assert "kvcalc/engines/mlx/__init__.py" not in files_of("kvcalc/engines")
    assert "kvcalc/engines/mlx/__init__.py" in files_of("kvcalc/engines/mlx")
    assert files_of("kvcalc/engines/log.py") == ["kvcalc/engines/log.py"]


def test_every_change_is_another_program() -> None:
    found = mutants("kvcalc/units.py")
    assert len(found) > 20
    assert all(str(mutant.before) != str(mutant.after) for mutant in found)
    assert [*changes(found[0].before)]


def test_a_mutant_says_what_runs_it(tmp_path: Path) -> None:
    """Constants and defaults are run on import, and the body of a function by the tests that run its lines."""
    file = tmp_path / "rule.py"
    file.write_text(
        "LIMIT = 3\n"
        "def rule(tokens: int, more: int = 1) -> int:\n"
        "    if (\n"
        "        tokens > LIMIT\n"
        "    ):\n"
        "        return tokens\n"
        "    return tokens + more\n"
    )
    runs = {(mutant.line, mutant.last): mutant.runs for mutant in mutants(str(file))}
    assert runs == {(1, 1): False, (2, 2): False, (3, 4): True, (4, 4): True, (7, 7): True}
