"""The largest counts that are accepted, by what they count, for options, batch lines and Python.

Every answer takes less than a second and little memory at these bounds. They are not limits of the arithmetic, which
has whole numbers of any size.
"""

from __future__ import annotations

TOKENS = 2**63 - 1
"""Positions are signed 64-bit integers in torch and in engines; so are bytes."""
SEQUENCES = 2**31 - 1
"""Engines number their requests and blocks with signed 32-bit integers."""
DEVICES = 2**20
"""More than any cluster has."""
LAYERS = 2_000
"""More layers than any model has. A config with a larger number is damaged."""
WIDTH = 10**12
"""Larger than any dimension or count of a model."""

BOUNDS = {"tokens": TOKENS, "sequences": SEQUENCES, "devices": DEVICES, "width": WIDTH}
"""The bounds that an engine's option may declare (`most` in its `engine.yaml`)."""

_NAMES = {
    SEQUENCES: "batch batches batch-size block-size concurrency speculative images",
    DEVICES: """
        tp tensor-parallel-size tensor-parallel-sizes
        pp pipeline-parallel-size dp data-parallel-size ep expert-parallel-size num-gpus
        max-gpus gpu num-devices prefill-replicas prefill-tp
    """,
    LAYERS: "layers",
    WIDTH: "heads kv-heads head-dim hidden-size sliding-window kv-lora-rank qk-rope-head-dim",
}
_MOST = {
    spelling: most
    for most, names in _NAMES.items()
    for name in names.split()
    for spelling in (name, f"--{name}", name.replace("-", "_"))
}


def most_of(name: str) -> int:
    """The largest number that kvcalc's own option, field or value `name` takes: `--tp`, `tensor_parallel_size`."""
    return _MOST.get(name, TOKENS)
