"""Typed access to a config mapping. Errors name the file, the key and the value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kvcalc.errors import ModelError, nearest
from kvcalc.limits import WIDTH

if TYPE_CHECKING:
    from kvcalc.model.facts import Facts

MAX_INTEGER = WIDTH

# Wider than any ratio or base of a model. Products of a few of these numbers are finite.
_LEAST_NUMBER, _MOST_NUMBER = 1e-9, 1e15

Item = TypeVar("Item")
Value = TypeVar("Value")
Own = TypeVar("Own", bound="TypedConfig")

_SHOWN = 40


class TypedConfig:
    """A config mapping with its name and source. Look-ups take a key and its aliases, the most common name first."""

    # What is looked up, while a model is read for `--explain` (`kvcalc.model.facts`).
    facts: ClassVar[Facts | None] = None

    def __init__(self, config: Mapping[str, object], name: str, source: str) -> None:
        self.config = config
        self.name = name
        self.source = source

    def with_defaults(self: Own, defaults: Mapping[str, object]) -> Own:
        """Return the same config with a family's defaults for absent keys. An explicit null stays null."""
        if self.facts is not None:
            self.facts.defaults |= defaults.keys() - self.config.keys()
        return type(self)({**defaults, **self.config}, self.name, self.source) if defaults else self

    def with_values(self: Own, values: Mapping[str, object]) -> Own:
        """Return the same config with `values` in place of its own."""
        return type(self)({**self.config, **values}, self.name, self.source)

    def renamed(self: Own, names: Mapping[str, str]) -> Own:
        """Return the same config with the keys in `names` called what they name."""
        return type(self)({names.get(key, key): value for key, value in self.config.items()}, self.name, self.source)

    def without(self: Own, key: str) -> Own:
        """Return the same config without `key`."""
        return type(self)({k: v for k, v in self.config.items() if k != key}, self.name, self.source)

    def nested(self: Own, key: str) -> Own:
        """Return a reader of the object under `key`, or of an empty object if the key is missing or null."""
        inner = self.config.get(key)
        if not isinstance(inner, (Mapping, type(None))):
            raise ModelError(f"{self.name}: {key} must be an object")
        return type(self)(inner or {}, f"{self.name}: {key}", self.source)

    def has(self, key: str) -> bool:
        """Return whether there is a value under `key` that is not null."""
        return self.config.get(key) is not None

    def is_object(self, key: str) -> bool:
        """Return whether there is an object under `key`."""
        return isinstance(self.config.get(key), Mapping)

    def is_list(self, key: str) -> bool:
        """Return whether there is a list under `key`."""
        return isinstance(self.config.get(key), list)

    def shown(self, key: str) -> str:
        """Return the value under `key` as text for a message."""
        value = self.config.get(key)
        return value[: 2 * _SHOWN] if isinstance(value, str) else _shown(value)

    def mentions(self, key: str) -> bool:
        """Return whether there is a value under `key`, which may be null."""
        return key in self.config

    def is_set(self, key: str) -> bool:
        """Return whether the value under `key` is there and is not null, false, zero or empty."""
        return bool(self.config.get(key))

    def is_any(self, key: str, *values: object) -> bool:
        """Return whether the value under `key` is one of `values`. None is a missing key, or null."""
        return any(self.config.get(key) == value for value in values)

    def shares(self, keys: Mapping[str, str]) -> dict[str, object]:
        """Return the unchecked values under `keys`, by the keys that another reader has for them."""
        return {other: self.config[key] for key, other in keys.items() if key in self.config}

    def error(self, text: str) -> ModelError:
        """Return a ModelError that begins with the config's name."""
        return ModelError(f"{self.name}: {text}")

    def strings(self, key: str, length: int, allowed: Sequence[str]) -> list[str] | None:
        """Return the list of `length` strings under `key`, each in `allowed`; None if the key is missing or null."""
        value = self._look_up((key,))
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            size = f"a list of {len(value)}" if isinstance(value, list) else _shown(value)
            raise ModelError(f"{self.name}: {key} is {size}: must be a list of {length}, one per layer")
        for item in value:
            if item not in allowed:
                raise ModelError(f"{self.name}: {key} contains {_shown(item)}: must be one of {', '.join(allowed)}")
        return value

    def flags(self, key: str, length: int) -> list[bool]:
        """Return the list of `length` zeros and ones under `key`, as booleans."""
        value = self._look_up((key,))
        if not isinstance(value, list) or len(value) != length or any(flag not in (0, 1) for flag in value):
            raise ModelError(f"{self.name}: {key} must be a list of {length} zeros and ones")
        return [bool(flag) for flag in value]

    def integers(self, key: str, *, least: int = 0, most: int = MAX_INTEGER) -> list[int]:
        """Return the list of integers from `least` to `most` under `key`; empty if the key is missing or null."""
        value = self._look_up((key,))
        if value is None:
            return []
        if not isinstance(value, list) or any(
            isinstance(item, bool) or not isinstance(item, int) or not least <= item <= most for item in value
        ):
            raise self._bad(key, value, f"must be a list of integers from {least} to {most}")
        return value

    def pair(self, key: str, default: tuple[int, int]) -> tuple[int, int]:
        """Return the two integers above zero in the list under `key`, or `default` if the key is missing or null."""
        numbers = self.integers(key, least=1)
        if len(numbers) not in (0, 2):
            raise self._bad(key, numbers, "must be a list of two integers")
        return (numbers[0], numbers[1]) if numbers else default

    def integer_or_list(self, key: str, most: int = MAX_INTEGER) -> list[int]:
        """Return the integers above zero under `key`: a list of them, or one. Empty if the key is missing or null."""
        if self.is_list(key):
            return self.integers(key, least=1, most=most)
        number = self.optional_integer(key, most=most)
        return [] if number is None else [number]

    def listed(self, key: str) -> Sequence[object] | None:
        """Return the list under `key`, whose items are unchecked; None if the key is missing or null."""
        value = self._look_up((key,))
        if value is not None and not isinstance(value, (list, tuple)):
            raise self._bad(key, value, "must be a list")
        return value

    def number_of(self, key: str, default: int) -> int:
        """Return the length of the list under `key`: 1 for an integer, `default` if the key is missing or null."""
        if isinstance(self.config.get(key), int):
            return 1
        value = self.listed(key)
        return default if value is None else len(value)

    def pairs(self, key: str, most: int = MAX_INTEGER) -> list[tuple[int, int]]:
        """Return the pairs of integers above zero in the list under `key`; empty if the key is missing or null."""
        value = self.listed(key) or ()
        readers = (type(self)({key: item}, self.name, self.source) for item in value)
        values = [reader.integer_or_list(key, most) for reader in readers]
        if any(len(pair) != 2 for pair in values):
            raise self._bad(key, value, "must be a list of pairs of integers above zero")
        return [(pair[0], pair[1]) for pair in values]

    def chosen(self, key: str, meanings: Mapping[Item, Value], must: str) -> list[Value] | None:
        """Return the meaning of each item of a list, or of each letter of a string; None if the key is missing or null.

        Raises ModelError, which ends with `must`, for an item without a meaning.
        """
        value = self._look_up((key,))
        if value is None:
            return None
        by_value = [
            next((meaning for known, meaning in meanings.items() if known == item and type(known) is type(item)), None)
            for item in (value if isinstance(value, (str, list)) else [None])
        ]
        found = [meaning for meaning in by_value if meaning is not None]
        if len(found) < len(by_value):
            raise self.error(f"{key} {must}")
        return found

    def items(self, key: str) -> list[object]:
        """Return the items of the list under `key`, unchecked. Any other value is one item; null is no items."""
        value = self._look_up((key,))
        return [] if value is None else [*value] if isinstance(value, list) else [str(value)]

    def objects(self: Own, key: str) -> list[Own]:
        """Return a reader of each object in the list under `key`; empty if the key is missing or null."""
        value = self.listed(key) or ()
        mappings = [item for item in value if isinstance(item, Mapping)]
        if len(mappings) < len(value):
            raise self._bad(key, value, "must be a list of objects")
        return [type(self)(item, f"{self.name}: {key}", self.source) for item in mappings]

    def all_integers(self) -> list[int]:
        """Return all values of the config, which must be integers above zero."""
        return [self.integer(key) for key in self.config]

    def integer(self, *keys: str, least: int = 1, most: int = MAX_INTEGER) -> int:
        """Return the integer under one of `keys`. Raises ModelError if it is missing, no integer or out of range."""
        value = self.optional_integer(*keys, least=least, most=most)
        if value is None:
            raise self._missing(keys[0])
        return value

    def optional_integer(self, *keys: str, least: int = 1, most: int = MAX_INTEGER) -> int | None:
        """Like `integer`, but return None if the key is missing or null."""
        value = self._look_up(keys)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._bad(keys[0], value, "must be an integer")
        if value < least:
            raise self._bad(keys[0], value, f"must be at least {least}")
        if value > most:
            raise self._bad(keys[0], value, f"must be at most {most:,}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """Return the boolean under `key`, or the family's `default` if the key is missing or null."""
        value = self._look_up((key,))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._bad(key, value, "must be true or false")
        return value

    def number(self, key: str, default: float) -> float:
        """Return the positive number under `key`, or `default` if the key is missing or null."""
        value = self._look_up((key,))
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self._bad(key, value, "must be a number above zero")
        if not _LEAST_NUMBER <= value <= _MOST_NUMBER:
            raise self._bad(key, value, f"must be from {_LEAST_NUMBER} to {_MOST_NUMBER}")
        return float(value)

    def letters(self, key: str, allowed: str) -> str | None:
        """Return the string under `key` if it has only `allowed` letters; None for anything else."""
        value = self.config.get(key)
        return value if isinstance(value, str) and not set(value) - set(allowed) else None

    def text(self, key: str) -> str:
        """Return the string under `key`. Raises ModelError if it is missing or not a string."""
        value = self.word(key)
        if value is None:
            raise self._missing(key)
        return value

    def word(self, key: str) -> str | None:
        """Like `text`, but return None if the key is missing or null."""
        value = self._look_up((key,))
        if value is not None and not isinstance(value, str):
            raise self._bad(key, value, "must be a string")
        return value

    def number_in(self, key: str, prefix: str, default: int, *, most: int) -> int:
        """Return the number from 1 to `most` that follows `prefix` in the string under `key`, or `default`."""
        digits = (self.word(key) or "").removeprefix(prefix)
        number = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < _SHOWN else 0
        return number if 0 < number <= most else default

    def fraction(self, key: str, *, most: int) -> tuple[int, int]:
        """Return the two numbers up to `most` of a fraction such as "1/4". Raises ModelError if it is missing."""
        parts = self.text(key).split("/")
        if len(parts) != 2 or not all(part.isascii() and part.isdecimal() and len(part) < _SHOWN for part in parts):
            raise self._bad(key, self.text(key), "must be a fraction, for example '1/4'")
        upper, lower = map(int, parts)
        if not (0 < upper <= most and 0 < lower <= most):
            raise self._bad(key, self.text(key), f"must be a fraction of numbers from 1 to {most}")
        return upper, lower

    def version(self, key: str) -> str | None:
        """Return the string or the number under `key` as text; None if the key is missing or null."""
        value = self._look_up((key,))
        if isinstance(value, bool) or not isinstance(value, (int, float, str, type(None))):
            raise self._bad(key, value, "must be a string or a number")
        return None if value is None else str(value)[:_SHOWN]

    def refuse_other(self, key: str, *supported: object) -> None:
        """Raise ModelError if there is another value than `supported` under `key`."""
        if not self.is_any(key, None, *supported):
            raise self._bad(key, self.config[key], f"only {' or '.join(map(str, supported))} is supported")

    def refuse(self, key: str, why: str) -> None:
        """Raise ModelError if `key` is set, because this reader does not support it. `why` is the message."""
        value = self._look_up((key,))
        if value not in (None, False):
            raise self._bad(key, value, why)

    def _look_up(self, keys: tuple[str, ...]) -> object:
        stated = [(key, self.config[key]) for key in keys if self.config.get(key) is not None]
        for key, value in stated[1:]:
            if value != stated[0][1]:
                raise ModelError(f"{self.name}: {stated[0][0]} is {_shown(stated[0][1])} but {key} is {_shown(value)}")
        if stated and self.facts is not None:
            inside = self.name.partition(": ")[2].replace(": ", ".")
            self.facts.values[f"{inside}.{stated[0][0]}" if inside else stated[0][0]] = stated[0][1]
        return stated[0][1] if stated else None

    def _missing(self, key: str) -> ModelError:
        if key in self.config:
            return ModelError(f"{self.name}: {key} is null")
        return ModelError(f"{self.name}: {key} is missing", nearest(key, self.config))

    def _bad(self, key: str, value: object, must: str) -> ModelError:
        return ModelError(f"{self.name}: {key} is {_shown(value)}: {must}")


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**_SHOWN:
        return "a number with more than 40 digits"
    text = ascii(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
