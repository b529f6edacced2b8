"""The options of an engine's command as its own parser reads them: names, negations, abbreviations, types and choices.

An engine whose commands are read has `arguments.yaml` in its folder. `parser` is the engine's: `argparse` of Python,
`click`, or `exact` (llama.cpp), which has no `=` and no abbreviations, and takes any word as a value. An option stands
under the kind of its value (`_KINDS`), with its other spellings: `tensor-parallel-size,-tp`. A spelling after `!` turns
a switch off. `choice` maps options to the values that they take. No release before RELEASE has `name@RELEASE`, and none
since RELEASE has `name<RELEASE`; releases in between may have it. `release` is the one whose options are all known.

With `normalises`, underscores in names count as dashes. With `has_inverses`, --disable-x turns --enable-x off. `unset`
is a text that stands for no value, and `units` are the units of a `size`; without them, they are vLLM's. `variables`
maps variables of the environment to options.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from kvcalc.engines.declarations import OPTIONS, table
from kvcalc.errors import LayoutError, UsageError, nearest
from kvcalc.records import NamedTuple
from kvcalc.releases import Release, release_of
from kvcalc.units import parse_vllm_integer

# A number may begin with a minus sign: --max-model-len -1.
_OPTION = re.compile(r"--?[A-Za-z]")
FLAGS, LISTS = ("switch", "flag"), ("list", "integers")
_KINDS = (*FLAGS, "integer", "number", "size", "length", "text", *LISTS, "object", "optional")
# The types in argparse's messages.
_TYPES = {"integer": "int", "integers": "int", "number": "float", "size": "human_readable_int", "length": "int"}
_UNKNOWN = {"argparse": "unrecognized arguments", "click": "no such option", "exact": "invalid argument"}
_MARKED = re.compile(r"([^@<]+)(?:@([\d.]+))?(?:<([\d.]+))?")
_DIGITS, _SIZE = re.compile(r"\s*[-+]?\d+"), re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)")


class Argument(NamedTuple):
    """An option of the engine: its name without dashes, the kind of its value, and the releases that have it.

    `choices` maps the values that it takes to the releases that take them.
    """

    name: str
    kind: str = "text"
    releases: tuple[str, str] = ("", "")
    choices: Mapping[str, tuple[str, str]] = {}


class OptionWord(NamedTuple):
    """A word of a command, and the option that it names. `argument` is None if the parser has none.

    `key` is what follows a dot in the name of an option with JSON. `is_on` is False for the negation of a switch.
    """

    word: str
    argument: Argument | None = None
    text: str = "true"
    key: str = ""
    is_on: bool = True


class _Place(NamedTuple):
    """The release of a command (None: the newest). `is_read` is whether all of its options are known."""

    release: Release | None
    is_stated: bool
    is_read: bool

    def has(self, releases: tuple[str, str]) -> bool:
        """Whether the release may have what is in some releases only. One that is not stated may be an older one."""
        first, end = (Release.of(*map(int, text.split("."))) if text else None for text in releases)
        is_older = first is not None and self.release is not None and self.release < first
        is_newer = end is not None and self.is_stated and (self.release is None or self.release >= end)
        return not is_older and not is_newer


class Arguments:
    """An engine's parser. kvcalc's own options for the engine are in it too.

    `spelled` maps every spelling to its option, and to whether it turns it on.
    """

    def __init__(self, engine: str) -> None:
        rows: dict[str, Any] = table(engine, "arguments")
        self._rows, self.parser = rows, rows["parser"]
        self.variables: Mapping[str, str] = rows.get("variables", {})
        self.spelled: dict[str, tuple[Argument, bool]] = {}
        entries = [(entry, kind, "") for kind in _KINDS for entry in rows.get(kind, "").split()]
        for entry, kind, choices in (
            *entries,
            *((entry, "choice", rows["choice"][entry]) for entry in rows.get("choice", {})),
        ):
            names, releases = _marked(entry)
            spellings = [name if name[0] in "-!" else f"--{name}" for name in names.split(",")]
            argument = Argument(spellings[0].lstrip("-"), kind, releases, dict(map(_marked, choices.split())))
            for spelling in spellings:
                self.spelled[spelling.lstrip("!")] = argument, spelling[0] != "!"
                for negation in self._negations(spelling) if kind == "switch" else ():
                    self.spelled.setdefault(negation, (argument, False))
        for option in OPTIONS[engine]:
            argument = Argument(option.name, "flag" if option.metavar is None else "text")
            known = self.spelled.setdefault(f"--{option.name}", (argument, True))
            self.spelled.update(dict.fromkeys(option.aliases, known))

    def _negations(self, spelling: str) -> Iterator[str]:
        prefix, _, rest = spelling.partition("able-")
        if spelling.startswith("--"):
            yield f"--no-{spelling[2:]}"
        if prefix in ("--en", "--dis") and self._rows.get("has_inverses"):
            yield f"--{'dis' if prefix == '--en' else 'en'}able-{rest}"

    def name_of(self, word: str) -> str:
        """The name of an option that is spelled out, and other words as they are: variables, JSON's keys."""
        named = self.spelled.get(self._normal(word))
        return word.split(" ")[0] if named is None else named[0].name

    def takes(self, word: str) -> bool:
        """Whether a word is an option of the engine, written out."""
        return self._normal(re.split("[=.]", word)[0]) in self.spelled

    def place(self, engine: str) -> _Place:
        """The release of an engine such as `vllm@0.30.0`."""
        release, is_stated = release_of(engine), "@" in engine
        read = self._rows.get("release")
        is_newest = release is not None and read is not None and release == Release.of(*map(int, read.split(".")))
        return _Place(release, is_stated, self.parser != "click" and (is_newest or not is_stated))

    def read(self, words: Sequence[str], place: _Place) -> Iterator[OptionWord]:
        """The options in the words, and the other words.

        Raises LayoutError (exit 2) for what the engine's parser refuses. In a release whose options are not all known,
        an option that is not known may be one of its own.
        """
        rest = deque(words)
        while rest:
            word = rest.popleft()
            if not _OPTION.match(word):
                yield OptionWord(word)
                continue
            option, equals, text = (word, "", "") if self.parser == "exact" else word.partition("=")
            spelling, key, attached = self._spelling(option, place)
            argument, is_on = self.spelled.get(spelling, (None, True))
            if argument is None:
                if not equals and rest and not _OPTION.match(rest[0]):
                    rest.popleft()
                yield OptionWord(option)
            elif argument.kind in FLAGS:
                if equals or attached:
                    refused = f"argument {option}: ignored explicit argument {(text or attached)[:40]!r}"
                    raise LayoutError(refused, f"{spelling} has no value")
                yield OptionWord(option, argument, is_on=is_on)
            else:
                text = attached or (text if equals else self._value(option, argument, rest))
                is_unset = text == self._rows.get("unset") or (not text and argument.kind in ("size", "length"))
                if argument.kind in LISTS or not is_unset:
                    yield OptionWord(
                        option, argument, text if key else self.checked(option, argument, text, place), key
                    )

    def _spelling(self, option: str, place: _Place) -> tuple[str, str, str]:
        """The full spelling of an option, the key after a dot in it, and the value that is attached to a single letter.

        Empty if the parser has none. LayoutError (exit 2) if several options begin so, or if the release has none.
        """
        head, _, key = (option, "", "") if self._normal(option) in self.spelled else option.partition(".")
        head = self._normal(head)
        matches, short = {head} & self.spelled.keys(), head[:2]
        if not matches and self.parser == "argparse":
            matches = {
                name for name, (known, _) in self.spelled.items() if name.startswith(head) and place.has(known.releases)
            }
            matches |= {short} & self.spelled.keys()
        options = {(self.spelled[name][0].name, self.spelled[name][1]) for name in matches}
        spelling = min(matches) if len(options) == 1 else ""
        if place.is_read and len(options) > 1:
            raise LayoutError(f"ambiguous option: {option} could match {', '.join(sorted(matches))}", "write it out")
        refused = f"{_UNKNOWN[self.parser]}: {option}"
        if spelling and not place.has(self.spelled[spelling][0].releases):
            raise LayoutError(refused, "this release does not have it")
        if place.is_read and not matches:
            raise LayoutError(refused, nearest(option, self.spelled))
        return spelling, key, head[2:] if spelling == short != head else ""

    def _value(self, option: str, argument: Argument, rest: deque[str]) -> str:
        """An option's value, the words of which are taken from the `rest`."""
        if not rest or (self.parser == "argparse" and _OPTION.match(rest[0]) and " " not in rest[0]):
            if argument.kind == "optional":
                return "true"
            raise LayoutError(f"argument {option}: expected one argument", "write its value after it")
        text = rest.popleft()
        while argument.kind in LISTS and rest and not _OPTION.match(rest[0]):
            text += f",{rest.popleft()}"
        return text

    def checked(self, option: str, argument: Argument, text: str, place: _Place) -> str:
        """An option's value, with numbers in digits. LayoutError (exit 2) if the engine's parser refuses it."""
        kind = argument.kind
        if "$" in text and kind in (*_TYPES, "choice"):
            raise UsageError(f"{option} {text[:40]} stands for a value that is not here", "write the value itself")
        try:
            if kind == "choice" and not place.has(argument.choices[text]):
                raise KeyError(text)
            if kind == "number":
                float(text)
            elif kind in ("size", "length") and (kind == "size" or text.casefold() not in ("auto", "-1")):
                return str(self._size(text, option))
            elif kind in ("integer", "integers"):
                # llama.cpp reads the digits at the beginning (std::stoi).
                digits = _DIGITS.match(text) if self.parser == "exact" else None
                return ",".join(str(int(part)) for part in (text if digits is None else digits[0]).split(","))
        except KeyError:
            refused = f"argument {option}: invalid choice: {text[:40]!r}"
            raise LayoutError(
                refused, nearest(text, argument.choices) or f"one of {', '.join(argument.choices)}"
            ) from None
        except (ValueError, UsageError):
            raise LayoutError(f"argument {option}: invalid {_TYPES[kind]} value: {text[:40]!r}", None) from None
        return text

    def _size(self, text: str, option: str) -> int:
        """A number with the engine's units. Those of 1,000 allow a decimal point."""
        units, number = self._rows.get("units"), _SIZE.fullmatch(text.strip())
        if units is None:
            return parse_vllm_integer(text, option)
        if number is None:
            return int(text)
        if number[2] not in units or ("." in number[1] and units[number[2]] % 1000):
            raise ValueError(text)
        return int(Decimal(number[1]) * units[number[2]])

    def _normal(self, option: str) -> str:
        return option.replace("_", "-") if option.startswith("--") and self._rows.get("normalises") else option


def _marked(entry: str) -> tuple[str, tuple[str, str]]:
    """A name, and the releases that have it: `a@1.2<1.3` is from 1.2 to before 1.3."""
    match = _MARKED.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry}: not a name with its releases")
    return match[1], (match[2] or "", match[3] or "")
