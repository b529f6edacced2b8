"""`kvcalc completion`: the script that completes kvcalc's command lines in a shell.

Each script calls `kvcalc completion words -- WORD...` to get the candidates for the last word. That command prints one
candidate per line, as a whole word, with its description after a tab. It also prints the line `:files` if file names
may follow, and `:nospace` if no space should be added after a candidate.
"""

from pathlib import Path
from typing import Annotated, Optional

import typer

from kvcalc.cli import options as o
from kvcalc.errors import KvcalcError, UsageError, nearest
from kvcalc.writing.terminal import one_line

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

_SHELLS = ("bash", "zsh", "fish")
_WORDS = "words"


@app.command(cls=o.taking())
def completion(
    ctx: typer.Context,
    shell: Annotated[Optional[str], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")] = None,
    words: Annotated[
        Optional[list[str]], typer.Argument(metavar="WORD", hidden=True, help="The words to complete.")
    ] = None,
) -> None:
    """Print the script that completes commands in bash, zsh or fish."""
    if shell == _WORDS and words:
        _print_candidates(ctx.find_root().command, words)
    elif words:
        raise UsageError(f"completion takes one SHELL; unexpected argument {words[0]!a}")
    elif shell is None:
        raise UsageError("SHELL is missing", "for example kvcalc completion bash; also zsh and fish")
    elif shell not in _SHELLS:
        raise UsageError(f"unknown shell {shell!a}", nearest(shell, _SHELLS) or "use bash, zsh or fish")
    else:
        print(script_of(shell), end="")


def script_of(shell: str) -> str:
    """The script for a shell."""
    return (Path(__file__).parent / "scripts" / f"kvcalc.{shell}").read_text(encoding="utf-8")


def _print_candidates(root: object, words: list[str]) -> None:
    """Print one candidate per line, with its description after a tab, and `:files` if file names may follow.

    A shell inserts a candidate as it is, so names that it would not read as one plain word are left out. Errors are not
    reported, because the user is still typing.
    """
    from kvcalc.cli.candidates import complete
    from kvcalc.writing.shell import join

    try:
        candidates = complete(root, words)
    except KvcalcError:
        return
    for name, text in candidates.items():
        if join([name]) == name:
            print(f"{name}\t{one_line(text)}" if text else name)
