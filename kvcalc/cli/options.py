"""The options that several commands share, in groups.

A command takes groups by its class, `@app.command(cls=taking(workload, output))`, and finds their values in
`ctx.params`. Options are built for the command that runs, and not by annotations, which typer reads at every start.
"""

from collections.abc import Callable
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand, TyperOption

Group = Callable[[], list[TyperOption]]

_MODEL_HELP = (
    "A preset (`kvcalc models`), a config.json or .gguf file, a folder with a config.json, - for stdin, or hf:org/name."
)
Model = Annotated[Optional[str], typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
RequiredModel = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]

_DEVICE, _SPEED, _OUTPUT = "The device", "How fast", "Output"
_ENGINE, _BY_FLAGS = "The engine's own settings", "Model by flags"


def taking(*groups: Group, base: Any = TyperCommand) -> Any:
    """A command class that adds the options of `groups` to those in the function's signature."""

    class Taking(base):  # type: ignore[misc]  # the base is a value
        def __init__(self, *args: Any, params: list[Any], callback: Callable[..., Any], **others: Any) -> None:
            own = [parameter.name for parameter in params]

            def call(**given: Any) -> Any:
                return callback(**{name: given[name] for name in own})

            params = [*params, *(option for group in groups for option in group())]
            super().__init__(*args, params=params, callback=call, **others)

    return Taking


def value(
    *names: str,
    metavar: Optional[str],
    help: str,
    default: Optional[str] = None,
    panel: Optional[str] = None,
    multiple: bool = False,
) -> TyperOption:
    """An option with a value, which stays text. Its parameter is named after the first long name."""
    return TyperOption(
        param_decls=list(names), type=str, default=default, metavar=metavar, help=help, show_default=True,
        rich_help_panel=panel, multiple=multiple,
    )  # fmt: skip


def flag(*names: str, help: str, panel: Optional[str] = None) -> TyperOption:
    """An option without a value."""
    return TyperOption(param_decls=list(names), is_flag=True, default=False, help=help, rich_help_panel=panel)


def context() -> list[TyperOption]:
    """The length of a sequence."""
    return [
        value(
            "--context", "-c", metavar="N",
            help="Tokens per sequence: 8192, 8k, 1M (k is 1024). Default: 4096 or the model's maximum.",
        ),
        max_model_len(),
    ]  # fmt: skip


def max_model_len() -> TyperOption:
    """vLLM's spelling of the context."""
    return value("--max-model-len", metavar="N", help="--context as vLLM reads it: k is 1000, K is 1024.")


def batch() -> TyperOption:
    """The number of sequences."""
    return value("--batch", "-b", metavar="B", default="1", help="Sequences.")


def dtype() -> TyperOption:
    """The type of the weights."""
    return value(
        "--dtype", metavar="TYPE", help="Type of the weights: bf16, fp16, fp32, fp8, ... Default: the config's."
    )


def encoder_tokens() -> TyperOption:
    """The length of an encoder's output."""
    return value(
        "--encoder-tokens", metavar="N",
        help="Tokens of the encoder's output (T5, BART) or of an image (Llama 3.2 Vision). Default: the model's own, "
        "else --context.",
    )  # fmt: skip


def pp() -> TyperOption:
    """The number of pipeline stages."""
    return value(
        "--pp", "--pipeline-parallel-size", metavar="P", help="Pipeline stages. Also --pipeline-parallel-size."
    )


def kv_dtype() -> TyperOption:
    """The type of the cache."""
    return value(
        "--kv-dtype", "--kv-cache-dtype", metavar="TYPE", default="auto",
        help="Type of the cache: bf16, fp8, q8_0, ... auto: --dtype if it has 16 or 32 bits, else the config's. Also "
        "--kv-cache-dtype.",
    )  # fmt: skip


def workload() -> list[TyperOption]:
    """What is asked of a model: lengths, types, and how many devices it is split over."""
    return [
        *context(),
        batch(),
        dtype(),
        kv_dtype(),
        encoder_tokens(),
        value(
            "--tp", "--tensor-parallel-size", metavar="T",
            help="Devices that split the heads. Default: 1, or --num-gpus. Also --tensor-parallel-size.",
        ),
        pp(),
    ]  # fmt: skip


def kv_memory() -> list[TyperOption]:
    """Memory for the cache alone."""
    return [
        value(
            "--kv-memory", metavar="SIZE",
            help="Cache memory per device (80G, 80GiB): prints the longest context and the largest batch that fit.",
        )
    ]  # fmt: skip


def engine(help: str, default: str = "logical", metavar: str = "NAME[@RELEASE]") -> TyperOption:
    """The engine. Each command says what it asks of one."""
    return value("--engine", metavar=metavar, default=default, help=help)


