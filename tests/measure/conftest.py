"""Fixtures for the tests of measure: small roofs, and processes that have already loaded torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvcalc.cli.app import run
from kvcalc.measure import runner
from tests.measure.options import last_given
from tests.measure.processes import commands
from tests.measure.quick import FAST, quicken


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small roofs, whose figures no test checks."""
    quicken(monkeypatch)


@pytest.fixture
def kvcalc(kvcalc: Any) -> Any:
    """Run a command line in this process. A test's own options replace those of FAST and the like."""
    return lambda *arguments: kvcalc(*last_given(arguments))


@pytest.fixture(scope="session")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a run of all four kinds. Do not change it."""
    path = tmp_path_factory.mktemp("records") / "record.json"
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        assert run(["measure", *FAST, "--attention", "all", "--save", str(path), "--json"]) == 0
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.fixture
def printed(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`printed(document, *options)`: the output of `kvcalc measure` if the run returns `document`."""

    def call(document: dict[str, Any], *options: str) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "measure", lambda *given, **named: document)
            return kvcalc("measure", *FAST, *options)

    return call


@pytest.fixture
def start() -> Iterator[Any]:
    """`start(folder, *arguments, before="...", environment={...})`: a `tests.measure.processes.Command`."""
    with commands() as function:
        yield function
