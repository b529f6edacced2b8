"""The `kvcalc` command: it loads the subcommand that runs, and turns errors into messages and exit codes."""

import os
import sys
from errno import EBADF
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from kvcalc.cli.options import WithHelp
from kvcalc.errors import KvcalcError, UsageError, nearest
from kvcalc.output.streams import discard_stdout
from kvcalc.writing.terminal import printable

# Each command is a function in the module of kvcalc.cli that has its name. Only the module of the one that runs is
# imported.
COMMANDS = (
    "estimate", "fit", "check", "plan", "compare", "sweep", "simulate", "prefix", "batch", "audit", "score", "measure",
    "models", "gpus", "completion",
)  # fmt: skip

# The maximum length of an error, in characters. The longest hint lists the model types.
LONGEST_MESSAGE, LONGEST_HINT = 1_000, 4_000

# `kvcalc help TOPIC` prints the text in this folder.
_TOPICS = os.path.join(os.path.dirname(__file__), "topics")

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class LazyGroup(WithHelp, TyperGroup):
    """A group that imports the module of a subcommand when the subcommand runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command = typer.main.get_command(import_module(f"kvcalc.cli.{cmd_name}").app)
        # A subcommand that is itself a group has no name and would leave a blank line in the list of commands.
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Like the base class, but the error for an unknown command suggests the nearest names."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = nearest(args[0], COMMANDS) or f"commands: {', '.join(COMMANDS)}"
            raise UsageError(f"unknown command {args[0]!r}", hint)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=LazyGroup,
    name="kvcalc",
    add_completion=False,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings=HELP_OPTIONS,
    rich_markup_mode="rich",
)


@app.callback()
def kvcalc(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Compute how much memory a model's KV cache takes, whether it fits, and how fast the model decodes.

    kvcalc measure checks the answers on this device.
    """
    if version:
        from kvcalc import __version__

        print(f"kvcalc {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def _as_options(words: list[str]) -> list[str]:
    """`version` and `help COMMAND`, which are commands of other tools, as options."""
    if words == ["version"]:
        return ["--version"]
    return [*words[1:], "--help"] if words[:1] == ["help"] else words


def _topic(name: str) -> str:
    """The text of `kvcalc help TOPIC`. Raises UsageError (exit 2) if there is neither such a topic nor a command."""
    names = (*COMMANDS, *sorted(file.removesuffix(".txt") for file in os.listdir(_TOPICS)))
    if name not in names:
        raise UsageError(f"no help about {name[:40]!a}", nearest(name, names) or f"help about: {', '.join(names)}")
    with open(os.path.join(_TOPICS, f"{name}.txt"), encoding="utf-8") as file:
        return file.read()


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. An error is one or two lines on stderr.

    With KVCALC_DEBUG=1, errors are raised with their traceback.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        # File names that are not valid text are printed with escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if arguments[:1] == ["help"] and arguments[1:] and not (arguments[1] in COMMANDS or arguments[1][:1] == "-"):
            print(_topic(arguments[1]), end="")
            status = 0
        else:
            status = typer.main.get_command(app).main(_as_options(arguments), prog_name="kvcalc", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except KvcalcError as error:
        if os.environ.get("KVCALC_DEBUG") == "1":
            raise
        return _report(error.message, error.hint, error.exit_code)
    except TyperException as error:
        see = " ".join(["kvcalc", *(word for word in arguments[:1] if word in COMMANDS), "--help"])
        unknown: Any = error
        if hasattr(unknown, "possibilities"):  # an unknown option
            from kvcalc.cli.other_names import hint_for

            known = {name for option in unknown.ctx.command.params for name in option.opts} if unknown.ctx else set()
            hint = hint_for(unknown.option_name, known)
            return _report(unknown.message, f"{hint} ({see} lists all)" if hint else f"see: {see}", error.exit_code)
        return _report(error.format_message(), f"see: {see}", error.exit_code)
    except (SystemExit, BrokenPipeError):
        # The reader of stdout stopped early (`| head`), which is not an error. Commands whose exit code is an answer
        # print it with Output.emit, which handles a closed reader. This branch is for the rest: help and the rows of
        # sweep. Typer and rich turn BrokenPipeError into SystemExit, and raise SystemExit for nothing else here.
        discard_stdout()
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if os.environ.get("KVCALC_DEBUG") == "1":
            raise
        reason = "stdout is closed" if error.errno == EBADF else error.strerror or error
        return _report(f"cannot write: {reason}", None, 1)
    except Exception as error:
        if os.environ.get("KVCALC_DEBUG") == "1":
            raise
        return _report(
            f"internal error: {type(error).__name__}: {error}", "please report it with the output of KVCALC_DEBUG=1", 1
        )


def _report(message: str, hint: str | None, status: int) -> int:
    from kvcalc.output.wrapping import tell

    tell(f"kvcalc: {one_line(message, LONGEST_MESSAGE)}")
    if hint:
        tell(f"  {one_line(hint, LONGEST_HINT)}")
    return status


def one_line(text: str, longest: int) -> str:
    """`text` as one printable line of at most `longest` characters. It may be part of a file name or a config."""
    line = " ".join(text[: 2 * longest].split())
    return printable(line if len(line) <= longest else line[:longest] + "...")
