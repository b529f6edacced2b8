"""If an engine has a shortcut for the bytes of its pool, the result equals the sum of the parts."""

from __future__ import annotations

from kvcalc.engines import ENGINES, load_engine
from kvcalc.errors import KvcalcError
from kvcalc.memory.dtypes import DTYPES
from kvcalc.memory.kv_cache import on_device
from kvcalc.memory.workload import bind_workload, resolve_workload
from kvcalc.model.resolve import load_model
from tests.conftest import preset_names
from tests.rows import every_row


@every_row("name", preset_names())
def test_the_short_way_is_the_sum_of_the_parts(name: str) -> None:
    model = load_model(name)
    spec = bind_workload(model, resolve_workload(model, 4096))
    for engine in ENGINES:
        for settings in ({}, {"page-size": "64", "max-mamba-cache-size": "9"}, {"swa-full-tokens-ratio": "0.37"}):
            if settings and engine != "sglang":
                continue
            try:
                rules = load_engine(engine, spec, settings)
            except KvcalcError:
                continue
            share = on_device(spec, 1)
            for tokens, batch in ((1, 1), (100, 7), (4096, 3), (70_001, 64)):
                try:
                    pool = rules.pool(share, DTYPES["bf16"], tokens, batch)
                except KvcalcError:
                    continue
                total = None if pool is None else sum(line.bytes for line in pool)
                assert pool is None or rules.held_bytes(share, DTYPES["bf16"], tokens, batch) == total


def test_some_engine_has_a_pool() -> None:
    spec = load_model("llama-3-8b")
    assert load_engine("sglang", spec).pool(spec, DTYPES["bf16"], 100, 2)
