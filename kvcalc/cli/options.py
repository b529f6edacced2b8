"""The options that several commands share.

A command gets its options from its class, `@app.command(cls=taking(*shared(WORKLOAD), *output()))`, and their values
from `ctx.params`. Only the options of the command that runs are built. Annotations would cost time at every start,
because typer evaluates them.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Optional, Union

import typer
from typer.core import TyperCommand, TyperOption

from kvcalc.cli import ENGINE_PANEL
from kvcalc.errors import UsageError

_MODEL_HELP = (
    "Model name (kvcalc models lists them), path to a config.json, or hf:org/name. A path may also be a .gguf file or "
    "a folder with a config.json; - is stdin."
)
Model = Annotated[Optional[str], typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
RequiredModel = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]

# Headings in the help.
_DEVICE, _SPEED, _LOAD, _OUTPUT = "Device", "Speed", "Server load", "Output"
_DRAFTING = "Speculative decoding"
_REUSE = "Cache reuse"
_BY_FLAGS = "A model without a config"


# An option that takes several values by repetition alone: paths may contain commas.
_REPEATED = "repeated"

# Names, metavar, help, and optionally the default, the panel and whether it takes a list. -h shows the first sentence.
_SHARED_OPTIONS: tuple[tuple[Any, ...], ...] = (
    ("--context -c", "N", "Tokens per sequence: 8192, 8k, 1M (k is 1024). Default: 4096, or the model's maximum if "
     "that is less. auto is the longest that fits, as llama-server and vLLM choose it; it needs --gpu."),
    ("--max-model-len", "N", "The same as --context, read as vLLM reads it: k is 1000, K is 1024."),
    ("--batch -b", "B", "Number of sequences.", "1"),
    ("--dtype", "TYPE", "Type of the weights: bf16, fp16, fp8, int4, nvfp4 and others. Default: the config's type."),
    ("--kv-dtype --kv-cache-dtype", "TYPE",
     "Type of the cache: bf16, fp8, q8_0 and others. auto is the type of the weights if it has 16 or 32 bits, else "
     "the config's.", "auto"),
    ("--encoder-tokens", "N",
     "Tokens of the encoder's output (T5, BART) or of an image (Llama 3.2 Vision). Default: the model's own number, "
     "else --context."),
    ("--tp --tensor-parallel-size", "T",
     "Number of devices that split the heads. Default: --num-gpus divided by --pp and --dp, else 1."),
    ("--pp --pipeline-parallel-size", "P", "Number of pipeline stages. Default: 1."),
    ("--dp --data-parallel-size", "D",
     "Number of attention replicas, which divide the requests among them and share the experts. Default: 1. Each is "
     "split over --tp devices."),
    ("--kv-memory", "SIZE",
     "Cache memory per device: 80G, 80GiB. Prints the longest context and the largest batch that fit. With --gpu it "
     "replaces the computed memory."),
    ("--gpu", "NAME[xN]",
     "Device, with an optional count: h100, h100x8, rtx-4090. kvcalc gpus lists the names; local is the device in this "
     "machine.", None, _DEVICE, True),
    ("--num-gpus", "N",
     "Number of devices. Default: the number in --gpu, else --tp times --pp times --dp.", None, _DEVICE),
    ("--gpu-memory", "SIZE",
     "Memory of one device: 80G, 80GiB. Describes a device of your own, or replaces the figure of --gpu.",
     None, _DEVICE),
    ("--gpu-bandwidth --bandwidth", "RATE", "Memory bandwidth of one device: 3.35TB/s.", None, _DEVICE),
    ("--flops", "RATE", "Dense bf16 operations per second of one device: 989T.", None, _DEVICE),
    ("--ep --expert-parallel-size", "E",
     "Number of devices that each hold whole experts. Default: --dp times --tp if --dp is given, else 1, which splits "
     "every expert over --tp.",
     None, _SPEED),
    ("--calibrate", "FILE",
     "Your own measurements, from which the speed's constants are corrected: results of a benchmark (those that kvcalc "
     "score reads), a record of kvcalc measure --json on this device, or a folder of them. May be repeated.",
     None, _SPEED, _REPEATED),
    ("--input-tokens", "N", "Tokens per prompt. The context is --input-tokens plus --output-tokens.", None, _LOAD),
    ("--output-tokens", "N", "Tokens per answer.", None, _LOAD),
    ("--concurrency", "N", "Concurrent requests. Default: as many as fit. Requests that do not fit wait.", None, _LOAD),
    ("--prefix-hit-rate", "R",
     "Share of the prompt's tokens that are found in the prefix cache: 0.3 or 30%. They take no prefill, but as much "
     "memory as before.", None, _LOAD),
    ("--images", "N",
     "Images in every request, with --image-size. Their tokens are a part of the context.", None, _LOAD),
    ("--image-size", "WxH", "Size of an image in pixels: 1920x1080.", None, _LOAD),
    ("--speculative", "METHOD:N",
     "Draft N tokens per step with mtp, eagle (EAGLE-3), eagle1 (EAGLE-1 and 2), dflash, draft or ngram: mtp:3. mtp "
     "uses the model's own layers, draft a --draft-model.", None, _DRAFTING),
    ("--acceptance-length", "L",
     "Mean number of tokens that a step gives, from 1 to N + 1: 2.4. Engines print it. The speed needs it.", None,
     _DRAFTING),
    ("--draft-model", "MODEL",
     "Model that drafts, or the config of an EAGLE or DFlash head: a name or a path, as for MODEL.", None, _DRAFTING),
    ("--prefix-tokens", "N",
     "Tokens at the start of every prompt that are the same, such as a system prompt. The engine keeps them once.",
     None, _REUSE),
    ("--turns", "K",
     "Turns of a session. The lengths are those of the last turn, whose prompt holds the whole session.", None, _REUSE),
    ("--offload", "TIER=SIZE,...",
     "Memory that keeps what the device's cache drops, of one replica: cpu=200GiB,disk=2TiB. The tiers are cpu, disk "
     "and remote.", None, _REUSE),
    ("--offload-bandwidth", "TIER=RATE,...",
     "Rate of each tier: cpu=50GB/s,disk=6GB/s. Default: the device's PCIe link for cpu, one NVMe drive for disk. cpu "
     "is per device, the others are shared.", None, _REUSE),
    ("--offload-backend --kv-offloading-backend", "NAME",
     "What keeps the tiers: native (the engine itself, the default) or lmcache, in chunks of 256 tokens.",
     None, _REUSE),
    ("--transfer-bandwidth", "RATE|LINK",
     "Rate of one device's link between a prefill and a decode instance: 50GB/s, nvlink, pcie, infiniband-400g, "
     "ethernet-100g.", None, _REUSE),
    ("--report", "FILE", "Also write the answer as an HTML page, which needs no network and no other file: FILE.html.",
     None, _OUTPUT),
    ("--attention", "KIND", "Compute the cache as if the model had mha, mqa, gqa or mla."),
    ("--kv-heads", "G", "Number of KV heads, for --attention or for a model described by options."),
    ("--kv-lora-rank", "R", "Width of MLA's latent, for --attention mla."),
    ("--qk-rope-head-dim", "D", "Width of MLA's rotary key, for --attention mla."),
    ("--layers", "L", "Number of layers.", None, _BY_FLAGS),
    ("--heads", "H", "Number of attention heads.", None, _BY_FLAGS),
    ("--head-dim", "D", "Width of a head.", None, _BY_FLAGS),
    ("--hidden-size", "D", "Width of the model.", None, _BY_FLAGS),
    ("--sliding-window", "W", "Window of every layer, in tokens.", None, _BY_FLAGS),
)  # fmt: skip

# Lengths, types, and the number of devices a model is split over.
WORKLOAD = "context max-model-len batch dtype kv-dtype encoder-tokens tp pp dp"
# The figures of a device, which describe one or replace those of a known one; and all options that choose a device.
DEVICE_FIGURES = "gpu-memory gpu-bandwidth flops"
DEVICE = f"gpu num-gpus {DEVICE_FIGURES}"
# Options that change the speed, besides the workload; and the load of a server.
SPEED, SERVING = "ep calibrate", "input-tokens output-tokens concurrency"
# Drafted tokens, and prompts that are partly cached.
DRAFTING, PREFIX = "speculative acceptance-length draft-model", "prefix-hit-rate"
# What requests have in common, and slower memory that keeps what they leave.
SHARED, OFFLOAD = "prefix-tokens turns", "offload offload-bandwidth offload-backend"
IMAGES = "images image-size"
# An attention other than the model's own.
WHAT_IF_SIZES = "kv-heads kv-lora-rank qk-rope-head-dim"
WHAT_IF = f"attention {WHAT_IF_SIZES}"
# A plain decoder without a config. Each command declares --layers itself: in `measure` it is the layers to build.
MODEL_BY_FLAGS = "heads head-dim hidden-size sliding-window"


class WithHelp:
    """A command or group whose help is written by `kvcalc.cli.help`. It depends on the other arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse as the base class does, and keep the arguments for the help."""
        ctx.meta["kvcalc.arguments"] = tuple(args)
        return super().parse_args(ctx, args)  # type: ignore[misc]  # the other base class has it

    def get_help(self, ctx: Any) -> str:
        """The help as text."""
        from kvcalc.cli.help import help_of

        return help_of(self, ctx, ctx.meta.get("kvcalc.arguments", ()))


def taking(*options: TyperOption, base: Any = TyperCommand) -> Any:
    """A command class that adds `options` to those in the function's signature."""

    class Taking(WithHelp, base):  # type: ignore[misc]  # the base is a value
        def __init__(self, *args: Any, params: list[Any], callback: Callable[..., Any], **others: Any) -> None:
            own = [parameter.name for parameter in params]

            def call(**given: Any) -> Any:
                return callback(**{name: given[name] for name in own})

            super().__init__(*args, params=[*params, *options], callback=call, **others)

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
) -> TyperOption:  # fmt: skip
    """An option with a value, which stays text. Its parameter is named after the first long name of `names`.

    With `several`, the option takes a list, separated by commas or given by repetition (`ListOption`). With `several`
    "repeated", it takes a list by repetition alone (`RepeatedOption`).
    """
    build = RepeatedOption if several == _REPEATED else ListOption if several else TyperOption
    return build(
        param_decls=names.split(), type=str, default=default, metavar=metavar, help=help, show_default=True,
        rich_help_panel=panel, multiple=bool(several),
    )  # fmt: skip


