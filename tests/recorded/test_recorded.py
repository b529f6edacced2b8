"""Every engine holds and serves what it did when the figures were recorded."""

from __future__ import annotations

import pytest

from tests.recorded import FILES, NUMBERS, differences, read

pytestmark = pytest.mark.settled


@pytest.mark.parametrize(("kind", "engine"), FILES)
def test_the_figures_are_those_that_were_recorded(kind: str, engine: str, pytestconfig: pytest.Config) -> None:
    rows = read(kind, engine)
    if not pytestconfig.getoption("--everything"):
        # Every fourth simulation. Prompts in parts of a few tokens have thousands of steps each.
        rows = rows[:: 1 if kind == "memory" else 4]
        rows = [row for row in rows if int(row.options.get("max-num-tokens", 64)) >= 64]
    for row in rows:
        assert not differences(row), f"{row}; `python -m tests.recorded` shows all differences"


@pytest.mark.parametrize(("kind", "engine"), FILES)
def test_the_questions_are_about_many_models_and_options(kind: str, engine: str) -> None:
    rows = read(kind, engine)
    assert len(rows) == NUMBERS[kind][engine]
    assert len({row.model for row in rows}) > len(rows) / 8
    assert len({name for row in rows for name in row.options}) > 10
