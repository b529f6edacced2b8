"""The documentation is true: every command documented, every example run, the output shown is the output printed."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcalc.cli.app import COMMANDS
from tests import json_reference, picture, samples
from tests.conftest import ROOT
from tests.documents import estimate
from tests.samples import PAGES, Sample

README = (ROOT / "README.md").read_text()
TEXTS = {page: page.read_text() for page in PAGES}
# Where the examples in help are run: the files they name are there.
LOGS = ROOT / "tests" / "logs"
TUTORIALS = Path("docs", "start")
MANUAL = "\n".join(TEXTS.values())
SAMPLES = samples.all_samples()

# A block of shell commands which a test does not run: it installs, needs files or devices, or takes minutes.
_NOT_RUN = ("./dev", "pip install", "venv", "pytest", "python benchmarks", "pre-commit")


def blocks(language: str) -> list[tuple[Path, str]]:
    """Every code block of a language, with its page."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page, block) for page, text in TEXTS.items() for block in fence.findall(text)]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the terminal of the samples."""
    for name, value in samples.TERMINAL.items():
        monkeypatch.setenv(name, value)


def examples_of(command: str, kvcalc: Any) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        patch.setenv("TERM", "dumb")
        out = kvcalc(command, "--help").out
    return [line.strip() for line in out.splitlines() if line.strip().startswith(f"kvcalc {command}")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme_and_has_help_with_examples(kvcalc: Any, command: str) -> None:
    assert f"kvcalc {command}" in README
    assert examples_of(command, kvcalc)


def test_every_option_has_help() -> None:
    import typer

    for command in COMMANDS:
        module = __import__(f"kvcalc.cli.{command}", fromlist=["app"])
        built = typer.main.get_command(module.app)
        for parameter in built.params:
            assert getattr(parameter, "help", None), f"{command} {parameter.name}"


# As typed, but short: the kinds and options are what an example shows.
SHORT = ("--context", "64", "--steps", "2", "--layers", "1", "--device", "cpu")


def shortened(arguments: Sequence[str]) -> list[str]:
    """The arguments of `kvcalc measure` with the options of SHORT instead of their own."""
    given = iter(arguments)
    kept = [word for word in given if word not in SHORT[::2] or next(given) is None]
    return [*kept, *SHORT]


@pytest.fixture
def measured(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `kvcalc measure` in this process: each process of its own would spend seconds on torch and on roofs."""
    from tests.measure.quick import quicken

    quicken(monkeypatch)
    return lambda *arguments: kvcalc("measure", *arguments)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "measure"])
def test_the_examples_in_help_run(kvcalc: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(LOGS, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for example in examples_of(command, kvcalc):
        # A plan for percentiles on every kind of device simulates 24,000 requests on each, in half a minute.
        fewer = ("--requests", "100") if command == "plan" and "@p" in example else ()
        result = kvcalc(*shlex.split(example)[1:], *fewer)
        assert result.status == 0, (example, result.err)
        assert result.out


def test_the_examples_in_measures_help_run(
    kvcalc: Any, measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The record from before, of which an example speaks.
    assert measured("gpt2", *SHORT, "--save", "before.json").status == 0
    for example in examples_of("measure", kvcalc):
        arguments = shlex.split(example)[2:]
        result = measured(*(arguments if "--compare" in arguments else shortened(arguments)))
        assert result.status == 0, (example, result.err)
        assert result.out


def test_the_torchrun_example_in_help_runs(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = kvcalc("measure", "--help").out
    (example,) = (line.strip() for line in out.splitlines() if line.strip().startswith("torchrun "))
    assert example in MANUAL
    options, kvcalc, arguments = example.removeprefix("torchrun ").partition(" -m kvcalc ")
    assert kvcalc
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(options),
               "-m", "tests.measure.quick", *shortened(shlex.split(arguments))]  # fmt: skip
    env = {**os.environ, "KVCALC_FORMAT": "tsv"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert "runs.0.ranks.1.held_bytes" in done.stdout


def test_there_are_samples_of_every_command() -> None:
    # The output of `completion` is a long script, which tests/cli runs.
    assert {sample.arguments[0] for sample in SAMPLES} >= set(COMMANDS) - {"completion"}


MEASURED = [sample for sample in SAMPLES if sample.is_measured]


@pytest.mark.parametrize("sample", MEASURED, ids=str)
def test_the_bytes_shown_are_those_a_run_holds(sample: Sample, measured: Any) -> None:
    """Times are the machine's own. The command is run short; bytes of its length are those of the formula."""
    import kvcalc

    name, *options = sample.arguments[1:]
    given = dict(zip(options[::2], options[1::2]))
    figures = set(re.findall(r"\b\d{1,3}(?:,\d{3})+\b", sample.shown))
    result = measured(name, *shortened(options), "--json")
    assert result.status == 0, result.err
    spec, context = kvcalc.load_model(name), int(given["--context"])

    def expected(kind: str, layers: int, tokens: int) -> int:
        document = estimate(spec.head(layers), context_tokens=tokens, what_if=kvcalc.WhatIf(kind))
        return int(document["kv_cache"]["total_bytes"])

    for run in result.json["runs"]:
        kind = run["attention"]
        assert run["held_bytes"] == expected(kind, 1, 64)
        assert f"{expected(kind, int(given['--layers']), context):,}" in figures
        assert f"{expected(kind, spec.num_layers, context):,}" in figures


@pytest.mark.settled
@pytest.mark.parametrize("sample", [sample for sample in SAMPLES if not sample.is_measured], ids=str)
@pytest.mark.usefixtures("terminal")
def test_the_output_shown_is_the_output_printed(kvcalc: Any, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert sample.shown.rstrip() == samples.output_of(sample.command, kvcalc).rstrip(), (
        "python -m tests.samples --write"
    )


def test_a_sample_is_written_in_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    kept = "$ kvcalc measure gpt2\n12 ms\n"
    asked = "$ kvcalc estimate gpt2 --context 1 \\\n  --get kv_cache.total_bytes\n"
    page.write_text(f"before\n```console\n{kept}{asked}1\n2\n```\nafter\n```console\n{asked}```\n")
    after = samples.refreshed(page)
    # 2 x 12 layers x 12 heads x 64 x 4 bytes.
    assert after == f"before\n```console\n{kept}{asked}73728\n```\nafter\n```console\n{asked}73728\n```\n"
    page.write_text("```console\n$ kvcalc estimate no-such-model\n```\n")
    with pytest.raises(RuntimeError, match="exit code 3, no output"):
        samples.refreshed(page)


def test_the_picture_is_what_the_command_prints(kvcalc: Any, terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert f"]({picture.PICTURE.relative_to(ROOT)})" in README
    drawn = picture.picture(picture.COMMAND, samples.output_of(picture.COMMAND, kvcalc))
    assert picture.PICTURE.read_text() == drawn, "python -m tests.samples --write"


def test_a_release_has_the_generated_reference(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.reference", tmp_path], check=True, cwd=ROOT)
    pages = {page.name: page.read_text() for page in tmp_path.iterdir()}
    assert all(f"`{name}`" in (ROOT / "docs" / "reference" / "README.md").read_text() for name in pages)
    assert all(f"## kvcalc {command}\n" in pages["commands.md"] for command in COMMANDS)
    assert "--max-num-seqs" in pages["commands.md"] or "--engine NAME --help" in pages["commands.md"]
    assert "| h100-sxm |" in pages["devices.md"]
    assert "| llama-3-70b |" in pages["models.md"]
    assert pages["json.md"] == json_reference.page()


def test_the_json_reference_has_every_key_and_its_links_lead_somewhere() -> None:
    from kvcalc.schema import load_schema

    text = json_reference.page()

    def keys(schema: Any) -> set[str]:
        if isinstance(schema, list):
            return set().union(*map(keys, schema))
        if not isinstance(schema, dict):
            return set()
        own = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
        return own.union(*map(keys, schema.values()))

    assert keys(load_schema()) == {
        path.split(".")[-1] for path in re.findall(r"^\| `([\w.\[\]]+)`", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= set(re.findall(r"^### (\w+)$", text, re.MULTILINE))


RUN = [(page, script) for page, script in blocks("bash") if not any(words in script for words in _NOT_RUN)]


@pytest.mark.parametrize(
    ("page", "script"), RUN, ids=[f"{page.name}: {script.splitlines()[0]}" for page, script in RUN]
)
def test_shell_examples_run(page: Path, script: str, tmp_path: Path) -> None:
    """Blocks of `bash`, with kvcalc on the path. Blocks of `sh` are for reading."""
    shutil.copytree(LOGS, tmp_path, dirs_exist_ok=True)
    shutil.copytree(ROOT / TUTORIALS, tmp_path / TUTORIALS)
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True, text=True, env=environment, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_traces_of_the_tutorials_are_those_of_their_script(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / TUTORIALS / "make_traces.py", tmp_path], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"agents.jsonl", "chat.csv"}
    for made in tmp_path.iterdir():
        assert made.read_text() == (ROOT / TUTORIALS / made.name).read_text(), made.name


def test_there_are_shell_examples() -> None:
    assert len(RUN) >= 4


def test_the_questions_shown_are_those_of_the_batch_sample() -> None:
    assert (LOGS / "questions.jsonl").read_text() in [block for _, block in blocks("json")]


PYTHON = sorted({page for page, block in blocks("python") if ">>>" in block})


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_python_examples_are_true(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import doctest

    code = "".join(block for of, block in blocks("python") if of == page)
    monkeypatch.chdir(ROOT)
    found = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), 0)
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0


def test_the_manual_names_everything_public() -> None:
    import kvcalc

    named = set(re.findall(r"`kvcalc\.(\w+)", (ROOT / "docs" / "reference" / "python-api.md").read_text()))
    assert named >= set(kvcalc.__all__)


def options_of_commands() -> set[str]:
    """Every option of every command, and the engines' own."""
    import typer

    from kvcalc.engines import options as engines

    found = {"--help", "-h", "--version", *re.findall(r"(?<![\w-])--?[a-z][\w-]*", Path(engines.__file__).read_text())}
    for name in COMMANDS:
        command = typer.main.get_command(__import__(f"kvcalc.cli.{name}", fromlist=["app"]).app)
        for one in (command, *getattr(command, "commands", {}).values()):
            for parameter in one.params:
                found.update(parameter.opts, parameter.secondary_opts)
    return found


def test_every_option_the_manual_names_exists() -> None:
    # Options of other programs, in commands of theirs and in commands that `plan` prints.
    others = set(re.findall(r"(?<!\S)--[a-z][\w-]*", "\n".join(
        line for _, block in [*blocks("sh"), *blocks("bash"), *blocks("console")] for line in block.splitlines()
        if not re.match(r"\$? ?kvcalc ", line)
    )))  # fmt: skip
    others |= {
        "--write",
        "--measured",
        "--numprocesses",
        "--data",
        "--detail",
        "--fit",
        "--dp-size",
        "--enable-metrics",
        "--enable-prefill-cp",
        "--data-parallel-size-local",
        "--kv-offloading-size",
        "--hicache-size",
        "--hicache-ratio",
        "--cache-ram",
        "--random-input-len",
        "--random-range-ratio",
        "--limit-mm-per-prompt",
    }
    prose = re.sub(r"^```.*?^```", "", MANUAL, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"(?<=`)--[a-z][\w-]*", prose)) | {
        word
        for _, block in [*blocks("sh"), *blocks("bash"), *blocks("console")]
        for line in re.findall(r"^\$? ?kvcalc .*", block, re.MULTILINE)
        for word in re.findall(r"(?<= )--[a-z][\w-]*", line)
    }
    assert named - options_of_commands() - others == set()


def test_the_manual_speaks_of_the_product_alone() -> None:
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        found = re.search(r"\.\./shared|/work/|/tmp/|/root/|\bissue \d|#\d+\b", page.read_text())
        assert not found, f"{page}: {found[0]}"


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
    set_up = [line for line in README.splitlines() if line.startswith("./dev ")]
    assert [line.split()[:2] for line in set_up] == [["./dev", "run"], ["./dev", "test"]]
    assert max(map(len, set_up)) <= 100


def test_the_manual_is_short() -> None:
    """The lines that people write and read; what samples print and the tables between markers are made."""
    made = sum(len(sample.shown.splitlines()) for sample in SAMPLES if sample.page.is_relative_to(ROOT / "docs"))
    pages = [TEXTS[page] for page in PAGES if page.is_relative_to(ROOT / "docs")]
    tables = re.compile(r"<!-- (\w+): python .*? -->\n(.*?)<!-- end of \1 -->", re.DOTALL)
    made += sum(len(table.splitlines()) for text in pages for _, table in tables.findall(text))
    assert sum(len(text.splitlines()) for text in pages) - made <= 3460


def test_each_part_of_the_manual_has_an_index_of_its_pages() -> None:
    manual = ROOT / "docs"
    parts = {page.parent for page in manual.rglob("*.md")} - {manual}
    assert {part.name for part in parts} == {"start", "guides", "concepts", "reference"}
    for part in parts:
        assert f"]({part.name}/README.md)" in (manual / "README.md").read_text()
        index = (part / "README.md").read_text()
        for page in part.glob("*.md"):
            assert page.name == "README.md" or f"]({page.name}" in index, page


def test_the_number_of_devices_is_the_one_named(kvcalc: Any) -> None:
    number = len(kvcalc("gpus", "--json").json["gpus"])
    assert set(re.findall(r"(\d+) devices (?:by name|are known)", MANUAL)) == {str(number)}


def test_exit_codes_in_the_manual_are_the_codes() -> None:
    from kvcalc import errors

    table = dict(re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "docs/reference/scripting.md").read_text(), re.MULTILINE))
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.KvcalcError)]
    assert {str(kind.exit_code) for kind in kinds} | {"0", "130"} == set(table)


def test_ci_runs_the_readmes_test_command() -> None:
    assert re.findall(r"^\./dev test$", README, re.MULTILINE) == ["./dev test"]
    assert r"grep -m1 '^\./dev test' README.md" in (ROOT / ".ci" / "run").read_text()
    # What it installs has the releases of constraints.txt, so that torch is not the newest one by chance.
    assert "-c constraints.txt" in (ROOT / "dev").read_text()


def test_every_model_a_sample_names_exists() -> None:
    from kvcalc.model.resolve import find_published

    for sample in SAMPLES:
        if sample.arguments[0] in ("estimate", "measure") and not sample.arguments[1].startswith("-"):
            assert find_published(sample.arguments[1]) is not None


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE),
                          re.MULTILINE)  # fmt: skip
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


def test_public_things_have_docstrings() -> None:
    for path in sorted((ROOT / "kvcalc").rglob("*.py")):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{path}: no module docstring"
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}: {node.name}"


def test_the_package_example_is_true() -> None:
    import doctest

    import kvcalc

    assert doctest.testmod(kvcalc).failed == 0
