"""Read the command that starts an engine: the inverse of `command.py`.

An engine whose commands are read has `reading.yaml` in its folder (`Words`). If options have a meaning of their own, it
also has a module `reading`, with a `Reader` named `READER`.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from io import RawIOBase
from itertools import pairwise
from select import select
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvcalc.engines.declarations import ENGINES, OPTIONS, has_table, table
from kvcalc.engines.options import ADAPTER_OPTIONS
from kvcalc.errors import UsageError
from kvcalc.model.yaml_mapping import parse_mapping
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    from kvcalc.model.spec import ModelSpec

# A number may begin with a minus sign: --max-model-len -1.
_OPTION = re.compile(r"--?[A-Za-z]")
# What a script or a manual has instead of a name: a variable, or dots.
_PLACEHOLDER = re.compile(r".*\$.*|\.\.\.|…")
# Words that stand for any number of options: $ARGS, "${ARGS[@]}", $@, $(cat options).
_OPTIONS_ELSEWHERE = re.compile(r"\$(?:\w+|[@*]|\{[^}]*\}|\(.*\))", re.DOTALL)
_LARGEST_FILE = 1 << 20
# Until then, the text of a pipe such as the one of <(...) in bash must have ended.
_WAIT_SECONDS = 2.0
# Values of a variable that turn a flag on (is_truthy, common/arg.cpp of llama.cpp).
_TRUE = ("1", "on", "enabled", "true")
# kvcalc's options that an engine may have under another name.
_OPTIONS = {
    "--tp": "tensor_parallel_size", "--pp": "pipeline_parallel_size", "--dp": "data_parallel_size",
    "--ep": "expert_parallel_size", "--kv-dtype": "kv_dtype",
}  # fmt: skip
# The config of the language model in a model of several parts, keys of the positions, and keys that change no memory.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_POSITIONS = ("rope_scaling", "rope_parameters", "max_position_embeddings", "original_max_position_embeddings")
_HARMLESS_KEYS = ("rope_theta", "architectures")
_OWN_OPTION = re.compile(rf"(?<![\w-])({'|'.join(_OPTIONS)})(?![\w-])(?: (\w+))?")


class Read:
    """What a command says.

    `fields` maps the fields of a question to their text, and `settings` the engine's own options to theirs. `left` has
    the options with a meaning of the engine's own until its reader has read them. `overrides` are other values for the
    keys of the model's config. `converts_to` is the recipe of a quantized release (`kvcalc.model.published.RECIPES`) as
    which the engine stores a checkpoint in 16 bits, or None. `drafting` is the method, the number of tokens and the
    checkpoint that drafts, or None. `unknown` are options that kvcalc does not count, and `notes`
    what else it does not. `copies` are whole copies behind one server, and `nodes` the machines that run the same
    command. `lifts_limit` is whether it allows a context beyond the model's, or changes the model's, and
    `keeps_context` whether an engine that chooses its context must not. `length_shares` are the sequences that then
    divide the model's own length. `margin_bytes` is set if the engine moves parts of the model into host memory until
    this much of the device is free.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.model = ""
        self.fields: dict[str, str] = {}
        self.settings: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.overrides: dict[str, Any] = {}
        self.converts_to: str | None = None
        self.drafting: tuple[str, int, str | None] | None = None
        self.ignored: list[str] = []
        self.unknown: list[str] = []
        self.notes: list[str] = []
        self.copies = self.nodes = self.length_shares = 1
        self.lifts_limit = self.keeps_context = False
        self.margin_bytes: int | None = None

    def last(self, *names: str) -> str | None:
        """The text of an option under the name that the command has last, which counts. None without the option."""
        return next((text for name, text in reversed(self.left.items()) if name in names), None)

    def size(self, name: str) -> int:
        """A number of devices or sequences, 1 if it is not given. UsageError (exit 2) for another text."""
        return whole(self.fields.get(name, "1"), name)

    def ignore_adapters(self) -> None:
        """Leave out the options for LoRA adapters, as an engine does if it loads none."""
        self.ignored += [f"--{name}" for name in ADAPTER_OPTIONS if self.settings.pop(name, None)]


