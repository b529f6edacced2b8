"""`kvcalc gpus`: list the known devices, or show the figures of one."""

from typing import Annotated, Optional

import typer

from kvcalc.cli import options as o
from kvcalc.cli.models import NamedGroup
from kvcalc.cli.question import output_of
from kvcalc.units import parse_size

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    subcommand_metavar="[NAME]",
)


@app.callback(cls=o.taking(*o.output(path="gpus.0.name", is_list=True), base=NamedGroup))
def gpus(
    ctx: typer.Context,
    vendor: Annotated[
        Optional[str], typer.Option("--vendor", metavar="NAME", help="List one vendor: NVIDIA, AMD, Apple, ...")
    ] = None,
    memory: Annotated[
        Optional[str],
        typer.Option("--min-memory", metavar="SIZE", help="List devices with at least this much memory: 48GiB."),
    ] = None,
) -> None:
    """List the devices that --gpu knows, or show one.

    For each device: its memory, its bandwidth, its dense operations per second, and the link between several of them.
    """
    if ctx.invoked_subcommand is None:
        from kvcalc.planning.answers.gpus import list_gpus

        least = 0 if memory is None else parse_size(memory, "--min-memory")
        output_of(ctx.params, is_list=True).emit(list_gpus(vendor, least), "gpus")


@app.command(cls=o.taking(*o.output(path="memory_bytes", is_list=True)))
def show(ctx: typer.Context, name: str = typer.Argument(metavar="NAME", help="A device's name or alias.")) -> None:
    """Show all figures of one device, and their source. kvcalc gpus NAME does the same."""
    from kvcalc.planning.answers.gpus import show_gpu

    output_of(ctx.params, is_list=True).emit(show_gpu(name), "gpus_show")
