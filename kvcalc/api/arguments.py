"""The arguments of the public functions: a function uses an argument, or refuses it by its name.

Python's own TypeError for an unknown argument is not a KvcalcError, and has no hint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from kvcalc.errors import UsageError, nearest
from kvcalc.planning.question import COUNTS, SPEED_COUNTS, TEXTS, check_model
from kvcalc.units import check_count, check_text, shown

P = ParamSpec("P")
R = TypeVar("R")

Check = Callable[[object, str], None]
"""Raises UsageError (exit 2) for a value of the wrong type, which belongs to the argument or the field of this name."""

_NUMBERS = """
    requests_per_second burstiness scale_rate max_ttft_seconds max_tpot_seconds max_e2e_seconds step_factor
    acceptance_length
""".split()
_MORE_COUNTS = """
    requests simulate max_devices replicas prefill_replicas prefill_tensor_parallel_size prefill_data_parallel_size
    trace_block_tokens most_blocks confidence ttft_percentile tpot_percentile e2e_percentile
    num_kv_heads kv_lora_rank qk_rope_head_dim number width height
""".split()
_MORE_TEXTS = """
    trace trace_format prefill_gpu name source family text reference attention method backend
""".split()
_FLAGS = """
    fits_context allow_beyond_limit strict all_layouts with_front disaggregate assume_full_attention
