"""`kvcalc completion`: the script that completes kvcalc's command lines in a shell."""

from typing import Annotated, Optional

import typer

from kvcalc.cli import options as o
from kvcalc.errors import KvcalcError, UsageError, nearest
from kvcalc.writing.shell import join
from kvcalc.writing.terminal import one_line

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

EPILOG = """\
To complete commands, options, models, devices, engines, types and paths, add one line to your shell's start-up file.

bash, in ~/.bashrc: eval "$(kvcalc completion bash)"

zsh, in ~/.zshrc after compinit: eval "$(kvcalc completion zsh)"

fish, in ~/.config/fish/config.fish: kvcalc completion fish | source

Examples:
  kvcalc completion bash
  kvcalc completion zsh
  kvcalc completion fish
"""

# The scripts call `kvcalc completion words -- WORD...`, which prints the candidates for the last word.
_WORDS = "words"


@app.command(epilog=EPILOG, cls=o.taking())
def completion(
    ctx: typer.Context,
    shell: Annotated[Optional[str], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")] = None,
    words: Annotated[
        Optional[list[str]], typer.Argument(metavar="WORD", hidden=True, help="The words to complete.")
    ] = None,
) -> None:
    """Print the script that completes commands in bash, zsh or fish."""
    from kvcalc.cli.completion_scripts import SCRIPTS

    if shell == _WORDS and words:
        _print_candidates(ctx.find_root().command, words)
    elif words:
        raise UsageError(f"completion takes one SHELL; unexpected argument {words[0]!a}")
    elif shell is None:
        raise UsageError("SHELL is missing", "for example kvcalc completion bash; also zsh and fish")
    elif shell not in SCRIPTS:
        raise UsageError(f"unknown shell {shell!a}", nearest(shell, SCRIPTS) or "use bash, zsh or fish")
    else:
        print(SCRIPTS[shell], end="")


def _print_candidates(root: object, words: list[str]) -> None:
    """Print one candidate per line, with its description after a tab, and `:files` if file names may follow.

    A shell inserts a candidate as it is, so names that it would not read as one plain word are left out. Errors are not
    reported, because the user is still typing.
    """
    from kvcalc.cli.candidates import complete

    try:
        found = complete(root, words)
    except KvcalcError:
        return
    for name, text in found.items():
        if join([name]) == name:
            print(f"{name}\t{one_line(text)}" if text else name)
