"""The samples in the documentation: every `$ kvcalc ...` line in a console block, and the output below it.

    python -m tests.samples                       name the samples and generated parts that are out of date
    python -m tests.samples --write               run every sample again and put its output in place
    python -m tests.samples --write --measured    the same, and run `kvcalc measure` again too

A sample is run in the root of the repository, 80 columns wide and as on a terminal. Samples of `kvcalc
measure` are left as they are unless --measured is given: their times belong to one machine. `--write` also draws
the picture in README.md, and makes the table of records in docs/guides/measure.md. `tests/test_docs.py` compares.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.records import with_table
from tests import picture
from tests.conftest import ROOT, Result, spawn

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
RECORDS = ROOT / "docs" / "guides" / "measure.md"

_BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
_SAMPLE = re.compile(r"^\$ (?P<command>kvcalc (?:.*\\\n)*.*)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.MULTILINE)
# With these, the output is not a screen, and --format human is not added.
_SCRIPTED = {"--json", "--get", "--format", "--emit"}


class Sample(NamedTuple):
    """A command as the page shows it, and the output shown below it."""

    page: Path
    command: str
    shown: str

    @property
    def arguments(self) -> list[str]:
        """What follows `kvcalc`."""
        return arguments_of(self.command)

    @property
    def is_measured(self) -> bool:
        """Whether the output holds times of one machine."""
        return self.arguments[0] == "measure"

    def __str__(self) -> str:
        return f"{self.page.name}: {self.command}"


def arguments_of(command: str) -> list[str]:
    """The arguments of a command line that may go on after a backslash."""
    return shlex.split(command.replace("\\\n", " "))[1:]


def samples_of(page: Path) -> Iterator[Sample]:
    """The samples of one page, from top to bottom."""
    for block in _BLOCK.findall(page.read_text()):
        for match in _SAMPLE.finditer(block):
            yield Sample(page, match["command"], match["shown"])


def all_samples() -> list[Sample]:
    """The samples of every page."""
    return [sample for page in PAGES for sample in samples_of(page)]


TERMINAL = {"COLUMNS": "80", "TERM": "dumb"}


def _in_a_process(*arguments: str) -> Result:
    return spawn(*arguments, env=TERMINAL, cwd=ROOT, timeout=1200)


def output_of(command: str, call: Callable[..., Result] = _in_a_process) -> str:
    """What the command prints on a terminal of 80 columns, without blanks at the ends of lines.

    `call` runs kvcalc in ROOT with the variables of TERMINAL. RuntimeError if it prints nothing: then it is no sample.
    """
    arguments = arguments_of(command)
    options = () if _SCRIPTED & set(arguments) else ("--format", "human")
    result = call(*arguments, *options)
    if not result.out.strip():
        raise RuntimeError(f"{command}: exit code {result.status}, no output\n{result.err}")
    return "\n".join(line.rstrip() for line in result.out.rstrip().splitlines()) + "\n"


def refreshed(page: Path, measured: bool = False) -> str:
    """The page's text with the output of every sample as it is now."""

    def sample(match: re.Match[str]) -> str:
        found = Sample(page, match["command"], match["shown"])
        if found.is_measured and not measured and found.shown:
            return match[0]
        return f"$ {found.command}\n{output_of(found.command)}"

    return _BLOCK.sub(lambda block: _SAMPLE.sub(sample, block[0]), page.read_text())


def main() -> int:
    """Exit code 1 if something was out of date and is not written, or if a sample prints nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the output in place")
    parser.add_argument("--measured", action="store_true", help="run `kvcalc measure` too")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="only these pages")
    options = parser.parse_args()
    failed = False
    for page in [path.resolve() for path in options.pages] or PAGES:
        before = page.read_text()
        try:
            after = refreshed(page, options.measured)
        except RuntimeError as error:
            print(f"{page.relative_to(ROOT)}: {error}", file=sys.stderr)
            failed = True
            continue
        if page == RECORDS:
            after = with_table(after, page)
        failed |= _put(page, before, after, options.write)
    if not options.pages:
        before = picture.PICTURE.read_text() if picture.PICTURE.exists() else ""
        failed |= _put(
            picture.PICTURE, before, picture.picture(picture.COMMAND, output_of(picture.COMMAND)), options.write
        )
    return int(failed)


def _put(path: Path, before: str, after: str, write: bool) -> bool:
    """Write a page that changed, or name it. True if it is left out of date."""
    if before == after:
        return False
    print(f"{path.relative_to(ROOT)}: {'written' if write else 'out of date'}")
    if write:
        path.write_text(after)
    return not write


if __name__ == "__main__":
    sys.exit(main())
