"""The arguments of the public functions: a function uses an argument, or refuses it by its name.

Python's own TypeError for an unknown argument is not a KvcalcError, and has no hint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from kvcalc.errors import UsageError, nearest
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import ModelSpec
from kvcalc.question.fields import FIELDS
from kvcalc.question.question import Question
from kvcalc.units import shown

P = ParamSpec("P")
R = TypeVar("R")


def takes(
    *, needs: Mapping[str, str] = {}, either: Sequence[tuple[str, str]] = (), fields: Mapping[str, str] = {},
    instead: Mapping[str, str] = {}, also: Mapping[str, type | tuple[type, ...]] = {},
) -> Callable[[Callable[P, R]], Callable[P, R]]:  # fmt: skip
    """A decorator for a public function. An argument that the function cannot use raises UsageError (exit 2).

    `needs` maps an argument to the one without which it has no effect here, and `either` has pairs of which a caller
    gives one, besides what its field needs and excludes everywhere. `fields` names the fields of a record that the
    function uses, if it does not use all of them. `instead` says what to do about an argument that the function does
    not have. `also` are types that it takes besides the usual ones; it checks them itself.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        code, positional = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        first = code.co_argcount - len(positional)
        defaults = {**dict(zip(names[first:], positional)), **(function.__kwdefaults__ or {})}
        required = {**{name: FIELDS[name].needs for name in names if FIELDS[name].needs in names}, **needs}
        exclusive = [(name, other) for name in names for other in FIELDS[name].excludes.split() if other in names]
        exclusive += either

        @wraps(function)
        def ask(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in names:
                    raise _unknown(function.__name__, name, names, instead)
            values: dict[str, object] = {**dict(zip(names, args)), **kwargs}
            given = {name: value for name, value in values.items() if not _is_default(value, name, defaults)}
            for name, value in given.items():
                if not isinstance(value, also.get(name, ())):
                    FIELDS[name].type.check(value, name)
                    if isinstance(value, Sequence) and not value and value != "" and defaults.get(name) != ():
                        raise UsageError(f"{name}: an empty list", "name at least one")
                if name in fields:
                    _check_fields(function.__name__, name, value, fields[name].split(), names)
            for name, second in required.items():
                if name in given and second not in given:
                    raise UsageError(f"{name} needs {second}", f"kvcalc.{function.__name__}(..., {second}=...)")
            for first, second in exclusive:
                if first in given and second in given:
                    raise UsageError(f"{first} and {second} cannot be combined", "use one")
            return function(*args, **kwargs)

        return ask

    return decorate


def _is_default(value: object, name: str, defaults: Mapping[str, object]) -> bool:
    return name in defaults and type(value) is type(defaults[name]) and value == defaults[name]


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
            raise UsageError(f"{name}.{field}: kvcalc.{function} does not use it", hint)


def asked(given: Mapping[str, Any]) -> Question:
    """The question with the arguments of a function, which are among its `locals()`."""
    fields = {name: given[name] for name in Question._fields if name in given}
    return Question(**{**fields, "model": model_of(given["model"])})


def model_of(model: ModelSpec | str) -> ModelSpec:
    """The model itself, or the one that a name or a path refers to."""
    return load_model(model) if isinstance(model, str) else model
