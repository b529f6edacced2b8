"""The table of tests.mutants names files that exist, and tests that should notice a change of them."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.mutants import TESTS, changes, mutants


@pytest.mark.parametrize("name", TESTS)
def test_the_named_files_and_tests_exist(name: str) -> None:
    assert (ROOT / name).exists()
    for test in TESTS[name]:
        assert (ROOT / test.partition("::")[0]).is_file(), test


def test_every_change_is_another_program() -> None:
    found = mutants("kvcalc/units.py")
    assert len(found) > 20
    assert all(str(mutant.before) != str(mutant.after) for mutant in found)
    assert [*changes(found[0].before)]
