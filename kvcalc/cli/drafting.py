"""Turn the options for speculative decoding and prefix hits into values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.errors import UsageError
from kvcalc.units import parse_count

if TYPE_CHECKING:
    from kvcalc.model.drafting import Speculation
    from kvcalc.model.spec import ModelSpec

_HINT = "METHOD:N, for example --speculative mtp:3 --acceptance-length 2.4"


def speculation_of(given: Mapping[str, Any], load: Callable[[str], ModelSpec]) -> Speculation | None:
    """How tokens are drafted, or None if they are not. `load` reads the draft model.

    Raises UsageError (exit 2) for an unreadable value, or for an option that has no effect without --speculative.
    """
    text = given.get("speculative")
    if text is None:
        for name in ("acceptance_length", "draft_model"):
            if given.get(name) is not None:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} {given[name]}: needs --speculative", _HINT)
        return None
    from kvcalc.model.drafting import SAME_METHODS, Speculation
    from kvcalc.planning.drafting import check_speculation

    method, colon, number = text.strip().casefold().partition(":")
    if not colon:
        raise UsageError(f"--speculative {text[:40]}: the number of drafted tokens is missing", _HINT)
    method = SAME_METHODS.get(method, method)
    tokens = 0 if number == "0" else parse_count(number, "--speculative")
    length, model = given.get("acceptance_length"), given.get("draft_model")
    asked = Speculation(method[:40], tokens, None if length is None else _number(length, "--acceptance-length", "2.4"))
    if model is None:
        check_speculation(asked, has_device=False)
        return asked
    return asked._replace(draft_model=load(model))


def hit_rate_of(given: Mapping[str, Any]) -> float:
    """The share of a prompt's tokens that the prefix cache has: `0.3` or `30%`. 0 if the option is not given."""
    text = given.get("prefix_hit_rate")
    if text is None:
        return 0.0
    option = "--prefix-hit-rate"
    rate = _number(text.removesuffix("%"), option, "0.3 or 30%") / (100 if text.endswith("%") else 1)
    if not 0 <= rate < 1:
        raise UsageError(f"{option} {text}: must be at least 0 and below 1", "for example --prefix-hit-rate 0.3")
    return rate


def _number(text: str, option: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    # The comparison is false for nan.
    if not abs(value) < 1e9:
        raise UsageError(f"{option} {text[:40]!a}: not a number", f"for example {option} {example}")
    return value
