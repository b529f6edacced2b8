"""The help screens: `-h` shows the most used options, `--help` shows all, and `--engine NAME --help` adds an engine's.

Plain text, wrapped to the terminal. Rich is not used: it reads brackets in texts as markup, and cuts long names.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from kvcalc.cli import ENGINE_PANEL
from kvcalc.records import NamedTuple

# The commands, as `kvcalc -h` groups them.
GROUPS = {
    "Ask about a model": "estimate fit check plan compare sweep simulate prefix batch",
    "Check the answers": "measure audit score",
    "Look things up": "models gpus",
    "Set up": "completion",
}
OVERVIEW_EXAMPLES = (
    "kvcalc estimate llama-3-70b --context 8192",
    "kvcalc fit llama-3-70b --gpu h100x4 --context 32k",
    "kvcalc plan llama-3-70b --input-tokens 7k --output-tokens 1k --concurrency 64",
)

_MOST_EXAMPLES = 3
# Longer lines are hard to read. Longer names get their own line.
_LEAST_COLUMNS, _MOST_COLUMNS, _MOST_LABEL = 40, 100, 24


class Row(NamedTuple):
    """An argument, an option or a command, and its description."""

    label: str
    text: str


def help_of(command: Any, ctx: Any, arguments: Sequence[str], essential: str | None) -> str:
    """The help of a command. `arguments` are those it was called with; they select the screen and the engine.

    `essential` are the options that -h shows. None for a command that shows all of its options.
    """
    screen = Screen()
    if " " not in ctx.command_path:
        _write_overview(screen, command, ctx)
    elif "--help" in arguments:
        _write_all(screen, command, ctx, engines_in(arguments))
    else:
        _write_short(screen, command, ctx, essential)
    return screen.text


class Screen:
    """Lines of help, wrapped to the terminal. Headings are bold if stdout is a terminal that supports colours."""

    def __init__(self) -> None:
        # One column less, because some terminals wrap a line of exactly their width.
        self._columns = max(shutil.get_terminal_size().columns - 1, _LEAST_COLUMNS)
        self._text_columns = min(self._columns, _MOST_COLUMNS)
        self._is_plain = (
            not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "dumb") == "dumb"
        )
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        """The whole screen."""
        return "\n".join(self._lines)

    def heading(self, text: str, rest: str = "") -> None:
        """A blank line and a heading."""
        self._lines += ["", self._styled("1", f"{text}:") + rest]

    def paragraph(self, text: str | None) -> None:
        """A paragraph, with a blank line before it unless it is the first one.

        The text is None if Python drops docstrings (-OO).
        """
        self._lines += [""] if self._lines else []
        self._lines += wrap(" ".join((text or "").split()), self._text_columns, break_on_hyphens=False)

    def rows(self, rows: Sequence[Row], width: int) -> None:
        """Two columns, the first one `width` wide. A longer label gets its own line."""
        indent = " " * (width + 4)
        for label, text in rows:
            lines = wrap(text, self._text_columns - len(indent), break_on_hyphens=False) or [""]
            styled = "  " + self._styled("36", label)
            if len(label) > width:
                self._lines.append(styled)
            else:
                self._lines.append(styled + " " * (width + 2 - len(label)) + lines.pop(0))
            self._lines += [indent + line for line in lines]

    def commands(self, commands: Iterable[str]) -> None:
        """Command lines to copy. A long one is continued with a backslash."""
        for command in commands:
            *lines, line = _broken(f"  {command}", self._columns)
            self._lines += [*(f"{each} \\" for each in lines), line]

    def _styled(self, style: str, text: str) -> str:
        return text if self._is_plain else f"\x1b[{style}m{text}\x1b[0m"


def _write_overview(screen: Screen, group: Any, ctx: Any) -> None:
    screen.paragraph(group.help)
    screen.heading("Usage", " kvcalc COMMAND [OPTIONS]")
    sections = {title: [Row(name, summary(name)) for name in names.split()] for title, names in GROUPS.items()}
    sections["Options"] = [Row("-h, --help", "Show this help."), *map(_row, _options(group, ctx)[:-1])]
    _write_sections(screen, sections)
    screen.heading("Examples")
    screen.commands(OVERVIEW_EXAMPLES)
    screen.paragraph(
        "kvcalc COMMAND -h shows a command's most used options, kvcalc COMMAND --help all of them. kvcalc help TOPIC is"
        " about exit-codes, environment or formats."
    )


def _write_short(screen: Screen, command: Any, ctx: Any, names: str | None) -> None:
    _write_head(screen, command, ctx)
    options = _options(command, ctx)[:-1]
    if names is not None:
        by_name = {_name(option): option for option in options}
        options = [by_name[f"--{name}"] for name in names.split() if f"--{name}" in by_name]
    rows = [row._replace(text=first_sentence(row.text)) for row in map(_row, [*_arguments(command), *options])]
    _write_sections(screen, {"Options": rows})
    notes, examples = split_epilog(epilog_of(ctx.command_path.partition(" ")[2]))
    _write_epilog(screen, notes if names is None else (), examples[:_MOST_EXAMPLES])
    if names is not None:
        screen.paragraph(f"All options: {ctx.command_path} --help")


def _write_all(screen: Screen, command: Any, ctx: Any, engines: Sequence[str]) -> None:
    _write_head(screen, command, ctx)
    sections = {"Arguments": list(map(_row, _arguments(command)))}
    for option in _options(command, ctx):
        sections.setdefault(option.rich_help_panel or "Options", []).append(_row(option))
    has_engines = sections.pop(ENGINE_PANEL, None) is not None
    if has_engines:
        sections.update(_settings_of(engines))
    _write_sections(screen, sections)
    if has_engines and not engines:
        from kvcalc.engines.declarations import OPTIONS

        names = [name for name, options in OPTIONS.items() if options]
        screen.paragraph(f"Engine settings: {ctx.command_path} --engine NAME --help")
        screen.paragraph(f"NAME is one of {', '.join(names)}; all shows the settings of every engine.")
    notes, examples = split_epilog(epilog_of(ctx.command_path.partition(" ")[2]))
    if any(option.metavar == "LIST" for option in _options(command, ctx)):
        notes = ["LIST is one value or several: separate them by commas, or repeat the option.", *notes]
    _write_epilog(screen, notes, examples)


def _write_sections(screen: Screen, sections: Mapping[str, Sequence[Row]]) -> None:
    """Headings and rows, with the second columns of all sections aligned. Empty sections are left out."""
    lengths = [len(row.label) for rows in sections.values() for row in rows]
    width = max((length for length in lengths if length <= _MOST_LABEL), default=_MOST_LABEL)
    for title, rows in sections.items():
        if rows:
            screen.heading(title)
            screen.rows(rows, width)


def _write_head(screen: Screen, command: Any, ctx: Any) -> None:
    screen.paragraph(command.help)
    subcommands = getattr(command, "commands", {})
    pieces = [f" {ctx.command_path} [OPTIONS]", *map(_usage, _arguments(command))]
    pieces += [more] if (more := getattr(command, "more_usage", "")) else []
    screen.heading("Usage", " ".join([*pieces, *([command.subcommand_metavar] if subcommands else [])]))
    rows = [
        Row(" ".join([name, *map(_usage, _arguments(subcommand))]), first_sentence(subcommand.help))
        for name, subcommand in subcommands.items()
    ]
    _write_sections(screen, {"Commands": rows})


def _settings_of(engines: Sequence[str]) -> dict[str, list[Row]]:
    """A section for each engine, with the options that it declares."""
    from kvcalc.engines.declarations import OPTIONS

    return {
        f"Settings of {engine}": [
            Row(_label([f"--{option.name}", *option.aliases], option.metavar), _described(option))
            for option in OPTIONS[engine]
        ]
        for engine in engines
    }


def _described(option: Any) -> str:
    """The help of an engine's option, with its other long names."""
    others = ", ".join(alias for alias in option.aliases if alias.startswith("--"))
    return f"{option.described[:1].upper()}{option.described[1:]}" + (f" [also: {others}]" if others else "")


