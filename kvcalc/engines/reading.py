"""Read the command that starts an engine: the opposite of `command.py`.

An engine whose commands are read has a module `reading` in its folder, with a `Reader` named `READER`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

from kvcalc.engines.declarations import ENGINES, OPTIONS
from kvcalc.errors import UsageError

READABLE = ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "mlx")
"""The engines whose commands are read."""

# A number may begin with a minus sign: --max-model-len -1.
_OPTION = re.compile(r"--?[A-Za-z]")


class Read:
    """What a command says.

    `fields` maps the fields of a question to their text, and `settings` the engine's own options to theirs. `left` has
    the options with a meaning of the engine's own until its reader has read them. `drafting` is the method, the number
    of tokens and the checkpoint that drafts, or None. `unknown` are options that kvcalc does not count, and `notes`
    what else it does not. `copies` are whole copies behind one server, and `nodes` the machines that run the same
    command. `lifts_limit` is whether it allows a context beyond the model's, or changes the model's.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.model = ""
        self.fields: dict[str, str] = {}
        self.settings: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.drafting: tuple[str, int, str | None] | None = None
        self.ignored: list[str] = []
        self.unknown: list[str] = []
        self.notes: list[str] = []
        self.copies = self.nodes = 1
        self.lifts_limit = False

    def size(self, name: str) -> int:
        """A number of devices or sequences, 1 if it is not given. UsageError (exit 2) for another text."""
        return whole(self.fields.get(name, "1"), name)


def whole(text: str, name: str) -> int:
    """A whole number of at least 1. UsageError (exit 2) for another text."""
    if not text.isdecimal() or not 0 < int(text) < 10**9:
        raise UsageError(f"{name} {text[:40]!a}: must be a whole number of at least 1")
    return int(text)