def whole(text: str, name: str) -> int:
    """A whole number of at least 1. UsageError (exit 2) for another text."""
    if not text.isdecimal() or not 0 < int(text) < 10**9:
        raise UsageError(f"{name} {text[:40]!a}: must be a whole number of at least 1")
    return int(text)


class Words(NamedTuple):
    """The words of an engine's commands, in `reading.yaml` of its folder.

    `programs` are the words that begin a command, of which the first may be a path, and `images` the containers that
    start it without them. Those in `entrypoints` take no program. `package` is the Python package, if the engine's name
    is another. `fields` maps a field of a question to the names of its option, and `values` the texts of a
    field to kvcalc's. `settings` maps other names of the engine's own options to kvcalc's, and `variables` variables of
    the environment to options, which come first. `special` are options that `Reader.finish` reads, and `lists` those
    that take several words. `harmless` are options without an effect on the memory or the speed, `former` those of
    older releases, and `default_on` flags that are on anyway. A name that ends in `!` takes no value.

    `names` are sets of names that the engine's own reader tells apart. `keys` are the keys without an effect in a file
    of settings. `config` is whether --config names a YAML file with
    the command's own options.

    `others` are words after a program with which it is no server of a model.

    `needs_context` is whether the engine refuses to start if not even one request of its longest context fits, and
    `splits_layers` whether it divides the layers among the devices without being told. `context_option` is its option
    for the longest context, if `fields` has none, and `chooses_context` whether it takes the longest context that fits
    if none is given. It refuses a context beyond the model's without the variable `limit_variable`, and `limit_options`
    are its options that may change the model's. `override_options` change keys of the model's config.
    """

    programs: list[str]
    harmless: str
    images: Sequence[str] = ()
    entrypoints: Sequence[str] = ()
    package: str = ""
    model_options: str = "model"
    fields: Mapping[str, str] = {}
    values: Mapping[str, Mapping[str, str]] = {}
    settings: Mapping[str, str] = {}
    variables: Mapping[str, str] = {}
    special: str = ""
    lists: str = ""
    former: str = ""
    default_on: str = ""
    names: Mapping[str, str] = {}
    keys: str = ""
    config: bool = False
    others: str = ""
    needs_context: bool = True
    splits_layers: bool = False
    context_option: str = ""
    chooses_context: bool = False
    limit_variable: str = ""
    limit_options: str = ""
    override_options: str = ""


