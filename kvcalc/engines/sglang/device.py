"""The defaults that SGLang chooses by the memory of a device: the tokens in a prefill step, and the graphs."""

from __future__ import annotations

from kvcalc.engines.engine import DeviceDefault
from kvcalc.engines.reserve import GIB

# Rows of (device memory below this many GiB, tokens in a prefill step, largest decode graph with fewer than four ranks,
# largest decode graph with four or more).
_BY_MEMORY = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
_LARGEST = (16384, 512, 512)


def device_defaults() -> list[DeviceDefault]:
    """Every default number of tokens in a prefill step."""
    sizes = {row[1]: f"less than {row[0]} GiB" for row in _BY_MEMORY}
    largest = {_LARGEST[0]: f"{_BY_MEMORY[-1][0]} GiB and more"}
    return [DeviceDefault("chunked-prefill-size", str(size), said) for size, said in {**sizes, **largest}.items()]


def steps_by_memory(memory_bytes: int) -> tuple[int, ...]:
    """The tokens in a prefill step, and the largest batch in a graph with few devices and with four or more."""
    return next((row[1:] for row in _BY_MEMORY if memory_bytes < row[0] * GIB), _LARGEST)
