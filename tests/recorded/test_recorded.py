"""Every engine holds what it held when the figures were recorded."""

from __future__ import annotations

import pytest

from tests.recorded import ENGINES, figures_of, names_of, read
from tests.relations.drawing import asked


@pytest.mark.parametrize("engine", ENGINES)
def test_the_figures_are_those_that_were_recorded(engine: str) -> None:
    for row in read(engine):
        document = asked(row.command, row.model, row.options)
        assert document is not None, f"{row} is refused; see `python -m tests.recorded`"
        assert not names_of(row.figures, figures_of(document)), str(row)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_questions_are_about_many_models_and_options(engine: str) -> None:
    rows = read(engine)
    assert len(rows) == ENGINES[engine]
    assert len({row.model for row in rows}) > 20
    assert len({name for row in rows for name in row.options}) > 10
