"""SGLang's own options, as it spells them, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from kvcalc.errors import UsageError
from kvcalc.units import parse_count, parse_tokens

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


def parse_settings(given: Mapping[str, str], default_page_size: int) -> Settings:
    """The options given, each checked. Raises UsageError (exit 2)."""

    def number(option: str) -> int | None:
        return parse_count(given[option], f"--{option}") if option in given else None

    context = parse_tokens(given["context-length"], "--context-length") if "context-length" in given else None
    return Settings(
        number("page-size") or default_page_size,
        _ratio(given.get("swa-full-tokens-ratio", "0.8")),
        number("max-running-requests"),
        context,
        number("max-mamba-cache-size"),
    )


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise UsageError(f"--swa-full-tokens-ratio {text[:40]!a}: must be above 0 and at most 1")
    return ratio
