"""`kvcalc gpus`: which devices are known, and what does a vendor say of one?"""

import typer

from kvcalc.cli import options as o

app = typer.Typer(
    add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True
)

EPILOG = """Examples:

  kvcalc gpus

  kvcalc gpus show h100

  kvcalc gpus --json
"""


@app.callback(epilog=EPILOG)
def gpus(
    ctx: typer.Context,
    format: o.Format = None,
    json: o.Json = False,
    get: o.Get = None,
    no_color: o.NoColor = False,
) -> None:
    """The devices --gpu knows: memory, bandwidth, dense operations a second, and what joins several of them."""
    if ctx.invoked_subcommand is not None:
        return
    from kvcalc.output.sink import choose, emit
    from kvcalc.planning.gpus import list_gpus

    output = choose(format, json, get, no_color)
    emit(list_gpus(), output, "gpus")


@app.command(epilog="Example:\n\n  kvcalc gpus show mi300x")
def show(
    name: str = typer.Argument(metavar="NAME", help="A device's name or alias."),
    format: o.Format = None,
    json: o.Json = False,
    get: o.Get = None,
    no_color: o.NoColor = False,
) -> None:
    """One device: every figure kvcalc has of it, and their source."""
    from kvcalc.output.sink import choose, emit
    from kvcalc.planning.gpus import show_gpu

    output = choose(format, json, get, no_color)
    emit(show_gpu(name), output, "gpus_show")
