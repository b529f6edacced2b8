"""How engines reuse caches and tokens: prefixes, slower tiers of memory, and drafts.

`Engine.reuse` gives the rules of an engine. Those of one device's cache are in `Prefixes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.engines.prefixes import PLAIN, Matching
from kvcalc.errors import UsageError
from kvcalc.model.caches import IndexerKeys, LatentAttention
from kvcalc.model.drafting import DFLASH, EAGLE, EAGLE1, MTP, NGRAM, Speculation
from kvcalc.model.spec import ModelSpec, all_caches
from kvcalc.notes import Note

if TYPE_CHECKING:
    from kvcalc.releases import Release

CPU, DISK, REMOTE = "cpu", "disk", "remote"
TIERS = (CPU, DISK, REMOTE)
OF_HIDDEN_STATES = (MTP, EAGLE, EAGLE1)
"""The methods whose drafter reads the hidden state of a token."""


class Reuse:
    """The rules of the engine that is called `engine`.

    `tiers` are those that it has. With `keeps_one_copy`, a tier keeps rows that every device has in full (MLA) once for
    all devices. With `copies_at_once`, a block is copied to the next tier when it is computed, so that a tier also has
    what the tiers before it have; else it moves there when it is evicted. A tier rounds the bytes of a block up to a
    multiple of `tier_page_bytes`.

    `draft_option` is the setting for the number of drafted tokens, on which recurrent states depend, and `checked_more`
    is what it counts beyond them. `ngram_settings` are the settings that drafting with n-grams adds.
    """

    tiers: tuple[str, ...] = ()
    keeps_one_copy = False
    copies_at_once = False
    tier_page_bytes = 1
    draft_option: str | None = None
    checked_more = 0
    ngram_settings: Mapping[str, str] = {}
    drafts_with_dflash = False

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def check_hits(self, option: str, spec: ModelSpec) -> None:
        """Raise UsageError (exit 2) if the engine finds no prompts of this model in its cache."""

    def tier_copies(self, spec: ModelSpec, share: ModelSpec, ranks: int) -> int:
        """The devices whose bytes a tier keeps. `share` is the part of `spec` on one of them, with drafting layers."""
        return 1 if self.keeps_one_copy and is_latent(share) else ranks

    def check_drafts(self, speculation: Speculation, spec: ModelSpec, settings: Mapping[str, Any]) -> None:
        """Raise UsageError (exit 2) for a method that the engine does not have, or not for this model or layout."""
        if speculation.method == DFLASH and not self.drafts_with_dflash:
            raise UsageError(
                f"--speculative {speculation}: DFlash is not modelled for {self.engine}",
                "use --engine vllm, sglang or tensorrt-llm",
            )

    def draft_settings(self, speculation: Speculation, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """The engine's settings, with those that drafting adds. UsageError (exit 2) if they contradict it."""
        name = self.draft_option
        if name is None:
            return settings
        tokens, given = str(speculation.num_tokens + self.checked_more), settings.get(name)
        if given not in (None, tokens):
            raise UsageError(f"--{name} {given} contradicts --speculative {speculation}", f"remove --{name}")
        return {**(self.ngram_settings if speculation.method == NGRAM else {}), **settings, name: tokens}

    def draft_notes(self, settings: Mapping[str, str]) -> tuple[Note, ...]:
        """Notes about drafting that a user may not expect."""
        return ()

    def matching(self, speculation: Speculation, spec: ModelSpec, release: Release | None, moved: str) -> Matching:
        """The prefixes that the engine finds while it drafts. `moved` is the option that moves them, or empty.

        UsageError (exit 2) if that is not known for the method.
        """
        raise UsageError(
            f"--speculative {speculation}: which prefixes {self.engine} finds again with these drafts is not modelled",
            "leave --speculative out, or use --engine vllm or sglang",
        )


class FormulaReuse(Reuse):
    """The formula: every tier and every way to draft."""

    tiers: tuple[str, ...] = TIERS
    keeps_one_copy = True
    drafts_with_dflash = True

    def matching(self, speculation: Speculation, spec: ModelSpec, release: Release | None, moved: str) -> Matching:
        return PLAIN


def is_latent(spec: ModelSpec) -> bool:
    """Whether every device has all rows: MLA, with or without index keys."""
    return all(isinstance(cache, (LatentAttention, IndexerKeys)) for cache in all_caches(spec))


def one_sequence(text: str) -> tuple[Note, ...]:
    """The note about an engine that drafts for one sequence at a time."""
    return (Note("speculative", "one-sequence", text),)
