"""`kvcalc models`: list the models known by name, show the facts of one, and check preset files."""

from typing import Any, Optional

import typer
from typer.core import TyperGroup

from kvcalc.cli import options as o
from kvcalc.cli.question import devices_of, output_of, parsed, values_of
from kvcalc.errors import UsageError
from kvcalc.units import parse_count, parse_size


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


class _ListGroup(NamedGroup):
    """Its first argument may also be a part of names, which are then listed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if args[0] in self.commands or {"-h", "--help"} & set(rest):
            return name, command, rest
        return "find", self.commands["find"], rest


app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    subcommand_metavar="[NAME]",
)


@app.callback(cls=o.taking(*o.declared("models"), base=_ListGroup))
def models(ctx: typer.Context) -> None:
    """List the known models, or those that fit a device."""
    if ctx.invoked_subcommand is None:
        _list(ctx.params, None)


@app.command(hidden=True, cls=o.taking(*o.declared("models")))
def find(ctx: typer.Context, text: str = typer.Argument(metavar="TEXT")) -> None:
    """Show the model with this name, or list those with this text in a name."""
    from kvcalc.planning.answers.models import is_part_of_names

    chooses = any(ctx.params[name] is not None for name in ("add", "family", "max_weights", "gpu", "gpu_memory"))
    if chooses or is_part_of_names(text):
        _list(ctx.params, text)
    else:
        _show(ctx.params, text)


def _list(given: dict[str, Any], text: Optional[str]) -> None:
    from kvcalc.planning.answers.models import Wanted, choose_presets, list_models, show_model

    output = output_of(given, is_list=True)
    if given["add"] is not None:
        if text is not None:
            raise UsageError(f"--add keeps a model; {text!r} lists models", "use one of them")
        from kvcalc.model.kept import keep_config

        output.emit(show_model(keep_config(given["add"]).name), "models_show")
        return
    wanted = Wanted(given["family"], text, parsed(given, "--max-weights", parse_size))
    devices = devices_of(given)
    if devices is None:
        for option in ("--engine", "--context", "--batch", "--dtype", "--most"):
            if given[option[2:].replace("-", "_")] is not None:
                raise UsageError(f"{option} needs a device", "name one with --gpu rtx-4090, or --gpu local")
        output.emit(list_models(wanted), "models")
        return
    from kvcalc.planning.answers.models_fit import MOST, models_that_fit
    from kvcalc.question.question import Question

    presets, notes = choose_presets(wanted)
    values = {key: value for key, value in values_of(Question, given).items() if value is not None}
    question = Question(**{**values, "model": None})
    most = parsed(given, "--most", parse_count) or MOST
    document = models_that_fit(presets, devices, question, most, wanted.max_weights_bytes, notes)
    output.emit(document, "models_fit")


def _show(given: dict[str, Any], name: str) -> None:
    from kvcalc.planning.answers.models import show_model

    output_of(given, is_list=True).emit(show_model(name), "models_show")


@app.command(cls=o.taking(*o.output(path="config.num_hidden_layers", is_list=True)))
def show(ctx: typer.Context, name: str = typer.Argument(metavar="NAME", help="A model's name or alias.")) -> None:
    """Show the facts of one model and their source. kvcalc models NAME does the same."""
    _show(ctx.params, name)


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
