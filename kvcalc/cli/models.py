"""`kvcalc models`: which presets are there, what does one say, and is a file a good one?"""

from typing import Annotated, Optional

import typer
from typer.core import TyperGroup

from kvcalc.cli import options as o
from kvcalc.cli.question import output_of

app = typer.Typer(
    add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True
)

EPILOG = o.epilog("""Examples:
  kvcalc models
  kvcalc models --family gemma
  kvcalc models show deepseek-v3
  kvcalc models --json
""")

CHECK_EPILOG = o.epilog("""\
A preset of your own is a YAML file in a folder that KVCALC_PRESETS names, or in kvcalc/presets in
your config folder (~/.config). It may take the place of a shipped one by bearing its name.

Example:
  kvcalc models check ~/.config/kvcalc/presets/*.yaml
""")


@app.callback(epilog=EPILOG, cls=o.taking(*o.output(), base=TyperGroup))
def models(
    ctx: typer.Context,
    family: Annotated[
        Optional[str], typer.Option("--family", metavar="NAME", help="Only this family: Llama, Qwen, DeepSeek, ...")
    ] = None,
) -> None:
    """The models kvcalc knows by name, with where their facts come from."""
    if ctx.invoked_subcommand is None:
        from kvcalc.planning.models import list_models

        output_of(ctx.params).emit(list_models(family), "models")


@app.command(epilog="Example:\n\n  kvcalc models show llama-3-70b", cls=o.taking(*o.output()))
def show(ctx: typer.Context, name: str = typer.Argument(metavar="NAME", help="A preset's name or alias.")) -> None:
    """One preset: its facts under config.json's own names, and their source."""
    from kvcalc.planning.models import show_model

    output_of(ctx.params).emit(show_model(name), "models_show")


@app.command(epilog=CHECK_EPILOG, cls=o.taking(*o.output()))
def check(
    ctx: typer.Context, files: list[str] = typer.Argument(metavar="FILE...", help="Preset files (YAML).")
) -> None:
    """Are these files good presets? One line for each; the exit status is the highest of their errors'."""
    from kvcalc.planning.models import check_models

    output = output_of(ctx.params)
    document = check_models(files)
    output.emit(document, "models_check")
    raise typer.Exit(document["exit_code"])
