"""A table of kernel latencies as named columns, and the device that it was measured on.

Latencies in the tables are milliseconds; message sizes are elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.fit.kernels.fits import Array, Fit

Mask = NDArray[np.bool_]
Row = list[Any]

# Bits per weight, scales included: nvfp4 has an 8-bit scale per 16 weights, mxfp4 one per 32, int4 16 bits per 128.
BITS = {
    "bfloat16": 16.0,
    "fp8": 8.0,
    "fp8_static": 8.0,
    "fp8_block": 8.0,
    "nvfp4": 4.5,
    "int8_wo": 8.0,
    "sq": 8.0,
    "int4_wo": 4.125,
    "w4afp8": 4.125,
    "w4a16_mxfp4": 4.25,
    "w4a8_mxfp4_mxfp8": 4.25,
}
# The type that the tensor cores multiply in. A weight-only type is expanded to bf16.
_MULTIPLIED = {
    "bfloat16": "bf16",
    "int8_wo": "bf16",
    "int4_wo": "bf16",
    "w4a16_mxfp4": "bf16",
    "nvfp4": "fp4",
    "sq": "int8",
}
# Copies of the weights that the collector goes through in turn (collector/*/collect_gemm.py): with fewer bytes than
# this many times the L2 cache, the weights stay in it. vLLM has one copy for fp8_block and nvfp4.
COPIES = {"vllm": 6, "sglang": 6, "trtllm": 5}


class Device(NamedTuple):
    """Nominal figures of a device, per second and in bytes. `link` is one direction of its interconnect, else of PCIe.

    `peaks` are dense operations per second by dtype.
    """

    name: str
    bandwidth: float
    peaks: dict[str, float]
    l2_bytes: float
    link: float


class Table(NamedTuple):
    """One file: latencies of an engine's release on a device, as named columns."""

    device: Device
    engine: str
    release: str
    columns: dict[str, NDArray[Any]]

    def number(self, name: str, missing: float = 0.0) -> Array:
        """A column as floats, or `missing` in every row if the table has no such column."""
        if name not in self.columns:
            return np.full(len(self.seconds), missing)
        return self.columns[name].astype(float)

    def text(self, name: str, missing: str = "") -> NDArray[Any]:
        if name not in self.columns:
            return np.full(len(self.seconds), missing, dtype=object)
        return self.columns[name].astype(str)

    @property
    def seconds(self) -> Array:
        return self.columns["latency"].astype(float) / 1e3

    @property
    def head(self) -> Row:
        return [self.device.name, self.engine, self.release]

    def peak(self, dtype: str) -> float | None:
        """The dense peak for a weight dtype. Without units for it, the device multiplies in bf16."""
        multiplied = _MULTIPLIED.get(dtype, "fp8")
        return self.device.peaks.get(multiplied) or self.device.peaks.get("bf16")

    def groups(self, *names: str) -> Iterator[tuple[tuple[str, ...], Table]]:
        """The rows with the same text in these columns, as tables."""
        keys = list(zip(*(self.text(name) for name in names)))
        for key in sorted(set(keys)):
            chosen = np.array([each == key for each in keys])
            columns = {name: column[chosen] for name, column in self.columns.items()}
            yield tuple(str(part) for part in key), self._replace(columns=columns)


def between(values: Array, low: float, high: float) -> Mask:
    return np.asarray((values >= low) & (values <= high))


def short_name(kernel: str) -> str:
    """A kernel's name without the module or the engine before it, in at most 32 characters."""
    return re.sub(r"^(vllm|sglang|trtllm)[_.]", "", kernel)[-32:].lstrip("_.")


def microseconds(value: float | None) -> float | None:
    return None if value is None else value * 1e6


def constants(fit: Fit, efficiency: int | None = None, power: bool = False) -> Row:
    """The last columns of a row: fixed microseconds, factors, perhaps the power, both spreads and the number of rows.

    The factor at the place `efficiency` is given as its inverse, the share of the peak.
    """
    factors = [1 / value if value and place == efficiency else value for place, value in enumerate(fit.factors)]
    powers = [fit.power] if power else []
    return [microseconds(fit.fixed_seconds), *factors, *powers, fit.spread, fit.wide_spread, fit.rows]
