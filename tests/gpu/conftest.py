"""Tests of what only a GPU can show. Without one, they are skipped.

`benchmarks/gpu.py` runs them on a GPU, and prints the lines that begin with "gpu: ". On a simulated device they run at
small sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.simulated_cuda import is_simulated


@pytest.fixture
def tokens() -> int:
    """A length at which a decode step is limited by memory."""
    return 200 if is_simulated() else 8192


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Give the memory of a test back before the next one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
