"""Drafts of Transformers' `generate`, which starts every call with an empty cache.

It drafts with a draft model (assistant_model) or n-grams (prompt_lookup_num_tokens), and refuses a batch then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.engines.reuse import Reuse, one_sequence
from kvcalc.errors import UsageError
from kvcalc.model.drafting import DRAFT, NGRAM, Speculation
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note


class TransformersReuse(Reuse):
    """Transformers' tiers, drafts and prefixes."""

    def check_hits(self, option: str, spec: ModelSpec) -> None:
        raise UsageError(f"{option}: transformers has no prefix cache", "leave it out, or use another engine")

    def check_drafts(self, speculation: Speculation, spec: ModelSpec, settings: Mapping[str, Any]) -> None:
        super().check_drafts(speculation, spec, settings)
        if speculation.method not in (DRAFT, NGRAM):
            raise UsageError(
                f"--speculative {speculation}: transformers drafts with a draft model or n-grams only",
                f"use --speculative ngram:{speculation.num_tokens}, or another engine",
            )

    def draft_notes(self, settings: Mapping[str, str]) -> tuple[Note, ...]:
        return one_sequence("transformers drafts tokens for one sequence at a time: it refuses a larger batch")