def flag(names: str, help: str, panel: Optional[str] = None) -> TyperOption:
    """An option without a value."""
    return TyperOption(param_decls=names.split(), is_flag=True, default=False, help=help, rich_help_panel=panel)


def shared(names: str) -> list[TyperOption]:
    """The shared options with these names, in this order."""
    rows = {row[0].split()[0].removeprefix("--"): row for row in _SHARED_OPTIONS}
    return [value(*rows[name]) for name in names.split()]


def engine(help: str, default: str = "logical", metavar: str = "NAME[@RELEASE],...") -> TyperOption:
    """The option for the engine or a list of engines. Each command explains its use in `help`."""
    return value("--engine", metavar, help, default, several=True)


def engine_settings() -> list[TyperOption]:
    """The options of all engines. Engines whose options have the same name share one option."""
    from kvcalc.engines.options import OPTIONS

    declared: dict[str, list[tuple[str, Any]]] = {}
    for engine_name, options in OPTIONS.items():
        for option in options:
            declared.setdefault(option.name, []).append((engine_name, option))
    return [_engine_option(name, *owners) for name, owners in declared.items()]


def _engine_option(name: str, *owners: tuple[str, Any]) -> TyperOption:
    aliases = list(dict.fromkeys(alias for _, option in owners for alias in option.aliases))
    names = " ".join([f"--{name}", *aliases])
    help = " ".join(f"{engine_name}: {option.described}" for engine_name, option in owners)
    metavar = owners[0][1].metavar
    if metavar is None:
        return flag(names, help, ENGINE_PANEL)
    return value(names, metavar, help, panel=ENGINE_PANEL)


def output(metavar: str = "human|tsv|csv|json", more: str = "", path: str = "") -> list[TyperOption]:
    """The output options. `path` is an example of a --get path in the command's document."""
    example = f": --get {path}" if path else ""
    return [
        value("--format", metavar, f"Output format. Default: human on a terminal, tsv elsewhere.{more}", panel=_OUTPUT),
        flag("--json", "Print JSON. Short for --format json.", _OUTPUT),
        value("--get", "PATH", f"Print one value of the JSON{example}.", panel=_OUTPUT),
        flag("--no-color", "Print without colours.", _OUTPUT),
    ]