def engine_settings() -> list[TyperOption]:
    """Every engine's own options. Engines that share a name share the option."""
    from kvcalc.memory.engines.options import OPTIONS

    declared: dict[str, list[tuple[str, Any]]] = {}
    for engine_name, options in OPTIONS.items():
        for option in options:
            declared.setdefault(option.name, []).append((engine_name, option))
    return [_engine_option(name, *owners) for name, owners in declared.items()]


def _engine_option(name: str, *owners: tuple[str, Any]) -> TyperOption:
    aliases = list(dict.fromkeys(alias for _, option in owners for alias in option.aliases))
    help = " ".join(f"{engine_name}: {option.described}" for engine_name, option in owners)
    if aliases:
        help += f" Also {', '.join(aliases)}."
    metavar = owners[0][1].metavar
    if metavar is None:
        return flag(f"--{name}", *aliases, help=help, panel=_ENGINE)
    return value(f"--{name}", *aliases, metavar=metavar, help=help, panel=_ENGINE)


def device() -> list[TyperOption]:
    """The devices: by name or by figures."""
    return [
        value(
            "--gpu", metavar="NAME[xN]", panel=_DEVICE,
            help="Device: h100, h100x8, rtx-4090 (`kvcalc gpus`), or local for the one in this machine.",
        ),
        value("--num-gpus", metavar="N", help="Devices. Default: tp x pp; --tp defaults to this.", panel=_DEVICE),
        *device_figures(),
    ]  # fmt: skip


def device_figures() -> list[TyperOption]:
    """Figures of a device of one's own, or in place of a known one's."""
    return [
        value(
            "--gpu-memory", metavar="SIZE", panel=_DEVICE,
            help="Memory of one device (80G, 80GiB): describes your own, or replaces the figure of --gpu.",
        ),
        value(
            "--gpu-bandwidth", "--bandwidth", metavar="RATE", panel=_DEVICE,
            help="Memory bandwidth of one device: 3.35TB/s. Also --bandwidth.",
        ),
        value("--flops", metavar="RATE", help="Dense bf16 operations per second: 989T.", panel=_DEVICE),
    ]  # fmt: skip


def speed() -> list[TyperOption]:
    """What changes the speed beside the workload."""
    return [
        value(
            "--ep", "--expert-parallel-size", metavar="E", panel=_SPEED,
            help="How many of the --tp devices hold whole experts each. Default: 1, every expert is split.",
        ),
        value(
            "--calibrate", metavar="FILE", panel=_SPEED,
            help="A record of `kvcalc measure --json` on this device: its constants replace the fitted ones.",
        ),
    ]  # fmt: skip


def serving() -> list[TyperOption]:
    """Requests to serve."""
    return [
        value("--input-tokens", metavar="N", help="Serving: tokens per prompt.", panel=_SPEED),
        value("--output-tokens", metavar="N", help="Serving: tokens per answer.", panel=_SPEED),
        value("--concurrency", metavar="N", help="Serving: requests in flight. Default: as many as fit.", panel=_SPEED),
    ]


def what_if() -> list[TyperOption]:
    """Another attention than the model's own."""
    return [
        value("--attention", metavar="KIND", help="What if the model had mha, mqa, gqa or mla."),
        *what_if_sizes(),
    ]


def what_if_sizes() -> list[TyperOption]:
    """The sizes of another attention."""
    return [
        value("--kv-heads", metavar="G", help="KV heads: a what-if with MODEL, the model's own without."),
        value("--kv-lora-rank", metavar="R", help="MLA's latent width, for the what-if."),
        value("--qk-rope-head-dim", metavar="D", help="MLA's rotary key width, for the what-if."),
    ]


def model_by_flags() -> list[TyperOption]:
    """A plain decoder described without a config. --layers stands with the command: `measure` builds as many."""
    return [
        value("--heads", metavar="H", help="Attention heads.", panel=_BY_FLAGS),
        value("--head-dim", metavar="D", help="Width of a head.", panel=_BY_FLAGS),
        value("--hidden-size", metavar="D", help="Model width.", panel=_BY_FLAGS),
        value("--sliding-window", metavar="W", help="Window of every layer, in tokens.", panel=_BY_FLAGS),
    ]


def layers() -> TyperOption:
    """The number of layers of a model by flags."""
    return value("--layers", metavar="L", help="Layers.", panel=_BY_FLAGS)


def output(metavar: str = "human|tsv|csv|json", more: str = "") -> list[TyperOption]:
    """How the answer is printed."""
    return [
        value(
            "--format", metavar=metavar, help=f"Default: human on a terminal, tsv elsewhere.{more}", panel=_OUTPUT
        ),
        flag("--json", help="Short for --format json.", panel=_OUTPUT),
        value("--get", metavar="PATH", help="Print one bare value, as kv_cache.total_bytes.", panel=_OUTPUT),
        flag("--no-color", help="No colour, terminal or not.", panel=_OUTPUT),
    ]  # fmt: skip
