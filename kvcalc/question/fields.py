"""The fields of a question, and the other values that the commands and the Python functions take.

fields.yaml declares each of them once, with one of the `TYPES` here. A command makes its options from them
(`kvcalc.cli.options`), `kvcalc batch` its keys from the options, and a Python function the checks of its arguments
(`kvcalc.api.arguments`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from kvcalc.errors import UsageError, nearest
from kvcalc.model.presets import shipped_mapping
from kvcalc.question.sessions import parse_sessions
from kvcalc.units import (
    check_count,
    check_text,
    parse_bandwidth,
    parse_count,
    parse_flops,
    parse_network,
    parse_pcie,
    parse_rate,
    parse_requests,
    parse_seconds,
    parse_size,
    parse_tokens,
    parse_vllm_integer,
    parse_watts,
    shown,
)

Check = Callable[[object, str], None]
"""Raises UsageError (exit 2) for a value from Python that belongs to the field of this name."""
Parse = Callable[[str, str], Any]
"""The value in the text of the option of this name. Raises UsageError (exit 2)."""

# The command line reads no number with more digits.
_MOST = 1e64


class ValueType:
    """What a value is: the check of one from Python, and the value in an option's text, unless the text needs more."""

    # A start makes these two classes. A named tuple takes ten times as long.
    __slots__ = ("check", "parse")

    def __init__(self, check: Check, parse: Parse | None = None) -> None:
        self.check, self.parse = check, parse


def _number_in(text: str, option: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    # The comparison is false for nan.
    if not abs(value) < 1e9:
        raise UsageError(f"{option} {text[:40]!a}: not a number", f"for example {option} {example}")
    return value


IN_TURN, AT_RANDOM = "round-robin", "random"
ROUTERS = (IN_TURN, AT_RANDOM, "least-loaded", "prefix-aware")
"""Which replica gets a request (`simulation.routed`)."""


def _check_router(value: object, name: str) -> None:
    if not isinstance(value, str) or value not in ROUTERS:
        hint = (nearest(value, ROUTERS) if isinstance(value, str) else None) or f"one of {', '.join(ROUTERS)}"
        raise UsageError(f"{name} {shown(value)}: not a router", hint)


def _parse_router(text: str, option: str) -> str:
    _check_router(text.casefold(), option)
    return text.casefold()


def _check_sessions(value: object, name: str) -> None:
    check_text(value, name)
    parse_sessions(str(value), name)


def _parse_share(text: str, option: str) -> float:
    """A share as `0.3` or `30%`."""
    share = _number_in(text.removesuffix("%"), option, "0.3 or 30%") / (100 if text.endswith("%") else 1)
    if not 0 <= share < 1:
        raise UsageError(f"{option} {text}: must be at least 0 and below 1", f"for example {option} 0.3")
    return share


_LEAST_CONFIDENCE, _MOST_CONFIDENCE = 50, 95


def _check_confidence(value: object, name: str) -> None:
    if type(value) is not int or not _LEAST_CONFIDENCE <= value <= _MOST_CONFIDENCE:
        raise UsageError(
            f"{name} {shown(value)}: must be a whole number from {_LEAST_CONFIDENCE} to {_MOST_CONFIDENCE}",
            f"{name} 50 is the estimate, {name} 80 the upper end of its range",
        )


def _parse_confidence(text: str, option: str) -> int:
    """A percentage as `80` or `80%`."""
    number = text.strip().removesuffix("%")
    confidence = int(number) if number.isdecimal() and len(number) < 3 else text[:20]
    _check_confidence(confidence, option)
    return int(confidence)


def _parse_pixels(text: str, option: str) -> tuple[int, int]:
    """The width and the height in `1920x1080`."""
    width, _, height = text.casefold().partition("x")
    if not width.isdecimal() or not height.isdecimal() or not 0 < int(width) < 10**5 or not 0 < int(height) < 10**5:
        raise UsageError(f"{option} {text[:40]!a}: must be WIDTHxHEIGHT in pixels", "for example 1920x1080")
    return int(width), int(height)


def _parse_link(text: str, option: str) -> int | str:
    """Bytes per second, or the name of a link, which begins with a letter."""
    return text.strip() if text.strip()[:1].isalpha() else parse_bandwidth(text, option)


def _number(least: float, most: float, what: str, *, or_least: bool = True) -> Check:
    """A check of a number from `least`, or above it, to below `most`."""

    def check(value: object, name: str) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value < most or (value == least and not or_least):  # type: ignore[operator]
            raise UsageError(f"{name} {shown(value)}: must be {what}")

    return check


def _check_flag(value: object, name: str) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} {shown(value)}: must be True or False")


def _check_count_or_text(value: object, name: str) -> None:
    if not isinstance(value, str):
        check_count(value, name)


