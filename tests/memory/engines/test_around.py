"""Changed rules of an engine: what they do not change is the engine's own."""

from __future__ import annotations

import pytest

from kvcalc.memory.dtypes import DTYPES
from kvcalc.memory.engines import ENGINES, load_engine
from kvcalc.memory.engines.around import TAKEN, Around
from kvcalc.memory.engines.draft_pool import DraftPool
from kvcalc.memory.engines.engine import Engine
from kvcalc.memory.engines.lookahead import LookAhead
from kvcalc.memory.engines.release import parse_release
from kvcalc.memory.engines.shared_prefix import SharedPrefix
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


def test_changed_rules_cut_a_model_and_start_like_the_engine() -> None:
    spec = load_model("llama-3-8b")
    engine = load_engine("vllm@0.15", spec, {"pp-layer-partition": "10,22"}, 2)
    changed = SharedPrefix(engine, 64)
    assert changed.stage_bounds(32, 2) == engine.stage_bounds(32, 2) != load_engine("vllm", spec).stage_bounds(32, 2)
    asked = (spec, DTYPES["bf16"], 1000)
    assert changed.start_bytes(*asked) == engine.start_bytes(*asked) > 0
    assert changed.block_tokens(spec, DTYPES["bf16"]) == engine.block_tokens(spec, DTYPES["bf16"])
    dated = parse_release("vllm", "2025-12-01")
    assert changed.rules_used(dated) == engine.rules_used(dated) is not None


# What the wrappers may leave to `Engine`, which computes it from their other methods.
COMPUTED = {
    "all_stages_bytes", "alone", "batch_bytes", "batch_line", "growth", "largest_stage", "longest_context",
    "reads", "replica_bytes",
}  # fmt: skip
# Asked of the class, before there is an account that could be changed.
OF_THE_CLASS = {"at", "cut", "kv_dtype", "replica_settings", "weight_dtype"}


@pytest.mark.parametrize("wrapper", [DraftPool, LookAhead, SharedPrefix])
def test_no_rule_of_an_engine_is_lost_in_changed_rules(wrapper: type[Around]) -> None:
    methods = {key for key, value in vars(Engine).items() if not key.startswith("_") and callable_of(value)}
    own = {key for base in wrapper.__mro__[: wrapper.__mro__.index(Engine)] for key in vars(base)}
    assert methods - own <= COMPUTED | OF_THE_CLASS
    assert methods >= COMPUTED | OF_THE_CLASS


def callable_of(value: object) -> bool:
    return callable(value) or isinstance(value, (staticmethod, classmethod))
