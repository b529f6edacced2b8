"""Which modules the patterns in a quantisation config match. Each tool writes patterns in its own way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

_Entry = TypeVar("_Entry")

Match = Callable[[str], bool]
"""Whether the patterns match a module's name."""


def aliases(name: str) -> tuple[str, ...]:
    """A module's name, and its names inside a multimodal model, where the prefix differs between releases."""
    if name.startswith("model."):
        return (name, f"language_model.{name}", f"model.language_model.{name[6:]}")
    return (name, f"language_model.{name}")


def transformers_match(patterns: Sequence[str]) -> Match:
    """Match like modules_to_not_convert.

    A pattern is a regular expression that matches the start of a name up to a module boundary, or a literal end of a
    name. Source: should_convert_module, Transformers 5.23.0. Answers are remembered, because a search for what fits
    asks for the same names of all layers many times.
    """
    return _transformers_match(tuple(patterns))


@lru_cache(maxsize=8)
def _transformers_match(ends: tuple[str, ...]) -> Match:
    starts = [pattern for pattern in ends if _is_plain(pattern)]
    whole, prefixes = frozenset(starts), tuple(start if start.endswith(".") else f"{start}." for start in starts)
    regex = _regex_match([pattern for pattern in ends if not _is_plain(pattern)], _module_match)
    return lru_cache(maxsize=2**16)(
        lambda name: any(n in whole or n.startswith(prefixes) or n.endswith(ends) or regex(n) for n in aliases(name))
    )


def compressed_match(patterns: Sequence[str], class_names: Iterable[str]) -> Match:
    """Match like the targets and ignore lists of compressed-tensors.

    A pattern is a module name, `re:` followed by a regular expression, or a class name.
    Source: match_name and is_match, compressed-tensors 0.20.
    """
    classes = frozenset(class_names)
    if any(pattern in classes for pattern in patterns):
        return lambda name: True
    whole = frozenset(patterns)
    regex = _regex_match([pattern[3:] for pattern in patterns if pattern.startswith("re:")], _compile)
    return lambda name: any(n in whole or regex(n) for n in aliases(name))


def glob_match(patterns: Sequence[str]) -> Match:
    """Match like the ignore and exclude_modules lists of modelopt: shell patterns, or a module and its submodules."""
    plain = [pattern for pattern in patterns if "*" not in pattern]
    # The most common form by far is a name that ends in a star.
    stars = tuple(p[:-1] for p in patterns if p.endswith("*") and "*" not in p[:-1])
    others = [p for p in patterns if "*" in p and not (p.endswith("*") and "*" not in p[:-1])]
    whole, prefixes = frozenset(plain), (*stars, *(f"{name}." for name in plain))
    if not others:
        return lambda name: any(n in whole or n.startswith(prefixes) for n in aliases(name))
    import re
    from fnmatch import translate

    # fnmatch writes expressions that never try a star again, so `re` is as safe here as RE2.
    search = re.compile("|".join(map(translate, others))).match
    return lambda name: any(n in whole or n.startswith(prefixes) or search(n) for n in aliases(name))


def nearest_entry(name: str, table: Mapping[str, _Entry]) -> _Entry | None:
    """The entry of `table` for a module or for its closest parent module. Experts are listed as one module."""
    for alias in aliases(name):
        while alias:
            if alias in table:
                return table[alias]
            alias = alias.rpartition(".")[0]
    return None


def _is_plain(pattern: str) -> bool:
    """Whether a pattern is a name. Files list thousands of them, whose dots stand for no other sign."""
    return not any(char in pattern for char in "*+?[](){}|^$\\") and not pattern.startswith(".") and ".." not in pattern


def _module_match(expression: str) -> Match:
    """Match the start of a name up to a module boundary: a dot, or the end of the name."""
    before = _compile(rf"(?:{expression})(?:\.|$)")
    # The match may also end behind a dot. RE2 has no lookbehind, so the name is cut one character behind the dot.
    behind = _compile(rf"(?:{expression}).$")
    return lambda name: before(name) or any(behind(name[: i + 2]) for i, char in enumerate(name) if char == ".")


def _regex_match(patterns: Iterable[str], compile_: Callable[[str], Match]) -> Match:
    """Match any regular expression of a config, which `compile_` compiles. ValueError with one that is not modelled."""
    plain, others = [], []
    for pattern in patterns:
        lookaheads, rest = _split_lookaheads(pattern)
        try:
            # Python's `re`, which the engines use, reads x{,5} and [[:alpha:]] differently.
            if "{," in pattern or "[:" in pattern:
                raise ValueError
            tests = [(_compile(expression), wanted) for expression, wanted in lookaheads]
            match = compile_(rest)
        except ValueError:
            raise ValueError(pattern) from None
        if tests:
            others.append((match, tests))
        else:
            plain.append(f"(?:{rest})")
    if plain:
        others.append((compile_("|".join(plain)), []))
    return lambda name: any(
        match(name) and all(test(name) is wanted for test, wanted in tests) for match, tests in others
    )


# An escape, a class, or any other character.
_PIECE = r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|$)|."


def _split_lookaheads(pattern: str) -> tuple[list[tuple[str, bool]], str]:
    """The lookaheads at the start of a pattern such as `^(?!.*experts).*`, and the rest of the pattern.

    A lookahead is its expression and whether a name must match it. RE2 knows no lookaheads, but at the start of a match
    they are expressions of their own. Others stay in the rest.
    """
    lookaheads: list[tuple[str, bool]] = []
    start, depth = int(pattern.startswith("^")), 0
    if not pattern.startswith(("(?!", "(?="), start):
        return [], pattern
    import re

    for token in re.finditer(_PIECE, pattern, re.DOTALL):
        if token[0] == "|" and depth == 0:
            return [], pattern
        depth += (token[0] == "(") - (token[0] == ")")
        if token[0] == ")" and depth == 0 and pattern.startswith(("(?!", "(?="), start):
            lookaheads.append((pattern[start + 3 : token.start()], pattern[start + 2] == "="))
            start = token.end()
    return lookaheads, pattern[start:]


def _compile(expression: str) -> Match:
    """Match the start of a name, in time proportional to its length. ValueError if RE2 refuses the expression.

    The names of modules are ASCII and have no line breaks; therefore `$`, `\\w` and `\\b` mean the same as in Python.
    """
    import re2

    options = re2.Options()
    options.log_errors, options.never_capture = False, True
    try:
        match = re2.compile(expression, options).match
    except (re2.error, UnicodeEncodeError):
        raise ValueError(expression) from None
    return lambda name: match(name) is not None
