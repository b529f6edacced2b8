"""The table of tests.mutants names files that exist, and tests that should notice a change of them."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.mutants import TESTS, changes, files_of, mutants
from tests.mutants import tests_of as of_file


@pytest.mark.parametrize("name", TESTS)
def test_the_named_files_and_tests_exist(name: str) -> None:
    assert (ROOT / name).exists()
    for test in TESTS[name]:
        assert (ROOT / test.partition("::")[0]).is_file(), test


def test_every_file_has_the_tests_of_one_name() -> None:
    """A folder's mutants are made once, though it may hold files and folders with tests of their own."""
    of_names = [file for name in TESTS for file in files_of(name)]
    assert len(of_names) == len(set(of_names))
    assert {of_file(file) for file in files_of("kvcalc/engines")} == {TESTS["kvcalc/engines"]}
    assert "kvcalc/engines/log.py" not in files_of("kvcalc/engines")
    assert files_of("kvcalc/engines/log.py") == ["kvcalc/engines/log.py"]


def test_every_change_is_another_program() -> None:
    found = mutants("kvcalc/units.py")
    assert len(found) > 20
    assert all(str(mutant.before) != str(mutant.after) for mutant in found)
    assert [*changes(found[0].before)]