class Reader:
    """How an engine's command is read.

    `programs` are the words that begin it, of which the first may be a path, and `images` the containers that start it
    without them. `fields` maps an option's name to the field of a question, `values` the texts of a field to kvcalc's.
    `special` are options that `finish` reads. `harmless` are options without an effect on the memory or the speed. A
    name that ends in `!` takes no value. Options that kvcalc has for the engine (`engine.yaml`) are read anyway.
    """

    engine: str
    programs: tuple[tuple[str, ...], ...]
    images: tuple[str, ...] = ()
    model_options: tuple[str, ...] = ("model",)
    fields: ClassVar[Mapping[str, str]] = {}
    values: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    settings: ClassVar[Mapping[str, str]] = {}
    special: str = ""
    harmless: str = ""
    needs_context = True  # whether it refuses to start if not even one request of its longest context fits
    splits_layers = False  # whether it divides the layers among the devices without being told
    context_option = ""  # its option for the longest context, if `fields` has none
    chooses_context = False  # whether it takes the longest context that fits if none is given
    limit_variable = ""  # the variable without which it refuses a context beyond the model's
    limit_options: tuple[str, ...] = ()  # its options that may change the model's

    @cached_property
    def known(self) -> dict[str, bool]:
        """The names of the options -> whether they take a value."""
        found = {name.removesuffix("!"): not name.endswith("!") for name in f"{self.special} {self.harmless}".split()}
        found.update(dict.fromkeys((*self.model_options, *self.fields), True))
        for option in OPTIONS[self.engine]:
            for name in (option.name, *option.aliases):
                found[name.lstrip("-")] = option.metavar is not None
        found.update({name: found[own] for name, own in self.settings.items()})
        return found

    @cached_property
    def _own(self) -> dict[str, str]:
        """The names of the engine's options that kvcalc has -> kvcalc's name."""
        options = OPTIONS[self.engine]
        found = {name.lstrip("-"): option.name for option in options for name in (option.name, *option.aliases)}
        return {**found, **self.settings}

    def takes(self, word: str) -> bool:
        """Whether a word is an option of the engine that kvcalc knows."""
        return self.name_of(re.split("[=.]", word)[0]) in self.known

    def name_of(self, word: str) -> str:
        """The name of an option in a word, as the tables have it."""
        name = word.lstrip("-").replace("_", "-")
        if name not in self.known and "-" in name:
            # argparse takes the beginning of a name, if it is that of one option.
            longer = [known for known in self.known if known.startswith(name)]
            name = longer[0] if len(longer) == 1 and longer[0] in self.fields else name
        return name[3:] if name.startswith("no-") and name not in self.known and name[3:] in self.known else name

    def flag_for(self, field: str) -> str:
        """The engine's option for a field of a question."""
        return "--" + next(name for name, found in self.fields.items() if found == field)

    def read(
        self, words: Sequence[str], environment: Mapping[str, str], files: Mapping[str, str], version: str | None = None
    ) -> Read:
        """What the words after the program say.

        `files` are those that the command writes first. Raises UsageError (exit 2) for an option without its value, or
        a command without a model.
        """
        found = Read(self.engine + (f"@{version}" if version else ""))
        stray: list[str] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if not _OPTION.match(word):
                stray.append(word)
                continue
            option, equals, text = word.partition("=")
            head, _, key = option.partition(".")
            name = self.name_of(head)
            takes_value = self.known.get(name, bool(rest) and not _OPTION.match(rest[0]))
            if takes_value and not equals:
                if not rest:
                    raise UsageError(f"{option}: the command ends before its value")
                text = rest.pop(0)
                while name in self._lists and rest and not _OPTION.match(rest[0]):
                    text += f",{rest.pop(0)}"
            self._take(found, option, name, key, text if takes_value or equals else "true")
        if not found.model and stray:
            found.model = stray.pop(0)
        if not found.model:
            raise UsageError(f"{' '.join(self.programs[0])}: the command names no model")
        found.unknown += stray
        found.lifts_limit = environment.get(self.limit_variable, "0").casefold() in ("1", "true")
        found.lifts_limit |= any(option.split(".")[0].lstrip("-") in self.limit_options for option in found.unknown)
        nodes = found.left.get("nnodes")
        found.nodes = 1 if nodes is None else whole(nodes, "--nnodes")
        self.finish(found, environment, files)
        return found

    _lists: tuple[str, ...] = ()

    def _take(self, found: Read, option: str, name: str, key: str, text: str) -> None:
        if option.startswith("--no-") and text == "true" and f"no-{name}" not in self.known:
            if name not in self._own and name not in self.fields and name not in self.special.replace("!", "").split():
                found.ignored.append(option)
            return  # the default of a flag is that it is not set
        if name in self.model_options:
            found.model = text
        elif name in self._own:
            found.settings[self._own[name]] = text
        elif name in self.fields:
            field = self.fields[name]
            found.fields[field] = self.values.get(field, {}).get(text, text)
        elif name in self.special.replace("!", "").split():
            if key:
                found.left[name] = json.dumps({**_object(found.left.get(name, "{}"), name), key: _scalar(text)})
            else:
                found.left[name] = text
        elif name in self.known:
            found.ignored.append(option)
        else:
            found.unknown.append(option)

    def finish(self, found: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
        """Read the options with a meaning of the engine's own, and the environment."""


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _object(text: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"--{name} {text[:40]!a}: not a JSON object")
    return found


json_object = _object


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """The other way round: of several keys with a value, the first."""
    return {value: key for key, value in reversed(list(table.items()))}


def float_types(words: Iterable[str] = ()) -> dict[str, str]:
    """PyTorch's names of types with 16 or 32 bits, and what else means the checkpoint's own -> kvcalc's names."""
    names = {"bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32", "auto": ""}
    return {**names, **dict.fromkeys(words, "")}


def reader_of(engine: str) -> Reader:
    """The reader of an engine, which is one of `READABLE`."""
    found: Reader = import_module(f"kvcalc.engines.{ENGINES[engine][0]}.reading").READER
    return found


def readers() -> list[Reader]:
    """The readers of all engines."""
    return [reader_of(engine) for engine in READABLE]
