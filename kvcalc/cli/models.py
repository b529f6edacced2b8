"""`kvcalc models`: list the models known by name, show the facts of one, and check preset files."""

from typing import Annotated, Any, Optional

import typer
from typer.core import TyperGroup

from kvcalc.cli import options as o
from kvcalc.cli.question import output_of


class NamedGroup(TyperGroup):
    """A group whose first argument is a subcommand, or the NAME that its subcommand `show` takes.

    Options may come before a subcommand or after it. They apply to the subcommand that runs.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The subcommand and its arguments; options typed before it are put in front of them."""
        typed = ctx.meta["kvcalc.arguments"]
        before = typed[: len(typed) - len(args)]
        if args[0] in self.commands:
            return super().resolve_command(ctx, [args[0], *before, *args[1:]])
        return "show", self.commands["show"], [*before, *args]


app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    subcommand_metavar="[NAME]",
)


@app.callback(cls=o.taking(*o.output(path="models.0.name", is_list=True), base=NamedGroup))
def models(
    ctx: typer.Context,
    family: Annotated[
        Optional[str], typer.Option("--family", metavar="NAME", help="List one family: Llama, Qwen, DeepSeek, ...")
    ] = None,
) -> None:
    """List the models that kvcalc knows by name, or show one."""
    if ctx.invoked_subcommand is None:
        from kvcalc.planning.answers.models import list_models

        output_of(ctx.params, is_list=True).emit(list_models(family), "models")


@app.command(cls=o.taking(*o.output(path="config.num_hidden_layers", is_list=True)))
def show(ctx: typer.Context, name: str = typer.Argument(metavar="NAME", help="A model's name or alias.")) -> None:
    """Show the facts of one model and their source. kvcalc models NAME does the same."""
    from kvcalc.planning.answers.models import show_model

    output_of(ctx.params, is_list=True).emit(show_model(name), "models_show")


@app.command(cls=o.taking(*o.output(path="files.0.ok", is_list=True)))
def check(
    ctx: typer.Context, files: list[str] = typer.Argument(metavar="FILE...", help="Preset files (YAML).")
) -> None:
    """Check preset files. The exit code is the highest one among their errors."""
    from kvcalc.planning.answers.models import check_models

    output = output_of(ctx.params, is_list=True)
    document = check_models(files)
    output.emit(document, "models_check")
    raise typer.Exit(document["exit_code"])