def _parse_request_tokens(text: str, option: str) -> int | str:
    """A number of tokens, or the text of a distribution."""
    if ":" not in text:
        return parse_tokens(text, option)
    from kvcalc.question.lengths import parse_distribution

    return parse_distribution(text, option).text


def _check_request_tokens(value: object, name: str) -> None:
    if isinstance(value, str) and ":" in value:
        _parse_request_tokens(value, name)
    else:
        check_count(value, name)


def _check_list(check: Check) -> Check:
    """A check of a list and of each of its items."""

    def check_list(value: object, name: str) -> None:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UsageError(f"{name} {shown(value)}: must be a list", f"for example {name}=[{shown(value)}]")
        for item in value:
            check(item, name)

    return check_list


def _check_mapping(check: Check) -> Check:
    """A check of a mapping from names to values, each of which is checked."""

    def check_mapping(value: object, name: str) -> None:
        if not isinstance(value, Mapping):
            raise UsageError(f"{name} {shown(value)}: must be a mapping")
        for key, item in value.items():
            check_text(key, f"a key of {name}")
            check(item, f"{name}[{shown(key)}]")

    return check_mapping


def _check_pairs(value: object, name: str) -> None:
    """A check of the tiers of a CacheReuse. Their names and amounts are checked with the rest of it."""
    rows = value if isinstance(value, (tuple, list)) else (None,)
    if not all(isinstance(row, (tuple, list)) and len(row) == 2 and isinstance(row[0], str) for row in rows):
        raise UsageError(f"{name} {shown(value)}: must be pairs", f'for example {name}=(("cpu", 200 * 2**30),)')


def _check_record(module: str, kind_name: str) -> Check:
    """A check of a record and of its fields."""

    def check_record(value: object, name: str) -> None:
        kind = getattr(import_module(f"kvcalc.{module}"), kind_name)
        if not isinstance(value, kind):
            raise UsageError(f"{name} {shown(value)}: must be a kvcalc.{kind_name}", f"{name}=kvcalc.{kind_name}(...)")
        for field, item in value._asdict().items():
            if item is not None or kind._field_defaults.get(field, ...) is not None:
                FIELDS[field].type.check(item, field)

    return check_record


def _check_setting(value: object, name: str) -> None:
    is_number = isinstance(value, (int, float)) and abs(value) < _MOST
    if value is not None and not is_number and not isinstance(value, str):
        raise UsageError(f"{name} {shown(value)}: must be a string, a number, True or False")


def _check_model(value: object, name: str) -> None:
    from kvcalc.model.spec import ModelSpec

    if not isinstance(value, ModelSpec):
        raise UsageError(f"{name} {shown(value)}: must be a ModelSpec", "use kvcalc.load_model(NAME)")


def check_devices(value: object, name: str = "devices") -> None:
    """Raise UsageError (exit 2) if `value`, from a Python program, is not a number of devices."""
    from kvcalc.throughput.hardware import Devices

    if not isinstance(value, Devices):
        raise UsageError(f"{name} {shown(value)}: must be Devices", 'use kvcalc.find_devices("h100x8")')
    check_count(value.num_devices, "num_devices")


def _check_gpu(value: object, name: str) -> None:
    from kvcalc.throughput.hardware import Devices, Gpu

    if not isinstance(value, (str, Gpu, Devices)):
        raise UsageError(f"{name} {shown(value)}: must be names of devices", 'for example gpus=["h100", "l40s"]')
    if isinstance(value, Devices):
        check_devices(value, name)


def _check_calibration(value: object, name: str) -> None:
    if not callable(getattr(value, "apply", None)):
        raise UsageError(f"{name} {shown(value)}: must be what kvcalc.read_calibration returns")


def _count(least: int = 1, *, at_least: int | None = None) -> ValueType:
    """A whole number from `least`; on the command line from `at_least`."""
    return ValueType(
        lambda value, name: check_count(value, name, least),
        lambda text, option: parse_count(text, option, least if at_least is None else at_least),
    )


_COUNT = _count()
_CHECK_COUNTS, _CHECK_PRICE = _check_list(_COUNT.check), _number(0, 1e9, "a price, a number of at least 0")
_POSITIVE = _number(0, _MOST, "a number above 0", or_least=False)

