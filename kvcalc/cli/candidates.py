"""Completion candidates for the last word of a command line: commands, options, models, devices, engines, types, paths.

To be fast, this parses no YAML: a preset's name is its file name, and its aliases are read from the file's text.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from kvcalc.cli import ENGINE_PANEL
from kvcalc.cli.help import engines_in, first_sentence, summary

# Directives printed among the candidates (see kvcalc.cli.completion).
FILES, NO_SPACE = ":files", ":nospace"

# Parameters whose values are lists in these commands: the part after the last comma is completed.
_LISTS = {
    "gpu": ("compare", "sweep", "plan"), "engine": ("estimate", "compare", "sweep", "plan"), "kv_dtype": ("sweep",),
    "attention": ("compare", "measure"), "price": ("plan", "prefix"),
}  # fmt: skip
_ATTENTIONS = ("mha", "mqa", "gqa", "mla")
_NUMBERS_OF_DEVICES = (2, 4, 8, 16)
_PRESET_BYTES = 64 * 1024


def complete(root: Any, words: Sequence[str]) -> dict[str, str]:
    """The candidates for the last of `words`, each with its description. Directives are among them.

    `words` are the words after `kvcalc`. `root` is kvcalc's group of commands.
    """
    *typed, last = words
    if not typed:
        commands = {name: summary(name) for name in root.list_commands(None)}
        return _beginning(last, {**commands, **(_options_of(root, []) if last.startswith("-") else {})})
    command = root.get_command(None, typed[0]) if typed[0] in root.list_commands(None) else None
    if command is None:
        return {}
    kind, typed = typed[0], typed[1:]
    subcommands = getattr(command, "commands", {})
    if subcommands and typed and not typed[0].startswith("-"):
        name = typed[0] if typed[0] in subcommands else "show"
        command, kind, typed = subcommands[name], f"{kind}_{name}", typed[1 if typed[0] in subcommands else 0 :]
        subcommands = {}
    options = {name: option for option in command.params if option.param_type_name == "option" for name in option.opts}
    pending, place, used = _read(typed, options)
    if pending is not None:
        return _values(kind, pending, last, typed)
    name, equals, value = last.partition("=")
    if equals and name in options and not options[name].is_flag:
        return {
            text if text.startswith(":") else f"{name}={text}": help
            for text, help in _values(kind, options[name], value, typed).items()
        }
    arguments = [
        argument for argument in command.params if argument.param_type_name == "argument" and not argument.hidden
    ]
    takes_more = place < len(arguments) or (bool(arguments) and arguments[-1].nargs == -1)
    if takes_more and not last.startswith("-"):
        return _values(kind, arguments[min(place, len(arguments) - 1)], last, typed)
    if subcommands and not last.startswith("-"):
        described = {name: first_sentence(subcommand.help) for name, subcommand in subcommands.items()}
        return _beginning(last, {**described, **dict.fromkeys(_names(kind, last), "")})
    return _beginning(last, _options_of(command, typed, used)) if last[:1] in ("-", "") else {}


def _read(typed: Sequence[str], options: dict[str, Any]) -> tuple[Any, int, set[str]]:
    """The option whose value comes next, or None; the number of arguments so far; and the parameters given so far."""
    place, used, waiting = 0, set(), 0
    pending = None
    for word in typed:
        if waiting:
            waiting -= 1
            continue
        name, equals, _ = word.partition("=")
        option = options.get(name)
        if option is not None:
            used.add(option.name)
            waiting = 0 if option.is_flag or equals else option.nargs
            pending = option
        elif not word.startswith("-") or word == "-":
            place += 1
    return (pending if waiting else None), place, used


def _options_of(command: Any, typed: Sequence[str], used: Iterable[str] = ()) -> dict[str, str]:
    """The options that are not given yet. Engine options are included only for the engines that --engine names."""
    from kvcalc.engines.declarations import OPTIONS

    names_of_engines = {option.name for engine in engines_in(typed) for option in OPTIONS[engine]}
    options = {}
    for option in command.params:
        name = next((name for name in option.opts if name.startswith("--")), "")
        is_others = getattr(option, "rich_help_panel", None) == ENGINE_PANEL and name[2:] not in names_of_engines
        if name and not is_others and (option.name not in used or option.multiple):
            options[name] = first_sentence(option.help).partition(" [default")[0]
    return {**options, "--help": "Show all options."}


def _values(kind: str, parameter: Any, last: str, typed: Sequence[str]) -> dict[str, str]:
    """The values of an option or an argument that begin with `last`."""
    done = last.rpartition(",") if kind in _LISTS.get(parameter.name, ()) else ("", "", last)
    head, part = done[0] + done[1], done[2]
    beginning = _beginning(part, dict.fromkeys(_known(kind, parameter, part, typed), ""))
    return {text if text.startswith(":") else head + text: help for text, help in beginning.items()}


def _known(kind: str, parameter: Any, part: str, typed: Sequence[str]) -> Iterable[str]:
    """The known values of an option or an argument. Directives are among them."""
    name, metavar = parameter.name, parameter.metavar or ""
    if name in ("model", "models", "draft_model"):
        return (*_model_names(part), FILES)
    if name == "name":
        return _names(kind, part)
    if name == "gpu":
        return (*_gpu_names(part), "local", *_numbers(part))
    if name == "price":
        return (*(f"{gpu}=" for gpu in _gpu_names(part)), NO_SPACE)
    if name == "engine":
        return _engines(kind, part)
    if name in ("dtype", "kv_dtype", "cache_type_k", "cache_type_v"):
        return _dtypes(name)
    if name == "speculative":
        return ("mtp:", "eagle:", "eagle1:", "dflash:", "draft:", "ngram:", NO_SPACE)
    if name == "attention":
        return (*_ATTENTIONS, *(["all"] if kind in _LISTS[name] else []))
    if name == "get":
        return _paths(kind, typed)
    if name == "family":
        return _families()
    if name == "shell":
        return ("bash", "zsh", "fish")
    if "|" in metavar:
        return metavar.split("|")
    is_file = parameter.name in ("file", "files", "log") or metavar in ("FILE", "CSV", "A B")
    return (FILES,) if is_file else ()


def _beginning(last: str, candidates: dict[str, str]) -> dict[str, str]:
    """The candidates that begin with `last`, ignoring case, and the directives."""
    start = last.casefold()
    return {
        name: help for name, help in candidates.items() if name.casefold().startswith(start) or name.startswith(":")
    }


def _names(kind: str, part: str) -> list[str]:
    return list(_gpu_names(part) if kind.startswith("gpus") else _model_names(part))


def _model_names(part: str) -> Iterator[str]:
    """Names of models, and also aliases if `part` is not empty."""
    from kvcalc.model.preset_folders import shipped_files, user_files
    from kvcalc.model.presets import presets_folder

    return _preset_names(part, [*user_files(), *shipped_files(presets_folder())])


def _gpu_names(part: str) -> Iterator[str]:
    """Names of devices, and also aliases if `part` is not empty."""
    from kvcalc.model.preset_folders import shipped_files
    from kvcalc.model.presets import presets_folder

    return _preset_names(part, shipped_files(os.path.join(os.path.dirname(presets_folder()), "gpus")))


def _preset_names(part: str, files: Sequence[tuple[str, str]]) -> Iterator[str]:
    for name, _ in files:
        yield name
    if part:
        for _, path in files:
            yield from _listed(path, "aliases:")


def _listed(path: str, key: str) -> list[str]:
    """The names under a top-level key of a YAML file: `[a, b]`, `- a` on the following lines, or a single name."""
    try:
        with open(path, encoding="utf-8") as file:
            text = "\n" + file.read(_PRESET_BYTES)
    except (OSError, UnicodeDecodeError):
        return []
    rest = text.partition(f"\n{key}")[2].lstrip(" ")
    if rest.startswith("["):
        names = rest[1:].partition("]")[0].split(",")
    elif rest.startswith("\n"):
        below = takewhile(lambda line: line.startswith("- "), map(str.strip, rest[1:].splitlines()))
        names = [line[2:] for line in below]
    else:
        names = [rest.partition("\n")[0]]
    return [name.strip(" \n\"'") for name in names if name.strip()]


def _numbers(part: str) -> list[str]:
    """`h100x` is completed to h100x2, h100x4, ... if h100 is a device."""
    name, x, number = part.rpartition("x")
    if not x or (number and not number.isdecimal()) or name.casefold() not in set(_gpu_names(name)):
        return []
    return [f"{name}x{count}" for count in _NUMBERS_OF_DEVICES]


def _engines(kind: str, part: str) -> list[str]:
    from kvcalc.engines.declarations import OPTIONS

    name, at, _ = part.partition("@")
    if at:
        from kvcalc.engines import engine_class

        return [f"{name}@{release}" for release in engine_class(name).known_releases()] if name in OPTIONS else []
    return [*OPTIONS, *(["all"] if kind in ("estimate", "compare", "sweep") else [])]


def _dtypes(name: str) -> list[str]:
    from kvcalc.memory.dtypes import DTYPES, FILE_TYPES, MLX_TYPES

    if name == "dtype":
        return [*DTYPES, *FILE_TYPES, *MLX_TYPES]
    return ["auto", *DTYPES] if name == "kv_dtype" else list(DTYPES)


def _paths(kind: str, typed: Sequence[str]) -> list[str]:
    """The --get paths of the command's document."""
    from kvcalc.output.path_hints import definition_of, paths_of
    from kvcalc.schema import load_schema

    if kind == "batch":
        kind = "estimate"
    elif kind == "estimate" and "all" in typed:
        kind = "engines"
    elif kind == "measure" and "--compare" in typed:
        kind = "measure_compare"
    elif kind == "measure" and "--profile" in typed:
        kind = "measure_profile"
    schema = load_schema()
    return paths_of(schema, kind) if definition_of(schema, kind) in schema["$defs"] else []


def _families() -> list[str]:
    from kvcalc.model.preset_folders import shipped_files
    from kvcalc.model.presets import presets_folder

    families = (name for _, path in shipped_files(presets_folder()) for name in _listed(path, "family:"))
    return sorted(set(families), key=str.casefold)