class Reader:
    """How an engine's command is read, by its `Words`. Options that kvcalc has (`engine.yaml`) are read anyway.

    `fields` maps an option's name to the field of a question, and `special` is the set of options for `finish`.
    """

    def __init__(self, engine: str) -> None:
        self.engine, self.words = engine, Words(**table(engine, "reading"))
        self.programs = [tuple(program.split()) for program in self.words.programs]
        self.model_options, self.lists = self.words.model_options.split(), self.words.lists.split()
        self.fields = {name: field for field, names in self.words.fields.items() for name in names.split()}
        self.values = {**self.words.values, "dtype": float_types()}
        self.special = self.words.special.replace("!", "").split()
        self.names = {kind: names.split() for kind, names in self.words.names.items()}

    @cached_property
    def known(self) -> dict[str, bool]:
        """The names of the options -> whether they take a value."""
        words = self.words
        names = f"{words.special} {words.harmless} {words.former} {words.default_on}".split()
        found = {name.removesuffix("!"): not name.endswith("!") for name in names}
        found.update(dict.fromkeys((*self.model_options, *self.fields), True))
        for option in OPTIONS[self.engine]:
            for name in (option.name, *option.aliases):
                found[name.lstrip("-")] = option.metavar is not None
        found.update({name: found[own] for name, own in self.words.settings.items()})
        return found

    @cached_property
    def _own(self) -> dict[str, str]:
        """The names of the engine's options that kvcalc has -> kvcalc's name."""
        options = OPTIONS[self.engine]
        found = {name.lstrip("-"): option.name for option in options for name in (option.name, *option.aliases)}
        return {**found, **self.words.settings}

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

    def reworded(self, text: str) -> str:
        """A text with the engine's options in place of kvcalc's own for the same."""

        def engines(found: re.Match[str]) -> str:
            field, value = _OPTIONS[found[1]], found[2] or ""
            if field not in self.fields.values():
                return found[0]
            names = {ours: name for name, ours in self.values.get(field, {}).items()}
            return self.flag_for(field) + (f" {names.get(value, value)}" if value else "")

        return _OWN_OPTION.sub(engines, text)

    def read(
        self, words: Sequence[str], environment: Mapping[str, str], files: Mapping[str, str], version: str | None = None
    ) -> Read:
        """What the words after the program say.

        `files` are those that the command writes first. Raises UsageError (exit 2) for an option without its value, or
        a command without a model.
        """
        found = Read(self.engine + (f"@{version}" if version else ""))
        stray: list[str] = []
        in_file = self._file(words, files)
        rest = [*self._variables(environment), *(in_file or ()), *words]
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
                while name in self.lists and rest and not _OPTION.match(rest[0]):
                    text += f",{rest.pop(0)}"
            self._take(found, option, name, key, text if takes_value or equals else "true")
        if not found.model and stray:
            found.model = stray.pop(0)
        if not found.model:
            raise UsageError(f"{' '.join(self.programs[0])}: the command names no model")
        if _PLACEHOLDER.fullmatch(found.model):
            raise UsageError(f"{found.model} stands for a model; the command needs its name")
        elsewhere = next((word for word in stray if _OPTIONS_ELSEWHERE.fullmatch(word)), None)
        if elsewhere is not None:
            raise UsageError(f"{elsewhere[:40]} stands for options that are not here", "write the options themselves")
        found.unknown += stray
        if self.words.config and found.left.pop("config", None) is not None and in_file is None:
            found.unknown.append("--config")
        may_change = self.words.limit_options.split()
        found.lifts_limit = environment.get(self.words.limit_variable, "0").casefold() in ("1", "true")
        found.lifts_limit |= any(option.split(".")[0].lstrip("-") in may_change for option in found.unknown)
        nodes = found.last("nnodes", "n")
        found.nodes = 1 if nodes is None else whole(nodes, "--nnodes")
        for name in self.words.override_options.split():
            self._override(found, name)
        self.finish(found, environment, files)
        checkpoint = None if found.drafting is None else found.drafting[2]
        if not isinstance(checkpoint, str | None):
            raise UsageError(f"the draft model {str(checkpoint)[:40]!a} is not a name")
        return found

    def _override(self, found: Read, name: str) -> None:
        """Read an option that changes the model's config. Changes of its language model's part count too."""
        text = found.left.pop(name, None)
        if text is None:
            return
        changes = _nested(json_object(text, name))
        if name == "rope-scaling":
            changes = {"rope_scaling": changes}
        for part in _TEXT_CONFIGS:
            inner = changes.pop(part, None)
            changes |= inner if isinstance(inner, dict) else {}
        for key, value in changes.items():
            if key in _POSITIONS:
                found.overrides[key] = value
            elif key not in _HARMLESS_KEYS:
                found.unknown.append(f"--{name} {key}")

    def _variables(self, environment: Mapping[str, str]) -> Iterator[str]:
        for variable, option in self.words.variables.items():
            text = environment.get(variable)
            if text and self.known[option]:
                yield from (f"--{option}", text)
            elif text and text.casefold() in _TRUE:
                yield f"--{option}"

    def _file(self, words: Sequence[str], files: Mapping[str, str]) -> list[str] | None:
        """The options in the YAML file of --config, which come before those of the command. None without the file."""
        paths = [value for word, value in pairwise(words) if word == "--config"]
        paths += [word.partition("=")[2] for word in words if word.startswith("--config=")]
        text = text_of(paths[0], files) if paths and self.words.config else None
        if text is None:
            return None
        found = []
        for key, value in parse_mapping(text, paths[0]).items():
            if isinstance(value, (dict, list)):
                found += [f"--{key}", json.dumps(value)]
            elif value is True:
                found.append(f"--{key}")
            elif value is not None and value is not False:
                found += [f"--{key}", str(value)]
        return found

    def _take(self, found: Read, option: str, name: str, key: str, text: str) -> None:
        if option.lstrip("-").replace("_", "-").startswith("no-") and not name.startswith("no-") and text == "true":
            if f"{name}!" in self.words.default_on.split():
                found.unknown.append(option)
            elif name not in self._own and name not in self.fields and name not in self.special:
                found.ignored.append(option)
            return  # the default of a flag is that it is not set
        if name in self.model_options:
            found.model = text
        elif name in self._own:
            found.settings[self._own[name]] = text
        elif name in self.fields:
            field = self.fields[name]
            found.fields[field] = self.values.get(field, {}).get(text, text)
        elif name in self.special:
            before = found.left.pop(name, "{}")
            found.left[name] = json.dumps({**json_object(before, name), key: _scalar(text)}) if key else text
        elif name in self.known:
            found.ignored.append(option)
        else:
            found.unknown.append(option)

    def check_model(self, found: Read, spec: ModelSpec) -> None:
        """Raise LayoutError (exit 2) if the engine does not start with these options and the model's checkpoint."""

    def finish(self, found: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
        """Read the options with a meaning of the engine's own, and the environment."""


def text_of(path: str, files: Mapping[str, str]) -> str | None:
    """The text of one of `files`, which the script writes before the command, or of a file on this machine, or None."""
    text = files.get(path, files.get(os.path.basename(path)))
    if text is not None:
        return text
    try:
        with open(path, "rb", buffering=0, opener=_without_waiting) as file:
            data = file.read(_LARGEST_FILE) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else _from_pipe(file, path)
        return data.decode()
    except (OSError, ValueError):
        return None


def _without_waiting(path: str, flags: int) -> int:
    # Otherwise a named pipe is opened only when somebody writes to it.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _from_pipe(file: RawIOBase, path: str) -> bytes:
    """The bytes that are written to a pipe. UsageError (exit 2) if nobody ends them in time."""
    data, end = b"", monotonic() + _WAIT_SECONDS
    while len(data) < _LARGEST_FILE and select([file], [], [], max(0.0, end - monotonic()))[0]:
        part = file.read(_LARGEST_FILE)
        if not part:
            return data
        data += part
    raise UsageError(f"{path}: not a regular file, and its text does not end", "write the settings to a file")


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with `a.b` as a key of the mapping `a`."""
    result: dict[str, Any] = {}
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return result


def json_object(text: str, name: str) -> dict[str, Any]:
    """The mapping in an option's JSON. UsageError (exit 2) for another text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"--{name} {text[:40]!a}: not a JSON object", "JSON has double quotes: '{\"key\": 1}'")
    return found


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """The inverse mapping. If several keys have a value, it maps to the first."""
    return {value: key for key, value in reversed(list(table.items()))}


def float_types() -> dict[str, str]:
    """PyTorch's names of types with 16 or 32 bits, and of the checkpoint's own -> kvcalc's names."""
    return {"bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32", "auto": ""}


@cache
def readers() -> list[Reader]:
    """The readers of all engines whose commands are read, in the order of lists."""
    found = []
    for engine, (folder, _) in ENGINES.items():
        if has_table(engine, "reading"):
            own = find_spec(f"kvcalc.engines.{folder}.reading")
            found.append(Reader(engine) if own is None else import_module(own.name).READER)
    return found
