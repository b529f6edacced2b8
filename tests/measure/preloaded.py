"""The modules that the server of `tests.measure.processes` loads before it forks: everything except numpy."""

import gc
import sys

sys.modules["numpy"] = None  # type: ignore[assignment]

from kvcalc.measure import record, runner  # noqa: E402, F401, I001 - before torch, whose warning it silences
import pytest  # noqa: E402, F401
import torch.distributed  # noqa: E402
import torch._dynamo  # noqa: E402 - the first run on a simulated device imports it
import torch.profiler  # noqa: E402, F401
from kvcalc.cli import app, measure  # noqa: E402, F401
from kvcalc.output import rows, sink  # noqa: E402, F401

# Exclude all of this from garbage collection in forked processes.
gc.freeze()
