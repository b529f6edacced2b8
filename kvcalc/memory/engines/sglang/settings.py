"""SGLang's own options, as it spells them, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from kvcalc.memory.engines.options import Given
from kvcalc.units import parse_tokens

VERSION = "0.5.23"


class Settings(NamedTuple):
    """`max_running_requests` follows the memory where it is not given, and with it the request table: not counted then.

    `max_mamba_cache_size` is the number of states, one for each sequence where it is not given.
    """

    page_size: int
    swa_full_tokens_ratio: float
    max_running_requests: int | None
    context_length: int | None
    max_mamba_cache_size: int | None

    @property
    def ratio(self) -> Fraction:
        """The window pool's share of the full pool's tokens, as it was written."""
        return _as_written(self.swa_full_tokens_ratio)


@lru_cache(maxsize=64)
def _as_written(ratio: float) -> Fraction:
    return Fraction(str(ratio))


def parse_settings(settings: Mapping[str, str], default_page_size: int) -> Settings:
    """The options given, each checked. Raises UsageError (exit 2)."""
    given = Given("sglang", settings)
    context = parse_tokens(settings["context-length"], "--context-length") if "context-length" in settings else None
    return Settings(
        given.count("page-size", default_page_size),
        given.share("swa-full-tokens-ratio"),
        given.optional_count("max-running-requests"),
        context,
        given.optional_count("max-mamba-cache-size"),
    )
