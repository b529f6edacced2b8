"""`kvcalc models`: which presets are there, and what does one say?"""

import typer

from kvcalc.cli import options as o

app = typer.Typer(
    add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True
)

EPILOG = """Examples:

  kvcalc models

  kvcalc models show deepseek-v3

  kvcalc models --json
"""


@app.callback(epilog=EPILOG)
def models(
    ctx: typer.Context,
    format: o.Format = None,
    json: o.Json = False,
    get: o.Get = None,
    no_color: o.NoColor = False,
) -> None:
    """The models kvcalc knows by name, with where their facts come from."""
    if ctx.invoked_subcommand is not None:
        return
    from kvcalc.output.sink import choose, emit
    from kvcalc.planning.models import list_models

    output = choose(format, json, get, no_color)
    emit(list_models(), output, "models")


@app.command(epilog="Example:\n\n  kvcalc models show llama-3-70b")
def show(
    name: str = typer.Argument(metavar="NAME", help="A preset's name or alias."),
    format: o.Format = None,
    json: o.Json = False,
    get: o.Get = None,
    no_color: o.NoColor = False,
) -> None:
    """One preset: its facts under config.json's own names, and their source."""
    from kvcalc.output.sink import choose, emit
    from kvcalc.planning.models import show_model

    output = choose(format, json, get, no_color)
    emit(show_model(name), output, "models_show")
