"""Parses YAML text into a plain mapping. Only the simple part of YAML is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvcalc.errors import ModelError, UsageError

_MAX_DEPTH = 32
_LONG_NUMBER = re.compile(r"[-+]?\d[\da-fA-Fx_]{1000}")
# Numbers that PyYAML reads and YAML 1.2 has not: octal ones (010 is 8), those to the base of 60 (1:30 is 90), binary
# ones (0b1), and those with underscores (1_000).
_OLD_NUMBER = re.compile(
    r"""[-+]?(?: 0[0-9_]+ | 0b[01_]+ | 0x[0-9a-fA-F_]*_[0-9a-fA-F_]* | [0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?
    | \.?[0-9][0-9_.]*_[0-9_.]*(?:[eE][-+][0-9]+)? )""",
    re.VERBOSE,
)


def parse_mapping(text: str, name: str) -> dict[object, object]:
    """YAML text as a mapping of plain data. `name` is the file's name in messages.

    The parser's events are checked before anything is built: deep nesting can crash PyYAML, which recurses in C;
    aliases share their data, which YAML bombs use; and of duplicate keys it silently keeps the last. Raises UsageError
    (exit 2) if the text is not such YAML, and ModelError (exit 3) if a key appears twice.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(text, Loader=loader), yaml, name)
        data = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader: plain data, no objects
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{name}: not YAML{where}: {getattr(error, 'problem', None) or 'unreadable'}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{name}: not a mapping of keys to values")
    return data


def mapping_text(mapping: Mapping[str, object]) -> str:
    """YAML text of a mapping of plain data, which `parse_mapping` reads back."""
    import yaml

    return str(yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True, width=100))


def _check_events(events: object, yaml: object, name: str) -> None:
    """Raise an error for anchors, aliases, tags, duplicate keys and deep nesting."""
    levels: list[_Level] = []
    for event in events:  # type: ignore[attr-defined]  # yaml.parse is untyped
        kind = type(event).__name__
        if kind == "AliasEvent" or getattr(event, "anchor", None) is not None:
            raise UsageError(f"{name}: anchors and aliases (&, *) are not allowed", "write the value out")
        if getattr(event, "tag", None) is not None:
            raise UsageError(f"{name}: tags (!) are not allowed", "write plain values")
        if kind in ("MappingEndEvent", "SequenceEndEvent"):
            levels.pop()
        elif kind in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent"):
            if levels and levels[-1].next_is_key():
                key = getattr(event, "value", None)
                if key in levels[-1].keys:
                    line = event.start_mark.line + 1
                    raise ModelError(f"{name}: key {key!r} appears twice, the second time on line {line}")
                levels[-1].keys.add(key)
            if kind == "ScalarEvent" and not event.style and _LONG_NUMBER.match(event.value):
                line = event.start_mark.line + 1
                raise UsageError(f"{name}: line {line}: a number has at most 1,000 digits")
            if kind == "ScalarEvent" and not event.style and _OLD_NUMBER.fullmatch(event.value):
                line = event.start_mark.line + 1
                raise UsageError(
                    f"{name}: line {line}: {event.value[:40]} is a different number in YAML 1.1 than in YAML 1.2",
                    "write it in decimal digits, or in quotes if it is text",
                )
            if kind != "ScalarEvent":
                levels.append(_Level(is_mapping=kind == "MappingStartEvent"))
                if len(levels) > _MAX_DEPTH:
                    raise UsageError(f"{name}: nested more than {_MAX_DEPTH} levels deep")


class _Level:
    """An open mapping or sequence while events are checked: its keys so far, and whether a key comes next."""

    def __init__(self, is_mapping: bool) -> None:
        self.is_mapping = is_mapping
        self.keys: set[object] = set()
        self.at_key = False

    def next_is_key(self) -> bool:
        """Go past one node, and say whether that node is a mapping's key."""
        self.at_key = self.is_mapping and not self.at_key
        return self.at_key
