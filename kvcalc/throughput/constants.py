"""Constants that cannot be derived: an engine's overheads relative to the device's peak, and its fixed costs.

The values are in constants.json, which benchmarks/fit_throughput.py writes from published measurements. Its
`provenance`, and `fitted` and `error` of each engine, give the source rows, the method and the accuracy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcalc.memory.engines.release import split_engine
from kvcalc.throughput.steps import step_of

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Gpu


class Constants(NamedTuple):
    """The constants of one engine. An `overhead` is a factor of at least 1 on the ideal time. `seconds` are added.

    - weight_overhead: reading a matrix, by its stored type (`weight_class`). expert_overhead: reading an expert.
    - kv_overhead: reading the cache. kv_token_seconds: per layer and cached token of the longest sequence.
    - compute_overhead: multiplying in a decode step. expert_compute_overhead: an additional factor for experts.
      attention_compute_overhead: computing the scores.
    - roof_power: the power p in (a^p + b^p)^(1/p), the time of reading (a) and multiplying (b) together. 1 means no
      overlap; a large value means full overlap.
    - layer_seconds, moe_layer_seconds, expert_seconds, step_seconds, sequence_seconds: launches and host time per
      layer, per layer with experts, per expert touched on a device, per step, and per sequence in a step.
    - activation_passes: how often a layer reads or writes a token's hidden state in memory.
    - all_reduce_seconds: an all-reduce without its bytes, multiplied by devices^all_reduce_power. link_overhead:
      transferring the bytes of an all-reduce.
    - stage_seconds: passing data from one pipeline stage to the next.
    - prefill_overhead, prefill_expert_overhead, prefill_attention_overhead: like the overheads above, for a prompt.
    - prefill_interference: the share of the other requests' prefills that a running request waits for. It is 1 if every
      step mixes prefill and decode. It is less if prompts go first and requests wait before their first token instead.
    - ttft_seconds, ttft_steps, ttft_queue: added to a single prefill for the time to first token: seconds, a number of
      decode steps, and a number of prefills per other request.
    - max_sequences: the engine's default limit of running sequences.
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
    """The range of cases in which an engine's constants were fitted, and the error on rows left out of the fit.

    `low` and `high` are the 10th and 90th percentiles of measured / predicted. They come from leaving out a model
    family or a device, whichever gives the wider range. `older_than` is the oldest release with constants if the
    release asked for is older.
    """

    device_kinds: Sequence[str]
    weight_classes: Sequence[str]
    largest_batch: int
    largest_tensor_parallel_size: int
    has_experts: bool
    low: float
    high: float
    older_than: str | None = None


# Stored types, mapped to the type whose kernels read and multiply them. Block formats map to the type of their width.
_WEIGHT_CLASSES = {
    "fp32": "bf16", "fp16": "bf16", "bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "nvfp4",
    "int8": "int8", "q8_0": "int8", "q6_k": "int4", "int2": "int4", "int3": "int4",
}  # fmt: skip


def weight_class(dtype: str) -> str:
    """The type whose kernels read weights stored as `dtype`: `bf16`, `fp8`, `nvfp4`, `int8` or `int4`."""
    if dtype.startswith("mlx-"):
        # MLX's kernels unpack every type of up to 6 bits in the same way (affine_qmv, quantized.h).
        return "int8" if dtype.startswith(("mlx-8bit", "mlx-mxfp8")) else "int4"
    return _WEIGHT_CLASSES.get(dtype, "int4" if dtype[:2] in ("q4", "q5", "iq", "in") else "bf16")


def device_kind(gpu: Gpu) -> str:
    """The kind of device, which selects constants: the device's class, split into HBM and GDDR if it has both."""
    kind = gpu.device_class or "unknown"
    if kind == "ampere" and (gpu.memory_type or "").startswith("HBM"):
        return "ampere-hbm"
    return kind


def load_constants(engine: str, gpu: Gpu) -> tuple[Constants, Regime]:
    """The constants of an engine on a device, and their regime.

    `engine` must be a known engine and may end in a release: `vllm@0.12`. Without one, the newest release counts.
    Raises UsageError (exit 2) for something that is not a release.
    """
    name, asked = split_engine(engine)
    entry, older_than = step_of(name, _table()["engines"][name], asked.release if asked else None)
    kind = device_kind(gpu)
    values = {**entry["constants"], **entry.get("by_device_kind", {}).get(kind, {})}
    fitted = [entry["fitted"][name] for name in Regime._fields[:-3]]
    return Constants(**values), Regime(*fitted, *entry["range"])._replace(older_than=older_than)


@lru_cache(maxsize=1)
def _table() -> Any:
    with open(os.path.join(os.path.dirname(__file__), "constants.json"), encoding="utf-8") as file:
        return json.load(file)
