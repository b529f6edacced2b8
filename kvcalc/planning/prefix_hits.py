"""Prompts whose first tokens are found in the prefix cache: the check of the share, and the note about it."""

from __future__ import annotations

from kvcalc.engines import engine_class
from kvcalc.engines.engine import Engine
from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note


def check_caching(engine: Engine, option: str) -> None:
    """Raise UsageError (exit 2) if the engine's settings turn the prefix cache off, which `option` asks about."""
    if engine.prefixes_off:
        raise UsageError(f"{option}: {engine.name} caches no prefixes of {engine.spec.name}", engine.prefixes_off)


def prefix_hit_notes(rate: float, engine: Engine, spec: ModelSpec) -> list[Note]:
    """The notes about a hit rate; none for 0.

    Raises UsageError (exit 2) for a rate outside 0 to below 1, and if the engine finds no prompts in its cache.
    """
    given = f"--prefix-hit-rate {rate:g}"
    if not 0 <= rate < 1:
        raise UsageError(f"{given}: must be at least 0 and below 1", "for example --prefix-hit-rate 0.3")
    if not rate:
        return []
    engine_class(engine.name).reuse().check_hits(given, spec)
    check_caching(engine, "--prefix-hit-rate")
    text = f"{rate:.0%} of each prompt is found in the prefix cache: no prefill for it, but memory as without hits"
    return [Note("throughput", "prefix-hits", text)]
