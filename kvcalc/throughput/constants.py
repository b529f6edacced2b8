"""What cannot be derived: how far an engine's kernels stay from the device's peak, and what they cost apart from it.

The values stand in constants.json, written by benchmarks/fit_throughput.py from published measurements; its
`provenance` and each engine's `fitted` and `error` say from which rows, how, and how well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Gpu


class Constants(NamedTuple):
    """One engine's constants. An `overhead` is a factor of at least 1 over the ideal time; `seconds` are added.

    weight_overhead: reading a matrix, by the type it is stored in (`weight_class`). expert_overhead: an expert's.
    kv_overhead: reading the cache. kv_token_seconds: a layer and a cached token of the longest sequence.
    compute_overhead: multiplying, of one step; expert_compute_overhead on top; attention_compute_overhead: scores.
    roof_power: reading and multiplying overlap as (a^p + b^p)^(1/p): 1 not at all, large entirely.
    layer_seconds, moe_layer_seconds, expert_seconds, step_seconds, sequence_seconds: launches and host, each layer,
    each layer of experts, each expert touched on a device, each step, each sequence in a step.
    activation_passes: how often a layer reads or writes a token's hidden state in memory.
    all_reduce_seconds: one all-reduce without its bytes, times devices^all_reduce_power; link_overhead: its bytes.
    stage_seconds: from one pipeline stage to the next.
    prefill_overhead, prefill_expert_overhead, prefill_attention_overhead: as above, a whole prompt's.
    prefill_interference: the share of the other requests' prefills a running request waits for: 1 where each step mixes
    both; less where prompts go first and requests wait before their first token instead.
    ttft_seconds, ttft_steps, ttft_queue: added to a lone prefill: once, decode steps, prefills of the others.
    max_sequences: the most an engine runs at once where nobody says.
    """

    weight_overhead: Mapping[str, float]
    expert_overhead: float
    kv_overhead: float
    kv_token_seconds: float
    compute_overhead: float
    expert_compute_overhead: float
    attention_compute_overhead: float
    roof_power: float
    layer_seconds: float
    moe_layer_seconds: float
    expert_seconds: float
    step_seconds: float
    sequence_seconds: float
    activation_passes: float
    all_reduce_seconds: float
    all_reduce_power: float
    link_overhead: float
    stage_seconds: float
    prefill_overhead: float
    prefill_expert_overhead: float
    prefill_attention_overhead: float
    prefill_interference: float
    ttft_seconds: float
    ttft_steps: float
    ttft_queue: float
    max_sequences: int


class Regime(NamedTuple):
    """Where an engine's constants were fitted, and the ratios measured / predicted its left-out rows lay between.

    `low` and `high` are the 10th and the 90th percentile with a family or a device left out, whichever is wider.
    """

    device_kinds: Sequence[str]
    weight_classes: Sequence[str]
    largest_batch: int
    largest_tensor_parallel_size: int
    has_experts: bool
    low: float
    high: float


# Stored types that are read and multiplied alike. A block format's kernels are those of its width.
_WEIGHT_CLASSES = {
    "fp32": "bf16", "fp16": "bf16", "bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "nvfp4",
    "int8": "int8", "q8_0": "int8", "q6_k": "int4", "int2": "int4", "int3": "int4",
}  # fmt: skip


def weight_class(dtype: str) -> str:
    """`bf16`, `fp8`, `nvfp4`, `int8` or `int4`: whose kernels read weights stored as `dtype`."""
    return _WEIGHT_CLASSES.get(dtype, "int4" if dtype[:2] in ("q4", "q5", "iq", "in") else "bf16")


def device_kind(gpu: Gpu) -> str:
    """The kind of device constants are given for: its class, with HBM told from GDDR where a class has both."""
    kind = gpu.device_class or "unknown"
    if kind == "ampere" and (gpu.memory_type or "").startswith("HBM"):
        return "ampere-hbm"
    return kind


def load_constants(engine: str, gpu: Gpu) -> tuple[Constants, Regime]:
    """The constants of an engine on a device, and where they were fitted. `engine` is one kvcalc knows."""
    entry = _table()["engines"][engine]
    kind = device_kind(gpu)
    values = {**entry["constants"], **entry.get("by_device_kind", {}).get(kind, {})}
    fitted = [entry["fitted"][name] for name in Regime._fields[:-2]]
    return Constants(**values), Regime(*fitted, *entry["range"])


@lru_cache(maxsize=1)
def _table() -> Any:
    with open(os.path.join(os.path.dirname(__file__), "constants.json"), encoding="utf-8") as file:
        return json.load(file)