TYPES = {
    # Numbers.
    "count": _COUNT, "count_from_0": _count(0), "count_from_2": _count(2), "blocks": _count(at_least=1000),
    "tokens": ValueType(_COUNT.check, parse_tokens), "vllm_tokens": ValueType(_COUNT.check, parse_vllm_integer),
    "prefix_tokens": ValueType(
        _count(0).check, lambda text, option: 0 if text.strip() == "0" else parse_tokens(text, option)
    ),
    "bytes": ValueType(_count(0).check, parse_size), "bytes_per_second": ValueType(_COUNT.check, parse_bandwidth),
    "flops": ValueType(_COUNT.check, parse_flops), "number": ValueType(_POSITIVE, parse_rate),
    "requests": ValueType(_COUNT.check, parse_requests),
    "seconds": ValueType(_POSITIVE, parse_seconds), "price": ValueType(_CHECK_PRICE),
    "sessions": ValueType(_check_sessions, parse_sessions),
    "length": ValueType(_POSITIVE, lambda text, option: _number_in(text, option, "2.4")),
    "confidence": ValueType(_check_confidence, _parse_confidence),
    "share": ValueType(_number(0, 1, "a number of at least 0 and below 1"), _parse_share),
    # Texts.
    "text": ValueType(check_text, lambda text, option: text),
    "word": ValueType(check_text, lambda text, option: text.casefold()),
    "router": ValueType(_check_router, _parse_router), "link": ValueType(_check_count_or_text, _parse_link),
    "network": ValueType(_COUNT.check, parse_network), "pcie": ValueType(_COUNT.check, parse_pcie),
    "watts": ValueType(_COUNT.check, parse_watts),
    "lengths": ValueType(_check_count_or_text),
    "request_tokens": ValueType(_check_request_tokens, _parse_request_tokens),
    "pixels": ValueType(_COUNT.check, _parse_pixels),
    "flag": ValueType(_check_flag),
    # Lists and mappings.
    "texts": ValueType(_check_list(check_text)), "counts": ValueType(_CHECK_COUNTS),
    "attentions": ValueType(_check_list(lambda value, name: None if value is None else check_text(value, name))),
    "gpus": ValueType(_check_list(_check_gpu)), "pairs": ValueType(_check_pairs),
    "bytes_of": ValueType(_check_mapping(_COUNT.check)), "prices": ValueType(_check_mapping(_CHECK_PRICE)),
    "settings": ValueType(_check_mapping(_check_setting)), "mapping_of_texts": ValueType(_check_mapping(check_text)),
    "mapping": ValueType(_check_mapping(lambda value, name: None)),
    # Models, devices and records.
    "model": ValueType(lambda value, name: None if isinstance(value, str) else _check_model(value, name)),
    "model_spec": ValueType(_check_model), "devices": ValueType(check_devices),
    "calibration": ValueType(_check_calibration),
    "speed": ValueType(_check_record("question.question", "SpeedQuestion")),
    "images": ValueType(_check_record("question.question", "ImagesAsked")),
    "reuse": ValueType(_check_record("question.question", "CacheReuse")),
    "speculation": ValueType(_check_record("model.drafting", "Speculation")),
    "what_if": ValueType(_check_record("model.variants", "WhatIf")),
}  # fmt: skip
"""What a value may be, by the name of its type in fields.yaml."""


class Field:
    """A value that commands and functions take.

    `name` is that of the Python argument or of the record's field, with its unit; `option` has the names of the option.
    `long` is the first of them, which messages name, and `parameter` its key in a batch line: a word without dashes
    before the names, else made from `long`. A value with one of the
    two may lack the other. The first sentence of `help` is the help of -h. A list is separated by commas or given by
    repetition; one that is REPEATED, by repetition alone. Python refuses a field without the one that it `needs`, and
    beside those that it `excludes`.
    """

    __slots__ = (
        "default", "excludes", "help", "long", "metavar", "name", "needs", "option", "panel", "parameter", "several",
        "type",
    )  # fmt: skip

    def __init__(
        self, name: str, type: ValueType, option: str = "", metavar: str = "", help: str = "",
        default: str | None = None, panel: str | None = None, several: bool | str = False, needs: str = "",
        excludes: str = "",
    ) -> None:  # fmt: skip
        self.name, self.type, self.option, self.metavar, self.help = name, type, option, metavar, help
        self.default, self.panel, self.several, self.needs, self.excludes = default, panel, several, needs, excludes
        self.long = next((word for word in option.split() if word.startswith("--")), "")
        self.parameter = option.partition(" ")[0].removeprefix("--").replace("-", "_")


REPEATED = "repeated"
"""Of an option whose values are paths, which may contain commas."""


def declared(rows: Mapping[str, Any]) -> dict[str, Field]:
    """The fields of fields.yaml by name. Raises KeyError for an unknown type, and TypeError for an unknown key."""
    fields = dict(rows)
    for kind, names in fields.pop("_without_option").items():
        fields.update((name, {"type": kind}) for name in names.split())
    return {name: Field(name, **{**row, "type": TYPES[row["type"]]}) for name, row in fields.items()}


FIELDS = declared(shipped_mapping(os.path.join(os.path.dirname(__file__), "fields.yaml"), "question", "fields"))
"""The fields by name."""
OPTIONS = {field.parameter: field for field in FIELDS.values() if field.option}
"""The fields that are options, by the name of the option's parameter."""
