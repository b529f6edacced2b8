"""Constants that cannot be derived: an engine's overheads relative to the device's peak, and its fixed costs.

The values are in constants.json, which benchmarks/fit/throughput.py writes from published measurements. Its
`provenance`, and `fitted` and `error` of each engine, give the source rows, the method and the accuracy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvcalc.records import NamedTuple
from kvcalc.releases import split_engine
from kvcalc.throughput.steps import step_of

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Gpu


class Constants(NamedTuple):
    """The constants of one engine. An `overhead` is a factor of at least 1 on the ideal time. `seconds` are added.

    - weight_overhead, compute_overhead: reading a matrix and multiplying with it, by its stored type (`weight_class`).
      `nvfp4 experts` is for reading experts of that type, whose kernels are others than those of dense layers.
    - expert_overhead, expert_compute_overhead: additional factors for experts.
    - token_overlap: the tokens of a batch choose similar experts, so this many count as one that chooses at random.
    - kv_overhead, attention_compute_overhead: reading the cache, and computing the scores.
    - device_overhead: an additional factor on all of the above, for devices whose kernels reach less of the peak.
    - roof_power: the power p in (a^p + b^p)^(1/p), the time of reading (a) and multiplying (b) together. 1 means no
      overlap; a large value means full overlap.
    - kernel_seconds: a small kernel, for each of `Counts.launches`. step_seconds, sequence_seconds: host time per step,
      and per sequence in a step. busy_sequence_seconds: host time for each sequence beyond BUSY_SEQUENCES.
    - head_seconds: the attention of one sequence and one KV head in a layer, besides reading.
    - kv_token_seconds: per layer and cached token of the longest sequence.
    - activation_passes: how often a layer reads or writes a token's hidden state in memory. expert_passes: the same for
      the activations that the products of its experts read and write, and those inside its dense products.
    - all_reduce_seconds, all_reduce_device_seconds: an all-reduce without its bytes between two devices, and for each
      further device. link_overhead: transferring its bytes. pcie_*: the same for devices without a fast link, where
      pcie_overhead_per_device is added to the overhead for each device after two. prompt_link_*: transferring those of
      prompts, which are many, over a fast link. What is added for each device up to the eighth may be negative.
    - stage_seconds: passing data from one pipeline stage to the next.
    - prefill_overhead, prefill_expert_overhead: additional factors on multiplying for a prompt.
      prefill_attention_overhead: computing its scores.
    - ttft_seconds: the host's time for a request before and after the prefill. ttft_token_seconds: for each token of
      its prompt. ttft_steps: decode steps that a request waits in the server's pipeline, besides those of the
      scheduler.
    - prompt_launch_seconds: the host's time to launch a small kernel of a step that computes prompts, which is not in a
      CUDA graph. A prompt that the device computes sooner waits for it.
    - decode_launch_seconds: the same for a step that only decodes. It is 0 unless that is not in a CUDA graph either.
    - first_seconds: how much longer the first step of a benchmark takes, whose clients all start together.
      cold_seconds: the same on a server that has just started.
    """

    weight_overhead: Mapping[str, float]
    compute_overhead: Mapping[str, float]
    expert_overhead: float
    expert_compute_overhead: float
    token_overlap: float
    kv_overhead: float
    attention_compute_overhead: float
    device_overhead: float
    roof_power: float
    kernel_seconds: float
    step_seconds: float
    sequence_seconds: float
    busy_sequence_seconds: float
    head_seconds: float
    kv_token_seconds: float
    activation_passes: float
    expert_passes: float
    all_reduce_seconds: float
    all_reduce_device_seconds: float
    link_overhead: float
    prompt_link_overhead: float
    prompt_link_overhead_per_device: float
    pcie_all_reduce_seconds: float
    pcie_all_reduce_device_seconds: float
    pcie_overhead: float
    pcie_overhead_per_device: float
    stage_seconds: float
    prefill_overhead: float
    prefill_expert_overhead: float
    prefill_attention_overhead: float
    ttft_seconds: float
    ttft_steps: float
    ttft_token_seconds: float
    prompt_launch_seconds: float
    first_seconds: float
    cold_seconds: float
    decode_launch_seconds: float = 0.0


class Regime(NamedTuple):
    """The cases in which an engine's constants were fitted, and the ranges of the error on rows left out of the fit.

    `ranges` and `ttft_ranges` map a region to the 10th and 90th percentiles of measured / predicted, with the whole
    model family left out of the fit. A region groups similar questions (`regions`); the empty region is the whole
    engine. `checked_device_kinds` are those whose kernels or servers were measured, but not enough for the fit.
    `older_than` is the oldest release with constants if the release asked for is older. `evidence` is what the
    constants were fitted to: `rows`, `sources`, and the `error` in and out of the fit.
    """

    device_kinds: Sequence[str]
    checked_device_kinds: Sequence[str]
    weight_classes: Sequence[str]
    largest_batch: int
    largest_tensor_parallel_size: int
    has_experts: bool
    ranges: Mapping[str, Sequence[float]]
    ttft_ranges: Mapping[str, Sequence[float]]
    older_than: str | None = None
    evidence: Mapping[str, Any] = MappingProxyType({})


# From this number of clients on, a server's host time per sequence grows.
BUSY_SEQUENCES = 500


def regions(kind: str, weights: str, batch: float) -> list[str]:
    """The regions of a question, from the narrowest to the whole engine: device kind, weight class, size of batch."""
    return [f"{kind} {weights} {batch_region(batch)}", f"{kind} {weights}", kind, ""]


def batch_region(batch: float) -> str:
    """The region of a batch: few sequences, where launches count, and many, where multiplying counts."""
    return "1-8" if batch <= 8 else "9-64" if batch <= 64 else "65+"


# Stored types, mapped to the type whose kernels read and multiply them. Block formats map to the type of their width.
_WEIGHT_CLASSES = {
    "fp32": "fp32", "fp16": "bf16", "bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4",
    "int8": "int8", "q8_0": "int8", "q6_k": "int4", "int2": "int4", "int3": "int4",
}  # fmt: skip


def weight_class(dtype: str) -> str:
    """The type whose kernels read weights stored as `dtype`: fp32, bf16, fp8, nvfp4, mxfp4, int8 or int4."""
    if dtype.startswith("mlx-"):
        # MLX's kernels unpack every type of up to 6 bits in the same way (affine_qmv, quantized.h).
        return "int8" if dtype.startswith(("mlx-8bit", "mlx-mxfp8")) else "int4"
    dtype = dtype.removeprefix("gguf-")
    return _WEIGHT_CLASSES.get(dtype, "int4" if dtype[:2] in ("q4", "q5", "iq", "in") else "bf16")


def device_kind(gpu: Gpu) -> str:
    """The kind of device, which selects constants: the device's class, split into HBM and GDDR if it has both."""
    kind = gpu.device_class or "unknown"
    if kind == "ampere" and (gpu.memory_type or "").startswith("HBM"):
        return "ampere-hbm"
    return kind


