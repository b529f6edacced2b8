"""An engine's constants by release: what an engine's entry in constants.json says for one release.

The entry itself applies from its oldest release on (`since`; every release if it is missing). `steps` lists what later
releases changed, oldest first:

    {"since": "0.14.0", "source": "...", "constants": {"kernel_seconds": 2e-6}, "ranges": {"": [0.8, 1.2]}}

A step has any of the entry's other parts. A mapping, such as `constants`, replaces only the keys it has; anything else
replaces the whole part. A release uses the newest step that is not newer than itself, and so do nightly builds and
dates.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kvcalc.records import NamedTuple
from kvcalc.releases import Release, parse_release, step_at

_OF_A_STEP = ("since", "source", "steps")


class Step(NamedTuple):
    """An engine's entry for one release. `older_than` is the oldest known release if the one asked for is older."""

    entry: Mapping[str, Any]
    older_than: str | None


def step_of(engine: str, entry: Mapping[str, Any], release: Release | None) -> Step:
    """What the `entry` of `engine` says for a release. None is the newest release."""
    steps = entry.get("steps", ())
    if not steps and "since" not in entry:
        return Step(entry, None)
    place = step_at([first_release(engine, step.get("since")) for step in (entry, *steps)], release)
    fields: dict[str, Any] = {name: part for name, part in entry.items() if name not in _OF_A_STEP}
    for step in steps[: place or 0]:
        fields = {**fields, **{name: _changed(fields.get(name), step[name]) for name in step if name not in _OF_A_STEP}}
    return Step(fields, entry["since"] if place is None else None)


def _changed(part: Any, change: Any) -> Any:
    """A part of an entry with the changes of a step."""
    if not isinstance(part, Mapping) or not isinstance(change, Mapping):
        return change
    return {**part, **{name: _changed(part.get(name), change[name]) for name in change}}


@lru_cache(maxsize=256)
def first_release(engine: str, since: str | None) -> Release:
    """The release since which something counts: 0.14 is 0.14.0 here. ValueError if it has no place in the history."""
    if since is None:
        return Release.of(0)._replace(phase=-99)
    release = parse_release(engine, since).release
    if release is None:
        raise ValueError(f"{engine}: {since} is not a release that a step can begin with")
    return release.first_patch()
