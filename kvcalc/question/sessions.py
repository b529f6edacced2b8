"""Sessions whose requests repeat what was said before: `turns:8,growth:1500,think:20s`."""

from __future__ import annotations

from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple
from kvcalc.units import parse_seconds, parse_tokens

_EXAMPLE = "for example turns:8,growth:1500,think:20s"


class Sessions(NamedTuple):
    """Sessions of `turns` turns. Each turn has the context of the one before, and `growth_tokens` more.

    The first turn has the prompt of the load. A client thinks for `think_seconds` on average before the next turn.
    """

    turns: int
    growth_tokens: int
    think_seconds: float = 0.0

    def repeated_share(self, mean_tokens: float) -> float:
        """The share of the prompts' tokens that the turns before had. `mean_tokens` are those of a prompt."""
        new_tokens = mean_tokens + (self.turns - 1) * self.growth_tokens / 2  # those of the last turn
        return 1 - new_tokens / (self.turns * mean_tokens)


def parse_sessions(text: str, option: str) -> Sessions:
    """The sessions in a text. UsageError (exit 2) for another text."""
    parts = dict(part.strip().partition(":")[::2] for part in text.split(","))
    if not {"turns", "growth"} <= parts.keys() <= {"turns", "growth", "think"}:
        raise UsageError(f"{option} {text[:60]!a}: not the turns and the growth of sessions", _EXAMPLE)
    turns, growth = (parse_tokens(parts[name], f"{option} {name}") for name in ("turns", "growth"))
    return Sessions(turns, growth, parse_seconds(parts["think"], f"{option} think") if "think" in parts else 0.0)
