"""Read the command that starts an engine: the inverse of `command.py`.

An engine whose commands are read has `arguments.yaml` and `reading.yaml` in its folder (`Arguments`, `Words`). If
options have a meaning of their own, it also has a module `reading`, with a `Reader` named `READER`.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from io import RawIOBase
from itertools import pairwise
from select import select
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvcalc.engines.arguments import FLAGS, Argument, Arguments, OptionWord
from kvcalc.engines.declarations import ENGINES, FACTS, OPTIONS, has_table, table
from kvcalc.engines.options import ADAPTER_OPTIONS
from kvcalc.errors import LayoutError, UsageError
from kvcalc.model.yaml_mapping import parse_mapping
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    from kvcalc.model.spec import ModelSpec

# What a script or a manual has instead of a name: a variable, or dots.
_PLACEHOLDER = re.compile(r".*\$.*|\.\.\.|…")
# Words that stand for any number of options: $ARGS, "${ARGS[@]}", $@, $(cat options).
_OPTIONS_ELSEWHERE = re.compile(r"\$(?:\w+|[@*]|\{[^}]*\}|\(.*\))|\.\.\.|…", re.DOTALL)
_LARGEST_FILE = 1 << 20
# Until then, the text of a pipe such as the one of <(...) in bash must have ended.
_WAIT_SECONDS = 2.0
# Methods of --quantization for checkpoints in awq, gptq and so on, which convert nothing (`names` of `reading.yaml`).
_OF_CHECKPOINTS = ("awq", "gptq", "compressed-tensors", "modelopt", "fp8")
# Values of a variable that mean yes, and those that mean no (is_truthy and is_falsey, common/arg.cpp of llama.cpp).
_TRUE, _FALSE = ("1", "on", "enabled", "true"), ("0", "off", "disabled", "false")
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
    this much of the device is free. `num_devices` is set if it uses no more devices of a machine.
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
        self.num_devices: int | None = None
        self.lifts_limit = self.keeps_context = False
        self.margin_bytes: int | None = None

    def size(self, name: str) -> int:
        """A number of devices or sequences, 1 if it is not given. UsageError (exit 2) for another text."""
        return whole(self.fields.get(name, "1"), name)

    def ignore_adapters(self) -> None:
        """Leave out the options for LoRA adapters, as an engine does if it loads none."""
        self.ignored += [f"--{name}" for name in ADAPTER_OPTIONS if self.settings.pop(name, None)]


def whole(text: str, name: str) -> int:
    """A whole number of at least 1. UsageError (exit 2) for another text."""
    if not text.isdecimal() or len(text) > 1000 or not 0 < int(text) < 10**9:
        raise UsageError(f"{name} {text[:40]!a}: must be a whole number of at least 1")
    return int(text)


class Words(NamedTuple):
    """The words of an engine's commands, in `reading.yaml` of its folder.

    `programs` are the words that begin a command, of which the first may be a path, and `images` the containers that
    start it without them. Those in `entrypoints` take no program. `package` is the Python package, if the engine's name
    is another. `fields` maps a field of a question to the names of its option, and `values` the texts of a
    field to kvcalc's. `settings` maps other names of the engine's own options to kvcalc's. `special` are options that
    `Reader.finish` reads. `harmless` are options without an effect on the memory or the speed, and `default_on` flags
    that are on anyway.

    `variables` maps variables of the environment to options, which come before those of the command. `prefixes` begin
    the names of the others that the engine reads, of which `harmless_variables` (patterns) have no effect. `effects`
    are effects that are not counted, with patterns of the options and variables that have them.

    `names` are sets of names that the engine's own reader tells apart, and `conversions` the recipes of methods that
    quantize a checkpoint in 16 bits while it is loaded (`kvcalc.model.published`). `keys` are the keys without an
    effect in a file of settings. `config` is whether --config names a YAML file with the command's own options.

    `others` are words after a program with which it is no server of a model.

    `splits_layers` is whether the engine divides the layers among the devices without being told. `limit_options` are
    its options that may change the model's longest context. `override_options` change keys of the model's config.
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
    prefixes: str = ""
    harmless_variables: str = ""
    effects: Mapping[str, str] = {}
    special: str = ""
    default_on: str = ""
    names: Mapping[str, str] = {}
    conversions: Mapping[str, str] = {}
    keys: str = ""
    config: bool = False
    others: str = ""
    splits_layers: bool = False
    limit_options: str = ""
    override_options: str = ""


