"""Checks the cache in Ollama's own lines: the estimate of its scheduler, and since 2025 the buffers of each device.

Source: fs/ggml/ggml.go (GraphSize) and ml/device.go of ollama/ollama: the cells of the runner (--ctx-size, KvSize) for
all slots, in the type of --kv-cache-type. Sizes have one decimal.
"""

from __future__ import annotations

from fractions import Fraction

from kvcalc.engines.llama_cpp.architectures import Layers
from kvcalc.engines.llama_cpp.log.caches import parts_of
from kvcalc.engines.log import Setup
from kvcalc.engines.log_lines import EQUAL, UNEXPLAINED, Figure, Log, Record, parse_printed
from kvcalc.memory.dtypes import parse_dtype
from kvcalc.model.caches import RecurrentState

_NO_CONTEXT = "an input: the log has no --ctx-size"
_OWN_RULES = "an input: Ollama sizes windows and states by its own rules"


def check_ollama(log: Log, layers: Layers, setup: Setup) -> list[Figure]:
    """Check the estimate, and the sum of the last buffers of all devices, against the cells of the context."""
    totals, buffers = log.named("ollama_total"), log.named("ollama_buffer")
    if not totals and not buffers:
        return []
    if layers.window is not None or any(isinstance(layer.cache, RecurrentState) for layer in layers.caches):
        return [record.as_input("size", "cache_bytes", "bytes", _OWN_RULES) for record in (*totals, *buffers)]
    if log.text("context_tokens") is None:
        return [record.as_input("size", "cache_bytes", "bytes", _NO_CONTEXT) for record in (*totals, *buffers)]
    stated = log.text("ollama_kv_type")
    dtype = setup.dtype if stated is None else parse_dtype(stated, "the log's cache type")
    parts = parts_of(log, (totals or buffers)[0], layers, setup, dtype)
    cells, size = parts[0].cells * parts[0].streams, sum(part.k + part.v for part in parts)
    words = f"{cells:,} cells x {size:,} bytes"
    figures = [record.check_size("size", "cache_bytes", cells * size, words) for record in totals]
    return figures + ([_check_sum(buffers, cells * size, words)] if buffers else [])


def _check_sum(buffers: list[Record], computed: int, words: str) -> Figure:
    """Check the sum of the devices' buffers. A device that is printed again has been filled anew."""
    last = {record.parts["device"]: record for record in buffers}
    printed = [parse_printed(record.parts["size"]) for record in last.values()]
    low, high = (Fraction(sum(bounds)) for bounds in zip(*((size.low, size.high) for size in printed)))
    equal = low <= computed <= high
    return Figure(
        min(record.line for record in last.values()), "cache_bytes", " + ".join(size.text for size in printed), "bytes",
        computed, None if equal else round((low + high) / 2) - computed, EQUAL if equal else UNEXPLAINED, words,
    )  # fmt: skip