def _write_epilog(screen: Screen, notes: Iterable[str], examples: Sequence[str]) -> None:
    for note in notes:
        screen.paragraph(note)
    if examples:
        screen.heading("Examples" if len(examples) > 1 else "Example")
        screen.commands(examples)


def epilog_of(command: str) -> str:
    """The notes and the examples of a command such as `models show`, as they are in epilogs.txt. Empty for none."""
    text = Path(__file__).with_name("epilogs.txt").read_text(encoding="utf-8")
    return f"\n{text}\n[".partition(f"\n[{command}]\n")[2].partition("\n[")[0]


def split_epilog(epilog: str) -> tuple[list[str], list[str]]:
    """The paragraphs of an epilog, each as one line, and its indented lines, which are example command lines."""
    notes, examples, paragraph = [], [], []
    for line in [*epilog.splitlines(), ""]:
        if line.startswith("  "):
            examples.append(" ".join(line.split()))
        elif line.strip() and line.strip() not in ("Examples:", "Example:"):
            paragraph.append(line.strip())
        elif paragraph:
            notes.append(" ".join(paragraph))
            paragraph = []
    return notes, examples


def engines_in(arguments: Sequence[str]) -> list[str]:
    """The engines that --engine names, without unknown ones. `all` is every engine that has options."""
    from kvcalc.engines.declarations import OPTIONS

    texts = [value for option, value in pairwise(arguments) if option == "--engine"]
    texts += [argument.partition("=")[2] for argument in arguments if argument.startswith("--engine=")]
    names = [name.partition("@")[0].strip().casefold() for text in texts for name in text.split(",")]
    return [name for name in OPTIONS if name in names or ("all" in names and OPTIONS[name])]


