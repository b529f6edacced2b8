"""kvcalc with small roofs, whose figures a test does not look at: `python -m tests.measure.quick measure ...`."""

from __future__ import annotations

import functools
import sys

import pytest

from kvcalc.measure import runner
from kvcalc.measure.timing import Effort

EFFORT = Effort(read_bytes=1 << 22, matrix_width=64, cache_bytes=1 << 16)


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Within `patch`, every run in this process takes EFFORT."""
    patch.setattr(runner, "measure", functools.partial(runner.measure, effort=EFFORT))


if __name__ == "__main__":
    from kvcalc.__main__ import main

    quicken(pytest.MonkeyPatch())
    sys.exit(main())
