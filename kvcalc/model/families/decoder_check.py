"""The check of the rows of presets/types/decoders.yaml, when kvcalc is built and in its tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcalc.model.experts import Experts
from kvcalc.model.families.decoder_table import Decoder
from kvcalc.model.families.window_patterns import pattern_of


def _is_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_table(value: object) -> bool:
    match value:
        case [str(), [*keys], int(), int()]:
            return _is_list(keys)
    return False


def _is_whole(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _is_made_by(make: Callable[[Any], object]) -> Callable[[object], bool]:
    def is_made(value: object) -> bool:
        try:
            make(value)
        except (AttributeError, KeyError, TypeError, ValueError):
            return False
        return True

    return is_made


_MADE: dict[str, Callable[[object], bool]] = {
    "mlp": lambda value: value in ("gated", "fused", "plain", "xielu"),
    "qk_norm": lambda value: value in ("", "head", "head_bias", "width"),
    "slides": _is_made_by(pattern_of),
    "experts": _is_made_by(lambda value: Experts(**value)),
    "tables": lambda value: isinstance(value, list) and all(map(_is_table, value)),
    "mlp_names": lambda value: _is_list(value) and len(value) == 2,  # type: ignore[arg-type]  # a list by then
}
_OF_TYPE: dict[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "bool | str": lambda value: isinstance(value, (bool, str)),
    "int | None": _is_whole,
    "tuple[str, ...]": _is_list,
    "frozenset[str] | None": _is_list,
    "Mapping[str, str]": lambda value: _is_mapping(value) and all(isinstance(item, str) for item in value.values()),  # type: ignore[attr-defined]
    "Mapping[str, int]": lambda value: _is_mapping(value) and all(map(_is_whole, value.values())),  # type: ignore[attr-defined]
    "Mapping[str, object]": _is_mapping,
    "Mapping[str, Any]": _is_mapping,
}
_CHECKS: dict[str, Callable[[object], bool]] = {
    **{name: _MADE.get(name) or _OF_TYPE[kind] for name, kind in Decoder.__annotations__.items()},
    "bias": _OF_TYPE["bool | str"],
    **dict.fromkeys(("kv_heads", "head_dim", "window", "intermediate_size"), lambda value: type(value) is int),
    **dict.fromkeys(("like", "gguf"), lambda value: isinstance(value, str) or _is_list(value)),
}


def check_rows(rows: Mapping[str, Any]) -> None:
    """Raise ValueError for a row with an unknown field, a value of another type, or a row that comes after it."""
    before: set[str] = set()
    for name, own in rows.items():
        if not _is_mapping(own):
            raise ValueError(f"{name} is not a mapping")
        for field, value in own.items():
            if field not in _CHECKS:
                raise ValueError(f"{name} has no {field}: its fields are {', '.join(sorted(_CHECKS))}")
            if not _CHECKS[field](value):
                raise ValueError(f"{name}: {field} cannot be {value!r}")
        like = own.get("like", [])
        for other in [like] if isinstance(like, str) else like:
            if other not in before:
                raise ValueError(f"{name} is like {other}, which is not above it")
        before.add(name)
