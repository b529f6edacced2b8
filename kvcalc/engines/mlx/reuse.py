"""mlx-lm's drafts: a draft model keeps the tokens of a request as the model does.

It must be able to trim the model's cache (speculative_generate_step, mlx_lm/generate.py). In mlx_lm.server, requests
wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.engines.prefixes import PLAIN, Matching
from kvcalc.engines.reuse import Reuse, one_sequence
from kvcalc.errors import UsageError
from kvcalc.model.drafting import DRAFT, Speculation
from kvcalc.model.spec import ModelSpec, has_states
from kvcalc.notes import Note
from kvcalc.releases import Release


class MlxReuse(Reuse):
    """mlx-lm's tiers, drafts and prefixes."""

    def check_drafts(self, speculation: Speculation, spec: ModelSpec, settings: Mapping[str, Any]) -> None:
        super().check_drafts(speculation, spec, settings)
        if speculation.method != DRAFT:
            raise UsageError(
                f"--speculative {speculation}: mlx drafts with a draft model only",
                f"use --speculative draft:{speculation.num_tokens} --draft-model MODEL, or another engine",
            )
        if has_states(spec):
            raise UsageError(
                f"--speculative {speculation}: mlx drafts no tokens for {spec.name}, "
                "whose recurrent states it cannot trim",
                "leave --speculative out, or use another engine",
            )

    def draft_notes(self, settings: Mapping[str, str]) -> tuple[Note, ...]:
        return one_sequence("mlx-lm drafts tokens for one sequence at a time: other requests wait")

    def matching(self, speculation: Speculation, spec: ModelSpec, release: Release | None, moved: str) -> Matching:
        return PLAIN
