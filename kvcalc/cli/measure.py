"""`kvcalc measure`: run the real attention layers here, count their bytes and time their steps."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Optional

import typer

from kvcalc.cli import options as o
from kvcalc.errors import RunError

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

EPILOG = """Examples:

  kvcalc measure llama-7b --layers 2 --context 2048 --attention all

  kvcalc measure gpt2 --context 512 --steps 16 --json

  kvcalc measure --layers 2 --heads 8 --kv-heads 2 --head-dim 64 --hidden-size 512 --context 1k

Needs torch: pip install 'kvcalc[measure]'
"""


@app.command(epilog=EPILOG)
def measure(
    model: o.Model = None,
    context: o.Context = None,
    max_model_len: o.MaxModelLen = None,
    batch: o.Batch = "1",
    steps: Annotated[
        str, typer.Option("--steps", "-k", metavar="K", help="Decode steps to time; they end at the context.")
    ] = "32",
    layers: Annotated[
        Optional[str], typer.Option("--layers", metavar="L", help="Build the first L layers. Default: all.")
    ] = None,
    attention: Annotated[
        Optional[str],
        typer.Option(
            "--attention", metavar="KIND", help="mha, mqa, gqa or mla in place of the model's own, or all of them."
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda|mps", help="Where to run.")] = "auto",
    dtype: Annotated[
        Optional[str],
        typer.Option(
            "--dtype", metavar="TYPE", help="bf16, fp16 or fp32, for weights and cache. Default: the config's."
        ),
    ] = None,
    seed: Annotated[str, typer.Option("--seed", metavar="S", help="Seed of the random weights and inputs.")] = "0",
    kv_heads: o.KvHeads = None,
    kv_lora_rank: o.KvLoraRank = None,
    qk_rope_head_dim: o.QkRopeHeadDim = None,
    heads: o.Heads = None,
    head_dim: o.HeadDim = None,
    hidden_size: o.HiddenSize = None,
    sliding_window: o.SlidingWindow = None,
    format: o.Format = None,
    json: o.Json = False,
    get: o.Get = None,
    no_color: o.NoColor = False,
) -> None:
    """Run a model's attention layers on this device: do they hold the predicted bytes, and how long is a step?"""
    from kvcalc.output.sink import check_path, choose, emit
    from kvcalc.units import parse_count

    output = choose(format, json, get, no_color)
    check_path(output, "measure")
    every = attention is not None and attention.casefold() == "all"
    what_if = o.what_if_of(None if every else attention, kv_heads, kv_lora_rank, qk_rope_head_dim)
    flags = {"--heads": heads, "--head-dim": head_dim, "--hidden-size": hidden_size, "--sliding-window": sliding_window}
    if model is None:
        flags["--layers"] = layers
    spec, what_if = o.model_of(model, what_if, flags)
    context_tokens, batch_size = o.context_of(context, max_model_len), parse_count(batch, "--batch")
    timed, num_layers = parse_count(steps, "--steps"), o.optional_count(layers, "--layers")
    seed_number = parse_count(seed, "--seed", least=0)
    ask, check_bytes = _load()
    with _progress() as progress:
        document = ask(
            spec, context_tokens=context_tokens, batch_size=batch_size, steps=timed, num_layers=num_layers,
            what_if=what_if, all_variants=every, device=device.casefold(), dtype=dtype, seed=seed_number,
            progress=progress,
        )  # fmt: skip
    emit(document, output, "measure")
    check_bytes(document)


def _load() -> tuple[Callable[..., dict[str, object]], Callable[[dict[str, object]], None]]:
    """The runner, or one line on what to install."""
    try:
        from kvcalc.measure import runner
    except ImportError as error:
        if error.name not in ("torch", "psutil"):
            raise
        raise RunError(
            f"kvcalc measure needs {error.name}, which is not installed: pip install 'kvcalc[measure]'"
        ) from None
    return runner.measure, runner.check_bytes


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr where that is a terminal; silence elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what, done, of: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
