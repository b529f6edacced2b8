"""Differences between vLLM's releases: one set of rules for each run of releases with the same behaviour.

Source: the wheels of 0.7.3, 0.8.5, 0.9.0 to 0.9.2, 0.10.0, 0.10.2, and of every release from 0.11.0 to 0.33.0
(v1/core/kv_cache_utils.py, v1/kv_cache_interface.py, model_executor/models/config.py, platforms/interface.py).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from kvcalc.engines.declarations import table
from kvcalc.records import NamedTuple
from kvcalc.releases import Release, RequestedRelease, parse_release

NEWEST = (0, 33)


class Rules(NamedTuple):
    """The rules of all releases from `since` onwards.

    - `windows`: when windowed layers keep only the window: "never" (V0), "alone" (only if all layers have the window),
      or "always" (the hybrid manager).
    - `chunks`: whether chunked layers have a kind of their own.
    - `padding_ratio`: groups are padded to the size of the most common kind of layer if that has fewer layers than this
      ratio times the rarest kind. 0 means never.
    - `unifies`: whether pages of different sizes can share a pool.
    - `pads`: whether pages may be padded for this.
    - `states`: whether recurrent states are modelled.
    - `mla_block`: the smallest block of MLA in a model with states.
    - `hybrid_prefixes`: whether prefix caching is on by default in a model with attention and states.
    - `state_per_block`: the kinds of recurrences (`Recurrence.kind`) that then keep a state for every block of tokens
      (mamba_cache_mode `all`). The others keep the newest states (`align`).
    - `has_mode_align`: whether the others can cache prefixes at all.
    - `drafts_align`: whether all kinds keep the newest states if there are drafts.
    - `has_mode_all`: whether --mamba-cache-mode all asks for this, if it is not the default.
    - `checkpoints`: the kinds that then keep one more state, written in the middle of a prefill.
    - `packing`: how pages of different sizes lie in a block (`packed.py`). "" in releases that do not run DeepSeek-V4.
    - `bills`: what a stage must have memory for before vLLM starts: a request in its own layers ("stage"), a request in
      all layers of the model ("all layers"; get_kv_cache_configs of 0.14 to 0.16), or as many requests as there are
      stages ("stages"). In V0, a scheduler for every stage has its part of the blocks (raise_if_cache_size_invalid,
      worker/worker.py, 0.9.2).
    - `tokens`: how vLLM computes the printed cache size: from "blocks", from the blocks of one "group", or from
      "requests".
    - `two_steps`: whether vLLM reserves memory for a second step in flight.
    - `overlaps_stages`: whether it does so with pipeline stages too, as the newer model runner does. Before 0.29, only
      some architectures used that (use_v2_model_runner, config/vllm.py).
    """

    since: tuple[int, int, int]
    windows: str = "always"
    chunks: bool = True
    padding_ratio: Fraction = Fraction(3, 2)
    unifies: bool = True
    pads: bool = True
    states: bool = True
    mla_block: int = 128
    packing: str = "buckets"
    bills: str = "stage"
    tokens: str = "requests"
    two_steps: bool = True
    overlaps_stages: bool = True
    hybrid_prefixes: bool = True
    state_per_block: tuple[str, ...] = ()
    has_mode_align: bool = True
    drafts_align: bool = False
    has_mode_all: bool = False
    checkpoints: tuple[str, ...] = ("linear", "delta")

    @property
    def release(self) -> str:
        """The first release with these rules, in the form that `rules_of` accepts.

        Without its patch number it means the last patch release, which may have newer rules.
        """
        major, minor, patch = self.since
        short = f"{major}.{minor}"
        return f"{short}.{patch}" if patch or rules_of(short).since != self.since else short

    @property
    def name(self) -> str:
        return f"vLLM {self.release} and later" if self.since > (0, 0, 0) else "vLLM before 0.8"

    @property
    def first(self) -> Release:
        """The first release with these rules, as a place in vLLM's history."""
        return Release.of(*self.since)


def _newest_first() -> list[Rules]:
    """The rules of every run of releases, by `releases.yaml`."""
    rules: list[Rules] = []
    for row in table("vllm", "releases")["releases"]:
        stated: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        stated["since"] = tuple(map(int, row["since"].split(".")))
        if "padding_ratio" in row:
            stated["padding_ratio"] = Fraction(row["padding_ratio"])
        rules.append(rules[-1]._replace(**stated) if rules else Rules(**stated))
    return rules


RELEASES = _newest_first()


def rules_of(version: str | None) -> Rules:
    """The rules of release `version` ("0.11", "0.9.2", "nightly", "2026-05-01"), or of the newest release if None.

    A version without a patch number means its last patch release. A release candidate is older than its release. A
    release newer than the newest modelled one has the newest rules. Raises UsageError (exit 2) if `version` is not a
    release.
    """
    if version is None:
        return RELEASES[0]
    release = parse_release("vllm", version).release
    return next(rules for rules in RELEASES if release is None or release >= rules.first)


def is_known(requested: RequestedRelease) -> bool:
    """Whether `requested` names a release, or its date, and is not newer than the newest modelled release."""
    return requested.release is None or requested.release.numbers[:2] <= NEWEST
