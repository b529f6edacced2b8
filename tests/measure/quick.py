"""kvcalc with small roofs, whose figures tests do not check: `python -m tests.measure.quick measure ...`."""

from __future__ import annotations

import functools
import gc
import sys

import pytest

from kvcalc.measure import profile, runner  # before torch, whose warning it silences
from kvcalc.measure.devices.timing import Effort
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.spec import ModelSpec, map_attention

# isort: split
import torch

# For such small runs, threads cost more than they save.
torch.set_num_threads(1)

# A model with two narrow layers, and the options of a short run.
SMALL = ("--heads", "8", "--kv-heads", "2", "--head-dim", "16", "--hidden-size", "64", "--layers", "2")
FAST = (*SMALL, "--context", "40", "--steps", "4", "--device", "cpu", "--dtype", "fp32")

EFFORT = Effort(read_bytes=1 << 22, matrix_width=64, cache_bytes=1 << 16, settle_seconds=0.0)


def quicken(patch: pytest.MonkeyPatch) -> None:
    """While `patch` is active, every run in this process uses EFFORT."""
    # A run collects garbage many times. It should not search torch's modules, and what earlier tests left in caches.
    gc.freeze()
    patch.setattr(runner, "measure", functools.partial(runner.measure, effort=EFFORT))
    patch.setattr(profile, "measure_profile", functools.partial(profile.measure_profile, effort=EFFORT))


def narrow(spec: ModelSpec) -> ModelSpec:
    """`spec` with a hidden size of 64. It has the same caches, but no large projections."""

    def narrowed(shape: AttentionShape) -> AttentionShape:
        return shape._replace(hidden_size=64)

    whole = map_attention(spec, lambda attention: attention._replace(shape=narrowed(attention.shape)))
    return whole._replace(attention=narrowed(spec.attention))


if __name__ == "__main__":
    from kvcalc.__main__ import main

    quicken(pytest.MonkeyPatch())
    sys.exit(main())
