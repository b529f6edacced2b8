"""`kvcalc gpus`: which devices are known, and what does a vendor say of one?"""

import typer
from typer.core import TyperGroup

from kvcalc.cli import options as o
from kvcalc.cli.question import output_of

app = typer.Typer(
    add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True
)

EPILOG = o.epilog("""Examples:
  kvcalc gpus
  kvcalc gpus show h100
  kvcalc gpus --json
""")


@app.callback(epilog=EPILOG, cls=o.taking(*o.output(), base=TyperGroup))
def gpus(ctx: typer.Context) -> None:
    """The devices --gpu knows: memory, bandwidth, dense operations a second, and what joins several of them."""
    if ctx.invoked_subcommand is None:
        from kvcalc.planning.gpus import list_gpus

        output_of(ctx.params).emit(list_gpus(), "gpus")


@app.command(epilog="Example:\n\n  kvcalc gpus show mi300x", cls=o.taking(*o.output()))
def show(ctx: typer.Context, name: str = typer.Argument(metavar="NAME", help="A device's name or alias.")) -> None:
    """One device: every figure kvcalc has of it, and their source."""
    from kvcalc.planning.gpus import show_gpu

    output_of(ctx.params).emit(show_gpu(name), "gpus_show")