""".split()
# The command line reads no number with more digits.
_MOST = 1e64
# The arguments that are records, with the module and the name of the class. Their fields are checked too.
_RECORDS = {
    "speed": ("kvcalc.planning.layout", "SpeedQuestion"),
    "what_if": ("kvcalc.model.variants", "WhatIf"),
    "speculative": ("kvcalc.model.drafting", "Speculation"),
    "reuse": ("kvcalc.planning.reuse", "CacheReuse"),
    "images": ("kvcalc.planning.images", "ImagesAsked"),
}


def takes(
    *, needs: Mapping[str, str] = {}, either: Sequence[tuple[str, str]] = (), fields: Mapping[str, str] = {},
    instead: Mapping[str, str] = {}, also: Mapping[str, type | tuple[type, ...]] = {},
) -> Callable[[Callable[P, R]], Callable[P, R]]:  # fmt: skip
    """A decorator for a public function. An argument that the function cannot use raises UsageError (exit 2).

    `needs` maps an argument to the one without which it has no effect, and `either` has pairs of which a caller gives
    one. `fields` names the fields of a record that the function uses, if it does not use all of them. `instead` says
    what to do about an argument that the function does not have. `also` are types that it takes besides the usual
    ones; it checks them itself.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        code, positional = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        first = code.co_argcount - len(positional)
        defaults = {**dict(zip(names[first:], positional)), **(function.__kwdefaults__ or {})}

        @wraps(function)
        def ask(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in names:
                    raise _unknown(function.__name__, name, names, instead)
            values: dict[str, object] = {**dict(zip(names, args)), **kwargs}
            given = {name: value for name, value in values.items() if not _is_default(value, name, defaults)}
            for name, value in given.items():
                if not isinstance(value, also.get(name, ())):
                    CHECKS[name](value, name)
                    if isinstance(value, Sequence) and not isinstance(value, str) and not value:
                        _refuse_empty(name, defaults)
                if name in fields:
                    _check_fields(function.__name__, name, value, fields[name].split(), names)
            for name, other in needs.items():
                if name in given and other not in given:
                    raise UsageError(f"{name} needs {other}", f"kvcalc.{function.__name__}(..., {other}=...)")
            for one, other in either:
                if one in given and other in given:
                    raise UsageError(f"{one} and {other} cannot be combined", "use one")
            return function(*args, **kwargs)

        return ask

    return decorate


def _is_default(value: object, name: str, defaults: Mapping[str, object]) -> bool:
    return name in defaults and type(value) is type(defaults[name]) and value == defaults[name]


def _refuse_empty(name: str, defaults: Mapping[str, object]) -> None:
    """Raise UsageError (exit 2) for an empty list, unless that is the argument's default."""
    if defaults.get(name) != ():
        raise UsageError(f"{name}: an empty list", "name at least one")


def _unknown(function: str, name: str, names: Sequence[str], instead: Mapping[str, str]) -> UsageError:
    """The error for an argument that a function does not have: what to do instead, or the nearest names."""
    others = [f"kvcalc.{other}" for other, taken in _public_functions() if name in taken]
    hint = f"{', '.join(others)} take{'s' * (len(others) == 1)} it" if others else nearest(name, names)
    hint = instead.get(name) or hint or f"its arguments are {', '.join(names)}"
    return UsageError(f"{shown(name)}: kvcalc.{function} has no such argument", hint)


def _public_functions() -> Iterable[tuple[str, Sequence[str]]]:
    """The names of the documents' functions, and of their arguments."""
    for module in ("memory", "serving", "files"):
        for name, value in vars(import_module(f"kvcalc.api.{module}")).items():
            function = getattr(value, "__wrapped__", None)
            if function is not None:
                code = function.__code__
                yield name, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _check_fields(function: str, name: str, record: Any, used: Sequence[str], names: Sequence[str]) -> None:
    """Raise UsageError (exit 2) for a field of a record that the function does not use."""
    for field, value in record._asdict().items():
        if field not in used and value != record._field_defaults.get(field):
            hint = f"give {field} itself" if field in names else f"kvcalc.estimate uses it, kvcalc.{function} does not"
            raise UsageError(f"{name}.{field}: kvcalc.{function} has no use for it", hint)


def _count(least: int = 1) -> Check:
    return lambda value, name: check_count(value, name, least)


def _number(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _MOST:
        raise UsageError(f"{name} {shown(value)}: must be a number above 0")


def _price(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise UsageError(f"{name} {shown(value)}: must be a price, a number of at least 0")


def _rate(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UsageError(f"{name} {shown(value)}: must be a number of at least 0 and below 1")


def _flag(value: object, name: str) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} {shown(value)}: must be True or False")


def _whole_or_text(value: object, name: str) -> None:
    if not isinstance(value, str):
        check_count(value, name)


def _list_of(check: Check) -> Check:
    """A check of a list and of each of its items."""

    def check_list(value: object, name: str) -> None:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UsageError(f"{name} {shown(value)}: must be a list", f"for example {name}=[{shown(value)}]")
        for item in value:
            check(item, name)

    return check_list


def _mapping_of(check: Check) -> Check:
    """A check of a mapping from names to values, each of which is checked."""

    def check_mapping(value: object, name: str) -> None:
        if not isinstance(value, Mapping):
            raise UsageError(f"{name} {shown(value)}: must be a mapping")
        for key, item in value.items():
            check_text(key, f"a key of {name}")
            check(item, f"{name}[{shown(key)}]")

    return check_mapping


def _pairs(value: object, name: str) -> None:
    """A check of the tiers of a CacheReuse. Their names and amounts are checked with the rest of it."""
    rows = value if isinstance(value, (tuple, list)) else (None,)
    if not all(isinstance(row, (tuple, list)) and len(row) == 2 and isinstance(row[0], str) for row in rows):
        raise UsageError(f"{name} {shown(value)}: must be pairs", f'for example {name}=(("cpu", 200 * 2**30),)')


def _record(module: str, kind_name: str) -> Check:
    """A check of a record and of its fields."""

    def check_record(value: object, name: str) -> None:
        kind = getattr(import_module(module), kind_name)
        if not isinstance(value, kind):
            raise UsageError(f"{name} {shown(value)}: must be a kvcalc.{kind_name}", f"{name}=kvcalc.{kind_name}(...)")
        for field, item in value._asdict().items():
            if item is not None or kind._field_defaults.get(field, ...) is not None:
                CHECKS[field](item, field)

    return check_record


def _setting(value: object, name: str) -> None:
    is_number = isinstance(value, (int, float)) and abs(value) < _MOST
    if value is not None and not is_number and not isinstance(value, str):
        raise UsageError(f"{name} {shown(value)}: must be a string, a number, True or False")


def _anything(value: object, name: str) -> None:
    """No check: every value has a meaning."""


def _attention(value: object, name: str) -> None:
    if value is not None:
        check_text(value, name)


def _model(value: object, name: str) -> None:
    if not isinstance(value, str):
        check_model(value, name)


def _spec(value: object, name: str) -> None:
    check_model(value, name)


def _devices(value: object, name: str) -> None:
    from kvcalc.planning.question import check_devices

    check_devices(value)


def _gpu(value: object, name: str) -> None:
    from kvcalc.throughput.hardware import Devices, Gpu

    if not isinstance(value, (str, Gpu, Devices)):
        raise UsageError(f"{name} {shown(value)}: must be names of devices", 'for example gpus=["h100", "l40s"]')


def _calibration(value: object, name: str) -> None:
    if not callable(getattr(value, "apply", None)):
        raise UsageError(f"{name} {shown(value)}: must be what kvcalc.read_calibration returns")


CHECKS: dict[str, Check] = {
    **{name: _count(least) for name, least in COUNTS.items()},
    **dict.fromkeys([*SPEED_COUNTS, *_MORE_COUNTS], _count()),
    **dict.fromkeys(("seed", "num_tokens", "prefix_tokens"), _count(0)),
    **dict.fromkeys(["turns"], _count(2)),
    **dict.fromkeys([*TEXTS, *_MORE_TEXTS], check_text),
    **dict.fromkeys(_NUMBERS, _number),
    **dict.fromkeys(_FLAGS, _flag),
    **{name: _record(*place) for name, place in _RECORDS.items()},
    **dict.fromkeys(["prompt_tokens", "answer_tokens", "transfer"], _whole_or_text),
    "model": _model,
    "draft_model": _spec,
    "devices": _devices,
    "calibration": _calibration,
    "prefix_hit_rate": _rate,
    "price_per_hour": _price,
    "offload": _pairs,
    "bandwidths": _pairs,
    "engine_settings": _mapping_of(_setting),
    "config": _mapping_of(_anything),
    "results": _mapping_of(check_text),
    "offload_bytes": _mapping_of(_count()),
    "offload_bytes_per_second": _mapping_of(_count()),
    "prices": _mapping_of(_price),
    "memory_prices_per_gib_hour": _mapping_of(_price),
    "models": _list_of(check_text),
    "paths": _list_of(check_text),
    "engines": _list_of(check_text),
    "kv_dtypes": _list_of(check_text),
    "attentions": _list_of(_attention),
    "contexts": _list_of(_count()),
    "batches": _list_of(_count()),
    "tensor_parallel_sizes": _list_of(_count()),
    "cache_memory_bytes": _list_of(_count()),
    "cache_tokens": _list_of(_count()),
    "gpus": _list_of(_gpu),
}
"""The name of every argument and of every field of a record -> the check of its type."""
