"""What the tests of measure share: small roofs, and processes that have torch loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.measure.processes import commands
from tests.measure.quick import quicken

# Every run ends with a search for garbage, of which torch's modules are none.
gc.freeze()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small roofs, whose figures no test looks at."""
    quicken(monkeypatch)


@pytest.fixture
def start() -> Iterator[Any]:
    """`start(folder, *arguments, before="...", environment={...})`: a `tests.measure.processes.Command`."""
    with commands() as function:
        yield function
