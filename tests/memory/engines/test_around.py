"""Changed rules of an engine: what they do not change is the engine's own."""

from __future__ import annotations

import pytest

from kvcalc.memory.engines import ENGINES, Engine, load_engine
from kvcalc.memory.engines.around import TAKEN
from kvcalc.memory.engines.lookahead import LookAhead
from kvcalc.model.resolve import load_model


@pytest.mark.parametrize("name", ENGINES)
def test_everything_that_is_no_method_is_the_engines_own(name: str) -> None:
    engine = load_engine(name, load_model("llama-3-8b"))
    changed = LookAhead(engine, 3)
    owned = {key for key in (*Engine.__annotations__, *vars(Engine), *vars(changed)) if not key.startswith("_")}
    fields = {key for key in owned if not callable(getattr(Engine, key, None))}
    assert fields == set(TAKEN)
    for key in fields:
        assert getattr(changed, key) == getattr(engine, key)
