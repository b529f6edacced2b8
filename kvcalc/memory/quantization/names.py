"""Which modules a quantisation config means, by the patterns its tool writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

_Entry = TypeVar("_Entry")

Match = Callable[[str], bool]
"""Whether a module's name is meant."""


def aliases(name: str) -> tuple[str, ...]:
    """A module's name, and what it is called inside a multimodal model: the prefix differs from release to release."""
    if name.startswith("model."):
        return (name, f"language_model.{name}", f"model.language_model.{name[6:]}")
    return (name, f"language_model.{name}")


def transformers_match(patterns: Sequence[str]) -> Match:
    """As modules_to_not_convert is read: a start up to a module's border (a regular expression), or any end.

    Source: should_convert_module, Transformers 5.23.0.
    """
    ends = tuple(patterns)
    starts = [pattern for pattern in patterns if _is_plain(pattern)]
    whole, prefixes = frozenset(starts), tuple(f"{start}." for start in starts)
    search = _compile([rf"(?:{p})(?:(?<=\.)|(?=\.|$))" for p in patterns if not _is_plain(p)])
    return lambda name: any(
        n in whole or n.startswith(prefixes) or n.endswith(ends) or search(n) for n in aliases(name)
    )


def compressed_match(patterns: Sequence[str], class_names: Iterable[str]) -> Match:
    """As compressed-tensors reads targets and ignore: a name, `re:` and an expression, or the name of the class.

    Source: match_name and is_match, compressed-tensors 0.20.
    """
    classes = frozenset(class_names)
    if any(pattern in classes for pattern in patterns):
        return lambda name: True
    whole = frozenset(patterns)
    search = _compile([f"(?:{pattern[3:]})" for pattern in patterns if pattern.startswith("re:")])
    return lambda name: any(n in whole or search(n) for n in aliases(name))


def glob_match(patterns: Sequence[str]) -> Match:
    """As modelopt reads ignore and exclude_modules: shell patterns, or a module with all that is in it."""
    plain = [pattern for pattern in patterns if "*" not in pattern]
    # By far the most: a name and a star at its end.
    stars = tuple(p[:-1] for p in patterns if p.endswith("*") and "*" not in p[:-1])
    others = [p for p in patterns if "*" in p and not (p.endswith("*") and "*" not in p[:-1])]
    whole, prefixes = frozenset(plain), (*stars, *(f"{name}." for name in plain))
    search = _compile([])
    if others:
        from fnmatch import translate

        search = _compile([translate(pattern) for pattern in others])
    return lambda name: any(n in whole or n.startswith(prefixes) or search(n) for n in aliases(name))


def nearest_entry(name: str, table: Mapping[str, _Entry]) -> _Entry | None:
    """What `table` holds for a module, or for the closest module it stands in (experts are listed as one)."""
    for found in aliases(name):
        while found:
            if found in table:
                return table[found]
            found = found.rpartition(".")[0]
    return None


def _is_plain(pattern: str) -> bool:
    return not any(char in pattern for char in "*+?[](){}|^$\\")


def _compile(expressions: list[str]) -> Callable[[str], object]:
    """One expression for all, matched from the start; ValueError where one is no regular expression."""
    if not expressions:
        return lambda name: None
    import re

    try:
        return re.compile("|".join(expressions)).match
    except re.error as error:
        raise ValueError(str(error)) from None
