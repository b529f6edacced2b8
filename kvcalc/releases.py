"""The one place that reads a release of an engine: the text after @ in `--engine vllm@0.12`.

A release is a version (0.12, v0.11.2, 1.2.0rc6.post2, 0.20.2rc1.dev9+g123), a build of llama.cpp (b6097), a date, a
commit, an image tag (v0.5.9-cu129, glm5-hopper), or `latest` or `nightly`. Rules and constants that changed with a
release are steps in time, and a release uses the newest step that is not newer than itself. Without a release, the
newest stable one counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, timedelta
from functools import cache, lru_cache
from typing import Any

from kvcalc.errors import UsageError
from kvcalc.model.presets import shipped_table
from kvcalc.records import NamedTuple

_ENGINES: dict[str, dict[str, Any]] = shipped_table("engine_releases")

_LONGEST = 100
# A missing part of a version stands for the last release of that line, and so does a missing development number.
_LAST = 9_999_999_999
_PHASES = {"a": -3, "alpha": -3, "b": -2, "beta": -2, "c": -1, "rc": -1, "pre": -1, "preview": -1}
_ONLY_DEVELOPMENT = -4

# The patterns are compiled when a release is asked for: most questions name none.
# A version as PEP 440 writes it, which is how the engines written in Python name their releases.
_VERSION = (
    r"v?(?P<numbers>\d{1,5}(?:\.\d{1,5}){0,3})"
    r"(?:[-_.]?(?P<phase>alpha|a|beta|b|preview|pre|rc|c)[-_.]?(?P<of_phase>\d{0,5}))?"
    r"(?:[-_.]?post[-_.]?(?P<post>\d{0,5}))?"
    r"(?:[-_.]?dev[-_.]?(?P<dev>\d{0,10}))?"
    r"(?:\+[\w.]+)?"
)
_BUILD = r"b?([1-9]\d{0,5})(?:\s*\([0-9a-f]+\))?"
_PLATFORM = r"cu\d+|rocm[\d.]+|base|aarch64|arm64|amd64|x86_64"
_DATE = (
    rf"(?:(?:nightly|weekly|dev|main|{_PLATFORM})[-_.]?)*(20\d\d)([-_.]?)(\d\d)\2(\d\d)"
    rf"(?:[-_.](?:[0-9a-f]{{6,40}}|{_PLATFORM}))*"
)
_MONTH = r"(20\d\d)-(\d\d)"
# NVIDIA's containers are named after their month: 25.09-py3.
_CONTAINER = r"(2\d)\.(0[1-9]|1[0-2])(?:-py3.*)?"
# What setuptools-scm calls a build from a clone without tags, as nightly builds are: 0.0.0.dev1+g5b8c30d, 0.1.dev1.
_UNTAGGED = r"v?0\.(?:0(?:\.0)?(?:[-_.]?(?:a|b|rc|post|dev)\d*)*|1[-_.]?dev\d*)(?:\+[\w.]+)?"
_COMMIT = r"(?:commit[-:]?|g)?[0-9a-f]{7,40}"
# Tags of images and branches that name no release of the engine: nightly-5b8c30d, gpt-oss-dev, rocm7.1-pytorch2.9.
_BRANCH = r"(?:nightly|latest|dev|main|stable)[-_.].+|.+[-_.](?:nightly|latest|dev|main)"
_COMPONENTS = r"[a-z]+\d+(?:\.\d+)*(?:[-_][a-z]+\d+(?:\.\d+)*)+(?:[-_]\w+)*"
# Other tags, such as those of images for one model: glm5-hopper, deepseek_v4, qwen3.5. They begin with a letter and
# have a digit or a separator. A misspelt `latest` is none of them, nor is a misspelt number: `0.9.x`, `rc1`.
_TAG = r"(?=.*[-_\d])(?=.*[a-z]{3})[a-z][\w.-]*"
_LIKE_A_NUMBER = (
    r"(?:.*[-_])?v?\d+\.[\w.]*(?:[-_].*)?|[bv]\d.*"
    r"|(?:alpha|beta|preview|pre|rc|post|dev|release)[-_.]?\d*(?:\..*)?"
)

_NEWEST_STABLE = ("latest", "stable")
_NEWEST = ("nightly", "dev", "devel", "main", "master", "head")


class Release(NamedTuple):
    """A place in an engine's history. Releases compare by age, as PEP 440 orders versions.

    `numbers` has four parts. `phase` is 0 for a release and below 0 for what comes before it: a development version, an
    alpha, a beta or a release candidate. `post` is one more than the number of a post-release, and 0 for others. A
    build of llama.cpp has its number as the first part.
    """

    numbers: tuple[int, ...]
    phase: int = 0
    of_phase: int = 0
    post: int = 0
    dev: int = _LAST

    @classmethod
    def of(cls, *numbers: int, post: int | None = None) -> Release:
        """The release with exactly these numbers: `Release.of(0, 21, post=1)` is 0.21.0.post1."""
        return cls((*numbers, *(0,) * (4 - len(numbers))), post=0 if post is None else post + 1)

    def first_patch(self) -> Release:
        """The first release of a line such as 0.12, whose place is that of its last release."""
        return self._replace(numbers=tuple(0 if part == _LAST else part for part in self.numbers))


class RequestedRelease(NamedTuple):
    """A release as it was asked for.

    `text` is in lower case. `release` is its place, or None for the newest. `is_placed` is False if the text names
    something whose place is not known, such as a commit, which counts as the newest. `is_date` is whether the place
    follows from a date.
    """

    text: str
    release: Release | None
    is_placed: bool = True
    is_date: bool = False


def _fact(engine: str, name: str, otherwise: str = "") -> str:
    return str(_ENGINES.get(engine, {}).get(name, otherwise))


def stable_of(engine: str) -> str:
    """The newest stable release if it is not the newest one of all, else empty."""
    return _fact(engine, "stable")


@cache
def dates_of(engine: str) -> list[tuple[str, str]]:
    """The day (ISO 8601) and the name of the known releases, oldest first. Empty for an engine without dates."""
    rows = (row.split() for row in _fact(engine, "released").split(", ") if row)
    return [(day, release) for day, release in rows]


def split_engine(engine: str) -> tuple[str, RequestedRelease | None]:
    """The name and the release in `vllm@0.12`.

    Without a release, it is the newest stable one, or None if that is the newest one of all. Raises UsageError (exit 2)
    for a release that is missing, or that cannot be read.
    """
    name, at, text = engine.partition("@")
    if not at:
        text = stable_of(name)
    return name, parse_release(name, text) if at or text else None


def release_of(engine: str) -> Release | None:
    """The place of the release in `vllm@0.12`. None means the newest. Raises UsageError as `split_engine` does."""
    stated = split_engine(engine)[1]
    return stated.release if stated else None


@lru_cache(maxsize=1024)
def parse_release(engine: str, text: str) -> RequestedRelease:
    """The release of `engine` that `text` names. Raises UsageError (exit 2), with an example, if it names none."""
    example = f"write {engine}@{_fact(engine, 'example', '0.19.0')}, {engine}@nightly or a date, {engine}@2026-05-01"
    folded = text.strip().casefold()
    if not folded:
        raise UsageError(f"--engine {engine}@: the release is missing", f"{example}, or {engine} for the newest")
    parsed = _parse(engine, folded) if len(folded) <= _LONGEST else None
    if parsed is None:
        raise UsageError(f"--engine {engine}@{text[:40]}: not a release", example)
    return parsed


def _parse(engine: str, text: str) -> RequestedRelease | None:
    if text in _NEWEST_STABLE:
        return RequestedRelease(text, _version(engine, stable_of(engine)) if stable_of(engine) else None)
    if text in _NEWEST:
        return RequestedRelease(text, None)
    container = re.fullmatch(_CONTAINER, text)
    if container is not None and dates_of(engine) and not _counts_builds(engine):
        text = f"20{container[1]}-{container[2]}"
    if re.fullmatch(_UNTAGGED, text):
        return RequestedRelease(text, None, is_placed=False)
    if re.fullmatch(_DATE, text) or re.fullmatch(_MONTH, text):
        day = _date(text) or _last_day(text)
        return _on(engine, text, day) if day else None
    # A tag may begin with the release, as in v0.5.9-cu129, or name the engine first, as in rocm7.0-vllm_0.11.1.
    spelled = _fact(engine, "spelled", re.escape(engine))
    named = re.search(rf"(?:^|[-_:/])(?:{spelled}|releases?)[-_:/= ]*(v?\d.*|b\d.*)", text)
    build = re.search(r"[-_](b\d+)(?:[-_]|$)", text) if _counts_builds(engine) else None
    for tag in (text, named[1] if named else "", build[1] if build else ""):
        while tag:
            release = _version(engine, tag)
            if release is not None:
                return RequestedRelease(text, release)
            tag = re.sub(r"(?:^|[-_])[^-_]*$", "", tag)
    # llama.cpp's Python package counts its own versions, which say nothing about the build.
    is_package = _counts_builds(engine) and "." in text and re.fullmatch(_VERSION, text) is not None
    if is_package or any(re.fullmatch(kind, text) for kind in (_COMMIT, _BRANCH, _COMPONENTS)):
        return RequestedRelease(text, None, is_placed=False)
    if re.fullmatch(_TAG, text, re.ASCII) and not re.fullmatch(_LIKE_A_NUMBER, text):
        return RequestedRelease(text, None, is_placed=False)
    return None


def _counts_builds(engine: str) -> bool:
    return bool(_fact(engine, "counts_builds"))


def _version(engine: str, text: str) -> Release | None:
    if _counts_builds(engine):
        build = re.fullmatch(_BUILD, text)
        return Release.of(int(build[1])) if build else None
    match = re.fullmatch(_VERSION, text)
    if match is None or match["numbers"] == "0":
        return None
    given = [int(part) for part in match["numbers"].split(".")]
    phase, of_phase, post, dev = _PHASES.get(match["phase"] or ""), match["of_phase"], match["post"], match["dev"]
    is_plain = phase is None and post is None and dev is None
    # "0.12" is the last release of that line, but "0.12rc1" came before all of them.
    numbers = [*given, *[_LAST if is_plain else 0] * (3 - len(given))]
    if phase is None:
        phase = _ONLY_DEVELOPMENT if dev is not None and post is None else 0
    return Release(
        (*numbers, *(0,) * (4 - len(numbers))),
        phase,
        int(of_phase or 0),
        0 if post is None else int(post or 0) + 1,
        _LAST if dev is None else int(dev or 0),
    )


def _date(text: str) -> date | None:
    match = re.fullmatch(_DATE, text)
    try:
        return date(int(match[1]), int(match[3]), int(match[4])) if match else None
    except ValueError:
        return None


def _last_day(text: str) -> date | None:
    """The last day of the month in `2025-10`."""
    match = re.fullmatch(_MONTH, text)
    try:
        first = date(int(match[1]), int(match[2]), 1) if match else None
    except ValueError:
        return None
    return None if first is None else (first + timedelta(days=31)).replace(day=1) - timedelta(days=1)


def _on(engine: str, text: str, day: date) -> RequestedRelease:
    """The newest release that was out on a day. For a day before the first known release, the oldest possible one."""
    known = dates_of(engine)
    if not known:
        return RequestedRelease(text, None, is_placed=False)
    out = [release for released, release in known if released <= day.isoformat()]
    place = _version(engine, out[-1]) if out else Release.of(0)
    return RequestedRelease(text, place, is_date=True)


def step_at(since: Sequence[Release], release: Release | None) -> int | None:
    """The index of the step that a release uses. `since` has the first release of every step, oldest first.

    The newest step for None. None if the release is older than every step: then the oldest step is the nearest one.
    """
    if release is None:
        return len(since) - 1
    reached = sum(first <= release for first in since)
    return reached - 1 if reached else None