class Reader:
    """How an engine's command is read, by its `Words`. Options that kvcalc has (`engine.yaml`) are read anyway.

    `fields` maps an option's name to the field of a question, and `special` is the set of options for `finish`.
    """

    def __init__(self, engine: str) -> None:
        self.engine, self.words = engine, Words(**table(engine, "reading"))
        self.programs = [tuple(program.split()) for program in self.words.programs]
        self.model_options = self.words.model_options.split()
        self.fields = {name: field for field, names in self.words.fields.items() for name in names.split()}
        self.values = {**self.words.values, "dtype": float_types()}
        self.special, self.harmless = self.words.special.split(), self.words.harmless.split()
        self.default_on = self.words.default_on.split()
        self.names = {kind: names.split() for kind, names in self.words.names.items()}
        self.limit_variable: str = FACTS[engine].get("limit_variable", "")

    @cached_property
    def arguments(self) -> Arguments:
        """The engine's own parser."""
        return Arguments(self.engine)

    @cached_property
    def own(self) -> dict[str, str]:
        """The names of the engine's options that kvcalc has -> kvcalc's name."""
        return {**{option.name: option.name for option in OPTIONS[self.engine]}, **self.words.settings}

    def described(self, options: Sequence[str]) -> list[str]:
        """Options and variables that are not counted, each once and with its effect."""
        effects = [(effect, patterns.split()) for effect, patterns in self.words.effects.items()]
        rows = []
        for option in dict.fromkeys(options):
            name = self.arguments.name_of(option)
            matching = (
                effect for effect, patterns in effects if any(fnmatchcase(name, pattern) for pattern in patterns)
            )
            effect = next(matching, None)
            rows.append(option if effect is None else f"{option} ({effect})")
        return rows

    def flag_for(self, field: str) -> str:
        """The engine's option for a field of a question."""
        return "--" + next(name for name, target in self.fields.items() if target == field)

    def reworded(self, text: str) -> str:
        """A text with the engine's options in place of kvcalc's own for the same."""

        def engines(match: re.Match[str]) -> str:
            field, value = _OPTIONS[match[1]], match[2] or ""
            if field not in self.fields.values():
                return match[0]
            names = {ours: name for name, ours in self.values.get(field, {}).items()}
            return self.flag_for(field) + (f" {names.get(value, value)}" if value else "")

        return _OWN_OPTION.sub(engines, text)

    def read(
        self, words: Sequence[str], environment: Mapping[str, str], files: Mapping[str, str], version: str | None = None
    ) -> Read:
        """What the words after the program say.

        `files` are those that the command writes first. Raises LayoutError (exit 2) for what the engine's parser
        refuses, and UsageError (exit 2) for a command without a model.
        """
        read = Read(self.engine + (f"@{version}" if version else ""))
        place, rest, stray = self.arguments.place(read.engine), dict[str, OptionWord](), list[str]()
        in_file = self._file(words, files)
        typed = self.arguments.read([*(in_file or ()), *words], place)
        for word in (*self._variables(read, environment, place), *typed):
            if word.argument is None and not word.word.startswith("-"):
                stray.append(word.word)
            elif word.argument is None or not self._take(read, word, word.argument):
                rest[word.word if word.argument is None else word.argument.name] = word
        for name, word in rest.items():
            if name in self.harmless or (name in self.default_on and word.is_on):
                read.ignored.append(word.word)
            elif word.is_on or name in self.default_on:
                read.unknown.append(word.word)
        if not read.model and stray:
            read.model = stray.pop(0)
        if not read.model:
            raise UsageError(f"{' '.join(self.programs[0])}: the command names no model")
        if _PLACEHOLDER.fullmatch(read.model):
            raise UsageError(f"{read.model} stands for a model; the command needs its name")
        elsewhere = next((word for word in stray if _OPTIONS_ELSEWHERE.fullmatch(word)), None)
        if elsewhere is not None:
            raise UsageError(f"{elsewhere[:40]} stands for options that are not here", "write the options themselves")
        if stray and place.is_read:
            raise LayoutError(f"unrecognized arguments: {' '.join(stray)[:80]}", "leave them out")
        read.unknown += stray
        if self.words.config and read.left.pop("config", None) is not None and in_file is None:
            read.unknown.append("--config")
        may_change = self.words.limit_options.split()
        read.lifts_limit = environment.get(self.limit_variable, "0").casefold() in ("1", "true")
        read.lifts_limit |= any(option.split(".")[0].lstrip("-") in may_change for option in read.unknown)
        read.nodes = whole(read.left.get("nnodes", "1"), "--nnodes")
        for name in self.words.override_options.split():
            self._override(read, name)
        self._quantize(read)
        self.finish(read, environment, files)
        checkpoint = None if read.drafting is None else read.drafting[2]
        if not isinstance(checkpoint, str | None):
            raise UsageError(f"the draft model {str(checkpoint)[:40]!a} is not a name")
        return read

    def _override(self, read: Read, name: str) -> None:
        """Read an option that changes the model's config. Changes of its language model's part count too."""
        text = read.left.pop(name, None)
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
                read.overrides[key] = value
            elif key not in _HARMLESS_KEYS:
                read.unknown.append(f"--{name} {key}")

    def _variables(self, read: Read, environment: Mapping[str, str], place: Any) -> Iterator[OptionWord]:
        """The options that variables of the environment set. Variables that are not read go into `read`."""
        options = {**self.arguments.variables, **self.words.variables}
        for variable, text in environment.items():
            # llama.cpp turns a switch off by LLAMA_ARG_NO_..., whatever its value (get_value_from_env, common/arg.cpp).
            positive = variable if variable in options else variable.replace("_ARG_NO_", "_ARG_")
            name = options.get(positive)
            argument = None if name is None else self.arguments.spelled.get(f"--{name}", (Argument(name), True))[0]
            if argument is not None and argument.kind in FLAGS:
                is_on = text in _TRUE and positive == variable
                if argument.kind == "switch" and not is_on and positive == variable and text not in _FALSE:
                    raise LayoutError(f"{variable}={text[:40]}: invalid boolean value", f"{variable}=1 or {variable}=0")
                yield from (
                    OptionWord(variable, argument, is_on=is_on) for _ in range(is_on or argument.kind == "switch")
                )
            elif argument is not None and text:
                yield OptionWord(variable, argument, self.arguments.checked(variable, argument, text, place))
            elif argument is None and variable.startswith(tuple(self.words.prefixes.split()) or " "):
                harmless = self.words.harmless_variables.split()
                is_harmless = variable == self.limit_variable or any(
                    fnmatchcase(variable, pattern) for pattern in harmless
                )
                (read.ignored if is_harmless else read.unknown).append(variable)

    def _file(self, words: Sequence[str], files: Mapping[str, str]) -> list[str] | None:
        """The options in the YAML file of --config, which come before those of the command. None without the file."""
        paths = [value for word, value in pairwise(words) if word == "--config"]
        paths += [word.partition("=")[2] for word in words if word.startswith("--config=")]
        text = text_of(paths[0], files) if paths and self.words.config else None
        if text is None:
            return None
        typed = list[str]()
        for key, value in parse_mapping(text, paths[0]).items():
            option = f"--{key}"
            if isinstance(value, bool):
                negation = f"--no-{str(key).replace('_', '-')}"
                typed += [option] if value else [negation] if negation in self.arguments.spelled else []
            elif isinstance(value, list):
                typed += [option, *map(str, value)] if value else []
            elif value is not None:
                typed += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
        return typed

    def _take(self, read: Read, option: OptionWord, argument: Argument) -> bool:
        """Put an option where it counts. False if it counts nowhere, or is for nobody."""
        name, text, is_flag = argument.name, option.text, argument.kind in FLAGS
        if name in self.model_options:
            read.model = text
        elif name in self.fields:
            field = self.fields[name]
            read.fields[field] = self.values.get(field, {}).get(text, text)
        elif name in self.special and is_flag:
            read.left.pop(name, None)
            read.left.update({name: text} if option.is_on else {})
        elif name in self.special:
            before = read.left.pop(name, "{}")
            key = option.key
            read.left[name] = json.dumps({**json_object(before, name), key: _scalar(text)}) if key else text
        elif is_flag:
            # kvcalc has the option that is not the engine's default, which may be the negation.
            names = {self.own[spelled]: spelled == name for spelled in (name, f"no-{name}") if spelled in self.own}
            for spelled, is_positive in names.items():
                read.settings.pop(spelled, None)
                read.settings.update({spelled: text} if option.is_on == is_positive else {})
            return bool(names)
        elif name in self.own:
            read.settings[self.own[name]] = text
        else:
            return False
        return True

    def _quantize(self, read: Read) -> None:
        """Read --quantization: a method that converts a checkpoint in 16 bits while it is loaded."""
        method = read.left.get("quantization", "")
        if method in self.names.get("to fp8", ()):
            read.fields["dtype"] = "fp8"
        elif method in self.words.conversions:
            read.converts_to = self.words.conversions[method]
        elif method in self.names.get("converts", ()):
            read.unknown.append(f"quantization {method}")

    def check_model(self, read: Read, spec: ModelSpec) -> None:
        """Raise LayoutError (exit 2) if the engine does not start with these options and the model's checkpoint.

        Source: _verify_quantization and get_quant_config of vLLM (config/model.py, model_loader/weight_utils.py) and
        SGLang (srt/configs/model_config.py, srt/model_loader/weight_utils.py).
        """
        method, title = read.left.get("quantization", ""), FACTS[self.engine]["title"]
        needed = next((spelled for spelled in _OF_CHECKPOINTS if method in self.names.get(spelled, ())), None)
        stated = spec.quantization if isinstance(spec.quantization, Mapping) else None
        of_checkpoint = "" if stated is None else str(stated.get("quant_method", "modelopt"))
        refused = f"--quantization {method}: {title} does not start with a checkpoint"
        if stated is None and (needed is not None or method in self.names.get("quantized", ())):
            raise LayoutError(f"{refused} that is not quantized", "leave it out, or name a quantized copy")
        if stated is None and method and not (read.converts_to or method in self.names["to fp8"]):
            read.unknown.append(f"quantization {method}")
        is_known = of_checkpoint.startswith(_OF_CHECKPOINTS) and (needed is not None or method == "fp8")
        replaces = of_checkpoint.startswith("modelopt") and self.replaces_method(read)
        if is_known and not replaces and not of_checkpoint.startswith(needed or "fp8"):
            text = f"leave it out: {title} reads the checkpoint's"
            raise LayoutError(f"{refused} in {of_checkpoint.split()[0]}", text)

    def replaces_method(self, read: Read) -> bool:
        """Whether ModelOpt's method replaces any other for its checkpoints."""
        return True

    def installed(self, read: Read) -> None:
        """Add what follows from the packages in an image of the engine's own project."""

    def finish(self, read: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
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
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"--{name} {text[:40]!a}: not a JSON object", "JSON has double quotes: '{\"key\": 1}'")
    return value


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """The inverse mapping. If several keys have a value, it maps to the first."""
    return {value: key for key, value in reversed(list(table.items()))}


def float_types() -> dict[str, str]:
    """PyTorch's names of types with 16 or 32 bits, and of the checkpoint's own -> kvcalc's names."""
    return {"bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32", "auto": ""}


@cache
def readers() -> list[Reader]:
    """The readers of all engines whose commands are read, in the order of lists."""
    known = []
    for engine, (folder, _) in ENGINES.items():
        if has_table(engine, "reading"):
            spec = find_spec(f"kvcalc.engines.{folder}.reading")
            known.append(Reader(engine) if spec is None else import_module(spec.name).READER)
    return known
