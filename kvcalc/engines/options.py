"""The options that engines take: which engine takes one, and how its text is parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

from kvcalc.engines.declarations import OPTIONS, Option
from kvcalc.errors import SettingError, UsageError, nearest
from kvcalc.records import NamedTuple
from kvcalc.units import parse_count

_JOINTS = str.maketrans("", "", "-_")
_Settings = TypeVar("_Settings")
ADAPTER_OPTIONS = ("max-loras", "max-loras-per-batch", "max-lora-rank")
"""The options of vLLM and SGLang for the buffers of LoRA adapters."""
NO_ENGINE = "logical"
"""What stands for the formulas alone, in place of an engine."""
AUTO_ENGINE = "auto"
"""Stands for the default engine (`default_engine`) in a question that names none."""


def has_adapters(settings: Mapping[str, str]) -> bool:
    """Whether an engine's settings say that it has buffers for LoRA adapters."""
    return any(name in settings for name in ADAPTER_OPTIONS)


@cache
def option_names() -> tuple[str, ...]:
    """The name of every option of every engine, once."""
    return tuple(dict.fromkeys(option.name for options in OPTIONS.values() for option in options))


def engines_with(name: str) -> list[str]:
    """The engines that take the option called `name`."""
    return [engine for engine, options in OPTIONS.items() if any(option.name == name for option in options)]


def check_settings(engines: Iterable[str], settings: Mapping[str, Any], has_device: bool) -> None:
    """Raise UsageError (exit 2) if none of the engines takes a setting, or if it needs a device and there is none.

    `engines` are names, which may end in a release; `settings` maps option name to text.
    """
    names = [engine.partition("@")[0] for engine in engines]
    taken = {option.name: option for name in names for option in OPTIONS.get(name, ())}
    for name in settings:
        if name not in taken:
            owners = engines_with(name)
            raise UsageError(
                f"--{name}: {', '.join(dict.fromkeys(names))} has no such setting",
                f"--{name} belongs to {', '.join(owners)}" if owners else nearest(name, taken),
            )
        if taken[name].divides_memory and not has_device:
            raise UsageError(f"--{name} divides a device's memory and needs a device", "for example --gpu h100")


def settings_of(engine: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `engine` takes."""
    taken = {option.name for option in OPTIONS.get(engine.partition("@")[0], ())}
    return {name: text for name, text in settings.items() if name in taken}


def untimed(engine: str, settings: Mapping[str, Any]) -> list[str]:
    """What takes time with these settings and is not counted in the speed."""
    options = OPTIONS.get(engine.partition("@")[0], ())
    parts = dict.fromkeys(option.untimed for option in options if option.untimed and option.name in settings)
    return [f"{part} (their time is not counted)" for part in parts]


def name_of(settings: Mapping[str, str], option: str) -> str:
    """A setting that is a name: a letter, and letters, digits, - and _. Raises SettingError (exit 2)."""
    text = settings[option]
    if not (text[:1].isalpha() and text.isascii() and text.translate(_JOINTS).isalnum()):
        raise SettingError(f"--{option} {text[:40]!a}: not a name", "see --help for examples")
    return text


class SettingsReader(NamedTuple):
    """An engine's settings, option name to text, and methods that parse them.

    A setting that is not given has the value `otherwise`, or else the default that its option declares. Every method
    raises SettingError (exit 2) for text that it cannot parse.
    """

    engine: str
    settings: Mapping[str, str]

    def fill(self, made: Callable[..., _Settings], **given: Any) -> _Settings:
        """The named tuple `made` of an engine's settings: the values in `given`, and in other fields those of options.

        The option has the field's name and declares how it is read: a flag is given or not, N is a count (None without
        a default), words are a choice, and other texts are as given.
        """
        fields = cast(Any, made)._fields
        return made(*(given[name] if name in given else self._value(name.replace("_", "-")) for name in fields))

    def _value(self, name: str) -> Any:
        metavar = self._option(name).metavar
        if metavar is None:
            return name in self.settings
        if metavar == "N":
            has_default = (self._option(name).default or "").isdecimal()
            return self.count(name) if has_default else self.optional_count(name)
        return self.choice(name) if "|" in metavar else self.settings.get(name)

    def count(self, name: str, otherwise: int | None = None, least: int = 1) -> int:
        """A whole number from `least` to the bound that the option declares."""
        if otherwise is not None and name not in self.settings:
            return otherwise
        try:
            return parse_count(self._text(name), f"--{name}", least, self._option(name).most)
        except UsageError as error:
            raise SettingError(error.message, error.hint) from None

    def optional_count(self, name: str, least: int = 1) -> int | None:
        """A whole number of at least `least`, or None if it is not given."""
        return self.count(name, least=least) if name in self.settings else None

    def choice(self, name: str, what: str = "a choice") -> str:
        """One of the words in the option's metavar. `what` names it in the error."""
        text, known = self._text(name), (self._option(name).metavar or "").split("|")
        if text not in known:
            raise SettingError(f"--{name} {text!r}: not {what}", f"one of {', '.join(known)}")
        return text

    def optional_choice(self, name: str) -> str | None:
        """One of the words in the option's metavar, or None if it is not given."""
        return self.choice(name) if name in self.settings else None

    def share(self, name: str, otherwise: float | None = None, *, below_one: bool = False) -> float:
        """A number above 0 and at most 1, or below 1 with `below_one`."""
        if otherwise is not None and name not in self.settings:
            return otherwise
        text, value = self._text(name), self._number(name)
        if not 0 < value <= 1 or (below_one and value == 1):
            hint = None if otherwise is None else f"the default is {otherwise:g}"
            hint = f"for a percentage: --{name} {value:g}%" if 5 <= value <= 100 else hint
            most = "below" if below_one else "at most"
            raise SettingError(f"--{name} {text[:40]!a}: must be above 0 and {most} 1", hint)
        return value

    def ratio(self, name: str) -> float:
        """A number above 0 and below 1e9."""
        value = self._number(name)
        if not 0 < value < 1e9:
            hint = f"the default is {self._option(name).default}"
            raise SettingError(f"--{name} {self._text(name)[:40]!a}: must be a number above 0 and below 1e9", hint)
        return value

    def _number(self, name: str) -> float:
        """0 for text that is not a number."""
        try:
            return float(self._text(name))
        except ValueError:
            return 0.0

    def _text(self, name: str) -> str:
        return self.settings[name] if name in self.settings else self._option(name).default or ""

    def _option(self, name: str) -> Option:
        return next(option for option in OPTIONS[self.engine] if option.name == name)
