"""The help screens: short and complete, at two widths, with an engine's own options. Their claims are checked."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from kvcalc.cli.app import COMMANDS
from kvcalc.cli.help import GROUPS, epilog_of, split_epilog
from kvcalc.cli.options import table_of
from kvcalc.engines.declarations import OPTIONS
from kvcalc.output.paths import check_against_schema
from kvcalc.schema import load_schema
from tests.conftest import ROOT

WITH_ENGINES = ("estimate", "fit", "plan", "compare", "sweep")
# Command line -> the kind of its document.
SCREENS: dict[tuple[str, ...], str] = {
    **{(command,): command for command in COMMANDS},
    ("models", "show"): "models_show",
    ("models", "check"): "models_check",
    ("gpus", "show"): "gpus_show",
}


@pytest.fixture(params=[80, 120])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def built(command: str) -> Any:
    return typer.main.get_command(__import__(f"kvcalc.cli.{command}", fromlist=["app"]).app)


def options_in(screen: str) -> set[str]:
    """The long names in the first column of a screen."""
    return {
        name
        for line in screen.partition("\nExample")[0].splitlines()
        for name in re.findall(r"^  (?:-\w+, |    )(--[a-z0-9-]+)", line)
    }


@pytest.mark.parametrize("words", SCREENS, ids=" ".join)
def test_the_short_help_fits_a_screen_and_has_examples(kvcalc: Any, words: tuple[str, ...], columns: int) -> None:
    result = kvcalc(*words, "-h")
    lines = result.out.splitlines()
    assert (result.status, result.err) == (0, "")
    assert len(lines) <= 40
    assert max(map(len, lines)) < columns
    assert lines[0]
    assert not any(line != line.rstrip() for line in lines)
    examples = [line for line in lines if line.startswith("  kvcalc ")]
    assert 1 <= len(examples) <= 3
    assert "\x1b" not in result.out


@pytest.mark.parametrize("words", SCREENS, ids=" ".join)
def test_no_name_is_cut_in_the_whole_help(kvcalc: Any, words: tuple[str, ...], columns: int) -> None:
    out = kvcalc(*words, "--help").out
    assert max(map(len, out.splitlines())) < columns
    assert "…" not in out
    command = built(words[0]).commands[words[1]] if words[1:] else built(words[0])
    for option in command.params:
        if getattr(option, "rich_help_panel", None) != "Engine" and not option.hidden:
            for name in option.opts if option.param_type_name == "option" else [option.metavar.strip("[]")]:
                assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", out), name


@pytest.mark.parametrize("command", [name for name in COMMANDS if table_of(name).get("essential") is not None])
def test_the_essential_options_exist_and_are_about_ten(kvcalc: Any, command: str) -> None:
    names = (table_of(command).get("essential") or "").split()
    assert 8 <= len(names) <= 13
    assert options_in(kvcalc(command, "-h").out) == {f"--{name}" for name in names}


@pytest.mark.parametrize("command", WITH_ENGINES)
def test_an_engines_own_options_are_shown_for_that_engine(kvcalc: Any, command: str) -> None:
    common = kvcalc(command, "--help").out
    assert f"kvcalc {command} --engine NAME --help" in common
    for engine, options in OPTIONS.items():
        own = {f"--{option.name}" for option in options}
        others = {f"--{option.name}" for rest in OPTIONS.values() for option in rest} - own
        for words in (
            ("--engine", engine, "--help"),
            ("--help", f"--engine={engine}"),
            ("--engine", f"{engine}@1", "--help"),
        ):
            shown = options_in(kvcalc(command, *words).out)
            assert own <= shown
            assert not shown & others
        assert not options_in(common) & own
    every = options_in(kvcalc(command, "--engine", "all", "--help").out)
    assert every >= {f"--{option.name}" for options in OPTIONS.values() for option in options}


@pytest.mark.parametrize("command", WITH_ENGINES)
def test_options_of_one_kind_are_under_one_heading(kvcalc: Any, command: str) -> None:
    out = kvcalc(command, "--help", "--engine", "vllm").out
    headings = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert len(headings) == len(set(headings))
    assert {"Arguments:", "Options:", "Device:", "Output:", "Settings of vllm:", "Examples:"} <= set(headings)


def test_help_is_shown_whatever_else_is_typed(kvcalc: Any) -> None:
    for words in (("--engine", "nonsense"), ("--gpu", "nonsense"), ("no-such-model",), ("--context", "many")):
        result = kvcalc("estimate", *words, "--help")
        assert (result.status, result.err) == (0, "")
        assert "Settings of" not in result.out.replace("--engine NAME", "")
    assert kvcalc("fit", "--help").out.startswith("Check whether a model's server")


def test_brackets_in_a_text_are_kept(kvcalc: Any) -> None:
    assert "pip install 'kvcalc[measure]'" in kvcalc("measure", "--help").out
    assert "NAME[xN]" in kvcalc("estimate", "-h").out


def test_the_overview_has_a_line_for_every_command(kvcalc: Any, columns: int) -> None:
    for words in ((), ("-h",), ("--help",)):
        result = kvcalc(*words)
        lines = result.out.splitlines()
        assert (result.status, len(lines) <= 40) == (0, True)
        assert max(map(len, lines)) < columns
        for command in COMMANDS:
            (line,) = (line for line in lines if line.startswith(f"  {command} "))
            assert line.endswith(".")
    assert sorted(" ".join(GROUPS.values()).split()) == sorted(COMMANDS)


@pytest.mark.parametrize(
    "words", [words for words, kind in SCREENS.items() if kind not in ("batch", "completion")], ids=" ".join
)
def test_the_path_in_a_commands_help_is_in_its_document(kvcalc: Any, words: tuple[str, ...]) -> None:
    (path,) = set(
        re.findall(r"--get ([\w.]+)\.$", " ".join(kvcalc(*words, "--help").out.split()).replace(". ", ".\n"), re.M)
    )
    check_against_schema(load_schema(), SCREENS[words], path)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_paths_in_examples_are_in_the_documents(command: str) -> None:
    for words in ((command,), (command, "show")):
        if words in SCREENS:
            for example in split_epilog(epilog_of(" ".join(words)))[1]:
                given = shlex.split(example)
                if "--get" in given:
                    kind = {"batch": "estimate", "models": "models_show", "gpus": "gpus_show"}.get(command, command)
                    check_against_schema(load_schema(), kind, given[given.index("--get") + 1])


def test_an_example_that_is_too_long_can_still_be_copied(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = kvcalc("plan", "-h").out
    examples = out[out.index("Examples:") :].split("\n\n")[0].splitlines()[1:]
    joined = "\n".join(examples).replace("\\\n", "")
    monkeypatch.setenv("COLUMNS", "300")
    whole = kvcalc("plan", "-h").out
    assert [shlex.split(line) for line in joined.splitlines()] == [
        shlex.split(line) for line in whole.splitlines() if line.startswith("  kvcalc plan")
    ]


def test_colours_are_for_a_terminal_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcalc.cli.help import Screen

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for environment, has_colour in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        screen = Screen()
        screen.heading("Usage")
        assert ("\x1b" in screen.text) is has_colour
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")


def test_help_and_version_are_commands_too(kvcalc: Any) -> None:
    assert kvcalc("version") == kvcalc("--version")
    assert kvcalc("help") == kvcalc("help", "--help") == kvcalc("--help")
    assert kvcalc("help", "fit") == kvcalc("fit", "--help")
    assert kvcalc("help", "models", "show") == kvcalc("models", "show", "--help")
    unknown = kvcalc("help", "exit-code")
    assert unknown.status == 2
    assert unknown.err.splitlines() == ["kvcalc: no help about 'exit-code'", "  did you mean exit-codes?"]


def test_each_topic_fits_a_narrow_terminal_and_says_what_the_manual_says(kvcalc: Any) -> None:
    topics = {name: kvcalc("help", name) for name in ("exit-codes", "environment", "formats")}
    for printed in topics.values():
        assert printed.status == 0
        assert max(map(len, printed.out.splitlines())) < 80
    manual = (ROOT / "docs" / "reference" / "scripting.md").read_text()
    codes = dict(re.findall(r"^\| (\d+) \| (.*) \|$", manual, re.MULTILINE))
    told = " ".join(topics["exit-codes"].out.split())
    assert len(codes) > 5
    for code, meaning in codes.items():
        assert f"{code} {meaning.replace('`', '')}" in told
    sources = "".join(path.read_text() for path in (ROOT / "kvcalc").rglob("*.py"))
    for name in {*re.findall(r"KVCALC_[A-Z]+", sources), "NO_COLOR", "COLUMNS", "HF_TOKEN", "HF_ENDPOINT", "CC"}:
        assert name in topics["environment"].out
    named = {line.split()[0] for line in topics["formats"].out.splitlines() if line and line[0] != " "}
    assert named >= {"human", "tsv", "csv", "json", "jsonl"}
