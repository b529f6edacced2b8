"""What changed between vLLM's releases: one set of rules for each run of releases that count alike.

Read from the wheels of 0.7.3, 0.8.5, 0.9.0 to 0.9.2, 0.10.0, 0.10.2, 0.11.0 to 0.14.0, 0.16.0 to 0.28.0 and 0.33.0
(v1/core/kv_cache_utils.py, v1/kv_cache_interface.py, model_executor/models/config.py, platforms/interface.py).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from kvcalc.errors import ModelError, UsageError

NEWEST = (0, 33)


class Rules(NamedTuple):
    """The rules of every release from `since` on.

    `windows`: whether layers of a window keep it alone: never (V0), where all layers have it, or always (the hybrid
    manager). `chunks`: whether chunked layers have a kind of their own. `padding_ratio`: kinds of layers are padded to
    the commonest's number where that is below so many times the rarest's; 0 never. `unifies`: whether pages of
    different sizes can stand in one pool; `pads`: whether by padding too. `states`: whether states are counted here.
    `mla_block`: the least block of MLA beside states. `tokens`: what is printed as the cache's size: by blocks, by the
    blocks of one group, or by requests. `two_steps`: whether a second step in flight is reserved for.
    """

    since: tuple[int, int, int]
    windows: str = "always"
    chunks: bool = True
    padding_ratio: Fraction = Fraction(3, 2)
    unifies: bool = True
    pads: bool = True
    states: bool = True
    mla_block: int = 128
    tokens: str = "requests"
    two_steps: bool = True

    @property
    def release(self) -> str:
        """The first release of these rules, as `rules_of` takes it."""
        major, minor, patch = self.since
        return f"{major}.{minor}.{patch}" if patch else f"{major}.{minor}"

    @property
    def name(self) -> str:
        return f"vLLM {self.release} and later" if self.since > (0, 0, 0) else "vLLM before 0.8"


# The newest first.
RELEASES: list[Rules] = [Rules((0, 27, 0))]


def _before(since: tuple[int, int, int], **changes: Any) -> None:
    """The rules of older releases: those of the next newer ones but for `changes`."""
    RELEASES.append(RELEASES[-1]._replace(since=since, **changes))


_before((0, 26, 0), mla_block=64)
_before((0, 25, 0), two_steps=False)
_before((0, 21, 0), pads=False)
_before((0, 18, 0), tokens="group")
_before((0, 12, 0), padding_ratio=Fraction(5, 4))
_before((0, 11, 0), padding_ratio=Fraction(0), unifies=False)
_before((0, 10, 0), states=False)
_before((0, 9, 1), chunks=False)
_before((0, 8, 0), windows="alone", tokens="blocks")
_before((0, 0, 0), windows="never")


def rules_of(version: str | None) -> Rules:
    """The rules of release `version` ("0.11", "0.9.2"), of the newest where None. A release without its patch is its
    last one. Raises UsageError (exit 2) for what is no release, ModelError (exit 3) for one newer than was read."""
    if version is None:
        return RELEASES[0]
    parts = version.removeprefix("v").split(".")
    if not 2 <= len(parts) <= 3 or not all(part.isdecimal() and len(part) < 4 for part in parts):
        raise UsageError(f"--engine vllm@{version[:20]}: not a release", "write vllm@0.11 or vllm@0.9.2")
    numbers = tuple(map(int, parts))
    if numbers[:2] > NEWEST:
        raise ModelError(f"--engine vllm@{version}: read up to {NEWEST[0]}.{NEWEST[1]}", "leave the version out")
    asked = (*numbers, 999) if len(numbers) == 2 else numbers
    return next(rules for rules in RELEASES if asked >= rules.since)


def is_newest(version: str | None) -> bool:
    """Whether `version`, which `rules_of` took, is of the newest release read."""
    return version is None or tuple(map(int, version.removeprefix("v").split(".")[:2])) == NEWEST