def constants_kind(gpu: Gpu) -> str:
    """The kind of device with `-half` added if its tensor units accumulate 16-bit products in 32 bits at half rate.

    GeForce cards do. They reach that rate, and the full-rate cards of the same architecture are limited by power first.
    So they have other constants. Their rate is twice that of the other units, and not four times (vendors' figures).
    """
    kind, flops = device_kind(gpu), gpu.flops_per_second
    is_half = kind in HALVED and flops.get("bf16", 0) < _LEAST_FULL_RATE * flops.get("fp32", 0)
    return f"{kind}-half" if is_half else kind


HALVED = ("ampere", "ada", "blackwell-rtx")
_LEAST_FULL_RATE = 3


def has_constants(engine: str) -> bool:
    """Whether the speed of an engine is known."""
    return split_engine(engine)[0] in _table()["engines"]


def load_constants(engine: str, gpu: Gpu) -> tuple[Constants, Regime]:
    """The constants of an engine on a device, and their regime.

    `engine` must have constants and may end in a release: `vllm@0.12`. Without one, the newest release counts.
    Raises UsageError (exit 2) for something that is not a release.
    """
    name, release = split_engine(engine)
    entry, older_than = step_of(name, _table()["engines"][name], release.release if release else None)
    by_kind = entry.get("by_device_kind", {})
    values = {**entry["constants"], **by_kind.get(constants_kind(gpu), by_kind.get(device_kind(gpu), {}))}
    fitted = {name: entry["fitted"][name] for name in Regime._fields[:-4]}
    evidence = {"rows": entry["fitted"]["rows"], "sources": entry["fitted"]["sources"], "error": entry.get("error")}
    ranges, first = entry["ranges"], entry["ttft_ranges"]
    regime = Regime(**fitted, ranges=ranges, ttft_ranges=first, older_than=older_than, evidence=evidence)
    return Constants(**values), regime


def described_source(name: str) -> str:
    """What a source of fitted rows is."""
    return str(_table()["provenance"]["sources"].get(name, name))


@lru_cache(maxsize=1)
def _table() -> Any:
    with open(os.path.join(os.path.dirname(__file__), "constants.json"), encoding="utf-8") as file:
        return json.load(file)
