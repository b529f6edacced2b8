"""Shared by many tests: run the command line in this process or in a new one, and the settings of hypothesis."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from kvcalc.model.spec import ModelSpec

ROOT = Path(__file__).resolve().parent.parent

# Shared machines stall, so a single example has no deadline.
settings.register_profile("kvcalc", deadline=None)
settings.load_profile("kvcalc")

# By default, torch starts one thread per core in every worker and in every process that a worker starts, and these
# threads wait for each other. torch reads this variable once, when it is imported.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _WORKERS)))

# The environment must not change the results: no presets of the user's own, and streams with buffers, as by default.
for name in ("KVCALC_PRESETS", "KVCALC_DEBUG", "KVCALC_FORMAT", "PYTHONUNBUFFERED"):
    os.environ.pop(name, None)
os.environ["XDG_CONFIG_HOME"] = str(ROOT / "tests" / "nothing-is-here")


# Presets of plain models, in which every layer keeps K and V or a latent, for all tokens or for a window. Rules about
# whole models are tested on these. States, encoder outputs and compressed entries have their own tests.
PLAIN_PRESETS = (
    "bert-base bert-large deepseek-v2 deepseek-v3 falcon-7b gemma-3-27b glm-4.5 gpt-3 gpt-oss-120b gpt2 llama-2-70b "
    "llama-3-70b llama-3-8b llama-7b mistral-7b-v0.1 mistral-7b-v0.3 palm-540b qwen3-30b-a3b"
).split()


def one_of_each_type() -> list[str]:
    """The first shipped preset of every model_type."""
    from kvcalc.model.presets import shipped_presets

    return sorted({str(preset.config["model_type"]): preset.name for preset in reversed(shipped_presets())}.values())


def asked_presets(config: pytest.Config) -> list[str]:
    """The first shipped preset of every model_type and every fifth of the others, or with `--everything` all."""
    first, names = {*one_of_each_type()}, preset_names()
    if config.getoption("--everything"):
        return names
    return sorted({*first, *[name for name in names if name not in first][::5]})


@cache
def loaded(name: str) -> ModelSpec:
    """The model of a shipped preset, read once, for tests that ask all presets again and again."""
    from kvcalc.model.resolve import load_model

    return load_model(name)


class Result(NamedTuple):
    """The exit code of a command, and the text on both streams."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _documents_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every document that a command prints in a test is checked against the schema."""
    from kvcalc.output.sink import Output

    emit = Output.emit

    def checked(self: Output, document: dict[str, Any], kind: str, **shown: bool) -> None:
        if "chart" not in document:  # the screen of a sweep shows some of its rows and a chart
            from tests.documents import validate

            validate(document, kind)
        emit(self, document, kind, **shown)

    monkeypatch.setattr(Output, "emit", checked)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Simulations end long before their times are known, except in tests marked `settled`.

    Most tests are about what is done with the times, and simulations would take four fifths of the time of all tests.
    Fixtures of modules are made in the same way, so marked and other tests of a module share none.
    """
    from kvcalc.model.memo import forget

    if item.get_closest_marker("settled"):
        forget()  # loads that were simulated briefly: kvcalc.simulation.served keeps them
        try:
            return (yield)
        finally:
            forget()
    with pytest.MonkeyPatch.context() as patch:
        _shorten(patch)
        return (yield)


def _shorten(patch: pytest.MonkeyPatch) -> None:
    from kvcalc.planning.plan import judge
    from kvcalc.simulation import fleet, settled
    from kvcalc.simulation.loads import load

    window_of = settled.window_of
    patch.setattr(fleet, "window_of", lambda *ended: window_of(*ended)._replace(widest=0.0))
    short = {
        load: {"_FIRST": 60, "_FIRST_OF_CLIENTS": 60, "_FIRST_PER_CLIENT": 2},
        judge: {
            "_FEWEST_REQUESTS": 100, "_BEYOND": 3, "_TURNOVERS": 2, "_TURNOVERS_OF_MEANS": 2, "_LONG_SECONDS": 60,
            "_SEEDS": 2,
        },
    }  # fmt: skip
    for module, values in short.items():
        for name, value in values.items():
            patch.setattr(module, name, value)


def without_progress(err: str) -> str:
    """Stderr without the lines that say which run of `kvcalc measure` begins."""
    return re.sub(r"^run \d+ of \d+: .*\n", "", err, flags=re.MULTILINE)


@pytest.fixture
def kvcalc(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in this process: `kvcalc("estimate", "llama-7b")`."""
    from kvcalc.cli.app import run

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        status = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        if "batch" in arguments[:1]:  # writes its answers without `Output.emit`
            check_output("batch", captured.out)
        return Result(status, captured.out, without_progress(captured.err))

    return call


def spawn(
    *arguments: object, stdin: str | bytes = "", env: dict[str, str] | None = None,
    run: tuple[str, str] = ("-m", "kvcalc"), **options: Any,
) -> Result:  # fmt: skip
    """Run `python -m kvcalc`, or Python with another `run`, in a new process."""
    done = subprocess.run(
        [sys.executable, *run, *map(str, arguments)],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        env={**os.environ, **(env or {})},
        timeout=options.pop("timeout", 300),
        check=False,
        **options,
    )
    out = done.stdout.decode()
    check_output(next((str(word) for word in arguments if not str(word).startswith("-")), ""), out)
    return Result(done.returncode, out, done.stderr.decode())


def check_output(command: str, out: str) -> None:
    """Check the documents that a command printed, in this process or in another, against the schema."""
    if out.startswith("{"):
        from tests.documents import check_printed

        check_printed(command, out)


# Added to a script: the peak memory of its process, in kilobytes. `ru_maxrss` includes the memory of the parent.
PEAK = "int(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"


@pytest.fixture
def generic() -> dict[str, object]:
    """A small well-formed config mapping to change in a test."""
    return {
        "model_type": "generic",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "head_dim": 64,
    }


def preset_names() -> list[str]:
    """The names of the shipped presets, sorted."""
    from kvcalc.model.preset_folders import shipped_files
    from kvcalc.model.presets import presets_folder

    return [name for name, _ in shipped_files(presets_folder())]


# As rarely as `kvcalc` does (kvcalc/__main__.py). It takes a tenth of the time that answers take.
gc.set_threshold(100_000, 50, 50)


def pytest_collection_finish() -> None:
    """Exclude modules and thousands of collected tests from garbage collection: `measure` collects after every run."""
    gc.freeze()


def at_night(*values: object) -> Any:
    """A row of `parametrize` that the tests leave out, because others run the same lines. `--everything` runs it."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--everything"):
        return
    at_night = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=at_night)
    items[:] = [item for item in items if item not in {*at_night}]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=5000, help="mutated inputs of the fuzz tests (-m fuzz), in all")
    parser.addoption("--fuzz-seed", type=int, default=16, help="the first seed of the fuzz tests")
    parser.addoption("--names", type=int, default=150, help="hostile names for every emitter (tests/writing)")
    parser.addoption("--everything", action="store_true", help="every preset, kernel and flag, where a few will do")
    parser.addoption("--pairs", type=int, default=20, help="pairs of a command and an environment to run")
    parser.addoption("--pairs-seed", type=int, default=16, help="the seed of the sample of pairs")
