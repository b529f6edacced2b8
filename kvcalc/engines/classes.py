"""Types of models that an older release of an engine has no class for (`classes.yaml` in its folder)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kvcalc.engines.declarations import has_table, table
from kvcalc.errors import LayoutError
from kvcalc.model.caches import SELF_ATTENTION_CACHES
from kvcalc.model.spec import ModelSpec, all_caches
from kvcalc.notes import Note
from kvcalc.releases import Release, RequestedRelease, parse_release

if TYPE_CHECKING:
    from kvcalc.engines.engine import Engine


def class_notes(engine: type[Engine], spec: ModelSpec, requested: RequestedRelease) -> tuple[Note, ...]:
    """That the release has no class for the model. Raises LayoutError (exit 2) if Transformers' does not serve."""
    until, since = _rows(engine.name).get(spec.model_type, (None, ""))
    if until is None or requested.release is None or requested.release > until:
        return ()
    text = f"{engine.title} {requested.text} has no class for {spec.model_type}"
    # An engine without a class of its own runs that of Transformers, if it has the caches.
    if all(isinstance(cache, SELF_ATTENTION_CACHES) for cache in all_caches(spec)):
        return (Note("engine", "no-class", f"{text}: it starts only if it can run the class of Transformers"),)
    raise LayoutError(f"does not start: {text}", f"{engine.title} {since} has one")


@cache
def _rows(engine: str) -> dict[str, tuple[Release | None, str]]:
    """The last release without a class for each type, and the first that is known to have one."""
    return {
        name: (parse_release(engine, str(row["until"])).release, str(row["since"]))
        for row in (table(engine, "classes")["releases"] if has_table(engine, "classes") else ())
        for name in row["types"].split()
    }
