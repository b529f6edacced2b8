"""The options that several commands share.

A command gets its options from its class, `@app.command(cls=taking(*declared("fit")))`, and their values from
`ctx.params`. Only the options of the command that runs are built, when it runs. Annotations would cost time at every
start, because typer evaluates them.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Optional, Union

import typer
from typer.core import TyperCommand, TyperOption

from kvcalc.cli import ENGINE_PANEL
from kvcalc.errors import UsageError
from kvcalc.model.presets import shipped_mapping
from kvcalc.question.fields import OPTIONS, REPEATED

_MODEL_HELP = (
    "Model name (kvcalc models lists them), path to a config.json, or hf:org/name. A path may also be a .gguf file or "
    "a folder with a config.json; - is stdin."
)
Model = Annotated[Optional[str], typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
RequiredModel = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]

_OUTPUT = "Output"

# Options that take one value, of which a sweep takes several.
_SWEPT = ("--context", "--batch", "--tp", "--kv-dtype")

GROUPS = {
    # Lengths, types, and the number of devices a model is split over.
    "WORKLOAD": "context max-model-len batch dtype kv-dtype encoder-tokens tp pp dp",
    # The figures of a device, which describe one or replace those of a known one; and all options that choose a device.
    "DEVICE_FIGURES": "gpu-memory gpu-bandwidth flops network link power-limit",
    "DEVICE": "gpu num-gpus DEVICE_FIGURES",
    # Options that change the speed, besides the workload; and the load of a server.
    "SPEED": "ep calibrate",
    "SERVING": "input-tokens output-tokens concurrency confidence",
    # Drafted tokens, and prompts that are partly cached.
    "DRAFTING": "speculative acceptance-length draft-model",
    "PREFIX": "prefix-hit-rate",
    # Common prefixes of requests, and slower memory for evicted blocks.
    "SHARED": "prefix-tokens turns",
    "OFFLOAD": "offload offload-bandwidth",
    "IMAGES": "images image-size",
    # An attention other than the model's own.
    "WHAT_IF_SIZES": "kv-heads kv-lora-rank qk-rope-head-dim",
    "WHAT_IF": "attention WHAT_IF_SIZES",
    # A plain decoder without a config. Each command declares --layers itself: in `measure` it is the layers to build.
    "MODEL_BY_FLAGS": "heads head-dim hidden-size sliding-window",
}
"""Names for several options, in the lists of `shared`. ENGINE_SETTINGS are the options of all engines."""


Declared = Callable[[], list[TyperOption]]
"""Builds an option, or several."""


class WithHelp:
    """A command or group whose help is written by `kvcalc.cli.help`. It depends on the other arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse as the base class does, and keep the arguments for the help."""
        ctx.meta["kvcalc.arguments"] = tuple(args)
        return super().parse_args(ctx, args)  # type: ignore[misc]  # the other base class has it

    def make_parser(self, ctx: Any) -> Any:
        """The parser of the base class. UsageError (exit 2) for an option that takes one value and is given twice."""
        parser = super().make_parser(ctx)  # type: ignore[misc]
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            parsed = parse(args=args)
            given = [
                parameter
                for parameter in parsed[2]
                if not getattr(parameter, "is_flag", True) and not parameter.multiple
            ]
            if len(given) > len(set(given)):
                twice = next(parameter for parameter in given if given.count(parameter) > 1)
                name, hint = next(name for name in twice.opts if name.startswith("--")), None
                if name in _SWEPT and ctx.info_name != "sweep":
                    hint = f"for several values: kvcalc sweep MODEL {name} A,B"
                raise UsageError(f"{name} is given twice, and takes one value", hint)
            return parsed

        parser.parse_args = parse_args
        return parser

    def get_help(self, ctx: Any) -> str:
        """The help as text."""
        from kvcalc.cli.help import help_of

        essential = table_of(ctx.command_path.partition(" ")[2]).get("essential")
        return help_of(self, ctx, ctx.meta.get("kvcalc.arguments", ()), essential)


def taking(*options: Declared, base: Any = TyperCommand) -> Any:
    """A command class that adds `options` to those in the function's signature."""

    built = cache(lambda: [option for build in options for option in build()])

    class Taking(WithHelp, base):  # type: ignore[misc]  # the base is a value
        def __init__(self, *args: Any, params: list[Any], callback: Callable[..., Any], **others: Any) -> None:
            names = [parameter.name for parameter in params]

            def call(**given: Any) -> Any:
                return callback(**{name: given[name] for name in names})

            super().__init__(*args, params=[*params, *built()], callback=call, **others)

    return Taking


class ListOption(TyperOption):
    """An option that takes a list: values separated by commas, or the option repeated, or both.

    Its parameter is the same text in either case, `h100,h200`, or None; `names_of` splits it.
    """

    def type_cast_value(self, ctx: Any, value: Any) -> Any:
        """Join the values of a repeated option with commas."""
        if not value:
            return None
        return value if isinstance(value, str) else ",".join(value)


class RepeatedOption(TyperOption):
    """An option that may be repeated. Its parameter is a tuple of texts, or None if it is not given."""

    def type_cast_value(self, ctx: Any, value: Any) -> Any:
        """None instead of an empty tuple."""
        return tuple(value) if value else None