def _arguments(command: Any) -> list[Any]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    return [argument for argument in arguments if not argument.hidden]


def _options(command: Any, ctx: Any) -> list[Any]:
    """The options that are not hidden; the last one is --help."""
    options = [parameter for parameter in command.get_params(ctx) if parameter.param_type_name == "option"]
    return [option for option in options if not option.hidden]


def _name(option: Any) -> str:
    return str(next(name for name in option.opts if name.startswith("--")))


def _usage(argument: Any) -> str:
    metavar = str(argument.metavar).strip("[]")
    return metavar if argument.required else f"[{metavar}]"


def _row(parameter: Any) -> Row:
    if parameter.param_type_name == "argument":
        return Row(str(parameter.metavar).strip("[]"), parameter.help)
    if "--help" in parameter.opts:
        return Row("-h, --help", "-h shows the most used options, --help shows all of them.")
    text = parameter.help
    if isinstance(parameter.default, str):
        text += f" [default: {parameter.default}]"
    others = [name for name in parameter.opts if name.startswith("--")][1:]
    if others:
        text += f" [also: {', '.join(others)}]"
    return Row(_label(parameter.opts, None if parameter.is_flag else parameter.metavar), text)


def _label(names: Sequence[str], metavar: str | None) -> str:
    """`-c, --context N`. Options without a short name are indented to align with those that have one."""
    long = next(name for name in names if name.startswith("--"))
    short = next((f"{name}, " for name in names if not name.startswith("--")), " " * 4)
    return short + long + (f" {metavar}" if metavar else "")


def summary(command: str) -> str:
    """The first sentence about a command, without building its options."""
    return first_sentence(getattr(import_module(f"kvcalc.cli.{command}"), command).__doc__)


def first_sentence(help: str | None) -> str:
    """The first sentence of a help text, and the default. Empty if Python drops docstrings (-OO)."""
    text, bracket, rest = " ".join((help or "").split()).partition(" [default: ")
    end = next((place for place in range(len(text)) if text.startswith(". ", place) and text[place - 1] != "."), None)
    return (text if end is None else text[: end + 1]) + (f"{bracket}{rest.partition(']')[0]}]" if bracket else "")


def _broken(command: str, columns: int) -> list[str]:
    """A command line, split before options if it is longer than `columns`. The lines leave room for a backslash."""
    if len(command) <= columns:
        return [command]
    first, *options = command.split(" --")
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) + 5 <= columns:
            lines[-1] += f" --{option}"
        else:
            lines.append(f"      --{option}")
    return lines