def names_of(values: Union[str, Sequence[str], None], option: str) -> list[str]:
    """The names in `a,b`, in `("a", "b")` or in `("a,b", "c")`, as typed; an empty list for None.

    Raises UsageError (exit 2) if a name is empty.
    """
    texts = () if values is None else (values,) if isinstance(values, str) else values
    names = [name.strip() for text in texts for name in text.split(",")]
    if not all(names):
        raise UsageError(f"{option} {','.join(texts)[:40]!a}: an empty name in the list")
    return names


def value(
    names: str, metavar: str, help: str, default: Optional[str] = None, panel: Optional[str] = None,
    several: Union[bool, str] = False,
) -> Declared:  # fmt: skip
    """An option with a value, which stays text. Its parameter is named after the first long name of `names`.

    With `several`, the option takes a list, separated by commas or given by repetition (`ListOption`). With `several`
    "repeated", it takes a list by repetition alone (`RepeatedOption`).
    """
    build = RepeatedOption if several == REPEATED else ListOption if several else TyperOption
    return lambda: [build(
        param_decls=names.split(), type=str, default=default, metavar=metavar, help=help, show_default=True,
        rich_help_panel=panel, multiple=bool(several),
    )]  # fmt: skip


def flag(names: str, help: str, panel: Optional[str] = None) -> Declared:
    """An option without a value."""
    return lambda: [
        TyperOption(param_decls=names.split(), is_flag=True, default=False, help=help, rich_help_panel=panel)
    ]


def table_of(command: str) -> dict[str, Any]:
    """The table of a command: its options, and which of these are essential. Empty if they are declared where it is."""
    path = os.path.join(os.path.dirname(__file__), "commands", f"{command}.yaml")
    return shipped_mapping(path, "commands", command) if os.path.exists(path) else {}


def declared(command: str) -> list[Declared]:
    """The options of a command, as commands/COMMAND.yaml lists them.

    A text there is a list for `shared`, and `essential` are those that -h shows. The first key of a mapping is the
    function here that makes the option, with its first argument; the other keys are the other arguments.
    """
    return [lambda: [option for build in _listed(command) for option in build()]]


def _listed(command: str) -> list[Declared]:
    make: dict[str, Callable[..., Declared]] = {"option": option, "value": value, "flag": flag}
    declared: list[Declared] = []
    for row in table_of(command)["options"]:
        if isinstance(row, str):
            declared += shared(row)
        else:
            (kind, name), *others = row.items()
            declared += output(path=name, **dict(others)) if kind == "output" else [make[kind](name, **dict(others))]
    return declared


def shared(names: str) -> list[Declared]:
    """The options with these names, or with those of a group, in this order, as their fields declare them."""
    declared: list[Declared] = []
    for name in names.split():
        if name == "ENGINE_SETTINGS":
            declared.append(engine_settings)
        else:
            declared += shared(GROUPS[name]) if name in GROUPS else [option(name)]
    return declared


def option(name: str, help: str = "", **others: Any) -> Declared:
    """The option with this name as its field declares it, with a command's own `help`, metavar, default or panel."""
    field = OPTIONS[name.replace("-", "_")]
    declared = {"default": field.default, "panel": field.panel, "several": field.several, "metavar": field.metavar}
    return value(field.option, help=help or field.help, **{**declared, **others})


def engine_settings() -> list[TyperOption]:
    """The options of all engines. Engines whose options have the same name share one option."""
    from kvcalc.engines.declarations import OPTIONS as OF_ENGINES

    declared: dict[str, list[tuple[str, Any]]] = {}
    for engine_name, options in OF_ENGINES.items():
        for engine_option in options:
            declared.setdefault(engine_option.name, []).append((engine_name, engine_option))
    return [option for name, owners in declared.items() for option in _engine_option(name, *owners)()]


def _engine_option(name: str, *owners: tuple[str, Any]) -> Declared:
    aliases = list(dict.fromkeys(alias for _, option in owners for alias in option.aliases))
    names = " ".join([f"--{name}", *aliases])
    help = " ".join(f"{engine_name}: {option.described}" for engine_name, option in owners)
    metavar = owners[0][1].metavar
    if metavar is None:
        return flag(names, help, ENGINE_PANEL)
    return value(names, metavar, help, panel=ENGINE_PANEL)


def output(
    metavar: str = "human|tsv|csv|json", more: str = "", path: str = "", *, is_list: bool = False
) -> list[Declared]:
    """The output options. `path` is an example of a --get path in the command's document, which may be a list."""
    default = "human on a terminal, tsv elsewhere" if is_list else "human"
    formats = f"Output format. Default: that of KVCALC_FORMAT, else {default}.{more}"
    example = f": --get {path}" if path else ""
    return [
        value("--format", metavar, formats, panel=_OUTPUT),
        flag("--json", "Print JSON. Short for --format json.", _OUTPUT),
        value("--get", "PATH", f"Print one value of the JSON{example}.", panel=_OUTPUT),
        flag("--no-color", "Print without colours.", _OUTPUT),
    ]
