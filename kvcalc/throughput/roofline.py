"""The time of one decode step and one prefill: bytes / bandwidth, operations / FLOP/s, launches and links.

The time of a step is the sum of
    matrices     (read, multiply)        dense layers, the output head, the distinct experts touched
    attention    (read cache, scores)
    all-reduces  two per layer: latency, and bytes over the link
    launches     per layer, per step, per sequence
A pair (a, b) overlaps as (a^p + b^p)^(1/p). Every overhead is a factor of at least 1, so no result is faster than the
ideal roofline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcalc.throughput.constants import Constants, weight_class

if TYPE_CHECKING:
    from kvcalc.throughput.counts import Counts
    from kvcalc.throughput.hardware import Gpu

_ACTIVATION_BYTES = 2  # hidden states are transferred in 16 bits
# For more devices than one fast link connects: one 400 Gbit/s network port per device, as is common in such machines.
_NETWORK_BYTES_PER_SECOND = 50e9
# PCIe 4.0 x16 in one direction, used if the device's own rate is not known.
_PCIE_BYTES_PER_SECOND = 32e9


class Step(NamedTuple):
    """The seconds of one step, and its parts, which add up to `seconds`."""

    seconds: float
    weights: float
    kv: float
    compute: float
    overhead: float
    communication: float

    @property
    def bound_by(self) -> str:
        """The largest part."""
        parts = zip(("weights", "kv", "compute", "overhead", "communication"), self[1:])
        return max(parts, key=lambda part: part[1])[0]


class SpeedModel:
    """The speed of a model on a layout of devices with an engine. After construction, `decode` is only arithmetic.

    `weight_dtype` is the name of the stored type of the weights. Batch and context are those of the whole replica. With
    pipeline stages, each stage holds batch / stages sequences at a time.
    """

    has_host_part = False  # whether the host computes a part of the model (kvcalc.throughput.host)

    def __init__(self, counts: Counts, gpu: Gpu, weight_dtype: str, constants: Constants) -> None:
        layout = counts.layout
        size = layout.tensor_parallel_size
        c = constants
        self.counts, self.gpu, self.constants, self.layout = counts, gpu, c, layout
        self.bandwidth = float(gpu.bandwidth_bytes_per_second)
        self.flops = matrix_flops(gpu, weight_dtype)
        self.attention_flops = matrix_flops(gpu, "bf16")
        kind = weight_class(weight_dtype)
        overhead = c.weight_overhead.get(kind, c.weight_overhead["bf16"])
        head_overhead = overhead if kind.startswith("int") else c.weight_overhead["bf16"]
        self.link = link_bytes_per_second(gpu, layout.devices)
        # The seconds of a step that do not depend on the batch, and the seconds per sequence.
        self._dense_read = counts.dense_bytes / self.bandwidth
        self._head_read = counts.head_bytes / self.bandwidth
        self._dense_overhead, self._head_overhead = overhead, head_overhead
        self._dense_multiply = 2 * counts.dense_elements / self.flops
        self._head_multiply = 2 * counts.head_elements / self.attention_flops
        self._expert_multiply = 2 * counts.expert_elements_per_token() / self.flops
        self._launch = (
            counts.num_layers * c.layer_seconds + counts.moe_layers * c.moe_layer_seconds + c.step_seconds
            + (layout.pipeline_parallel_size - 1) * c.stage_seconds
        )  # fmt: skip
        token_bytes = counts.num_layers * counts.hidden_size * _ACTIVATION_BYTES
        self._pass = token_bytes * c.activation_passes / self.bandwidth
        # A ring transfers each byte twice, except one device's share.
        self._reduce = 2 * token_bytes * 2 * (size - 1) / size / self.link
        self._latency = 2 * counts.num_layers * c.all_reduce_seconds * size**c.all_reduce_power if size > 1 else 0.0

    def decode(self, batch: float, context_tokens: float) -> Step:
        """One decode step of `batch` sequences with `context_tokens` tokens in the cache. Each gets one new token."""
        counts, c = self.counts, self.constants
        batch = max(1.0, batch / self.layout.pipeline_parallel_size)
        weights = compute = 0.0
        for read, multiply in (
            (self._dense_read * self._dense_overhead, batch * self._dense_multiply * c.compute_overhead),
            (self._head_read * self._head_overhead, batch * self._head_multiply * c.compute_overhead),
            (
                counts.expert_bytes(batch) / self.bandwidth * c.expert_overhead,
                batch * self._expert_multiply * c.compute_overhead * c.expert_compute_overhead,
            ),
        ):
            a, b = _overlap(read, multiply, c.roof_power)
            weights += a
            compute += b
        kv, scores = _overlap(
            batch * counts.kv_read_bytes(context_tokens) / self.bandwidth * c.kv_overhead,
            batch * counts.attention_flops(context_tokens) / self.attention_flops * c.attention_compute_overhead,
            c.roof_power,
        )
        overhead = (
            self._launch
            + batch * (c.sequence_seconds + self._pass)
            + counts.attention_layers * context_tokens * c.kv_token_seconds
        )
        for row in counts.experts:
            touched = row.touched(batch) / self.layout.expert_parallel_size
            overhead += counts.moe_layers * touched * c.expert_seconds
        communication = self._latency + batch * self._reduce * c.link_overhead
        compute += scores
        seconds = weights + kv + compute + overhead + communication
        return Step(seconds, weights, kv, compute, overhead, communication)

    def roofline(self, batch: float, context_tokens: float) -> float:
        """The ideal seconds of the same step: all bytes at full bandwidth, or all operations at full speed."""
        counts = self.counts
        batch = max(1.0, batch / self.layout.pipeline_parallel_size)
        read = (
            self._dense_read
            + self._head_read
            + (counts.expert_bytes(batch) + batch * counts.kv_read_bytes(context_tokens)) / self.bandwidth
        )
        multiply = batch * (self._dense_multiply + self._head_multiply + self._expert_multiply)
        multiply += batch * counts.attention_flops(context_tokens) / self.attention_flops
        return max(read, multiply)

    def prefill_work(self, tokens: float) -> Step:
        """The time a prompt of `tokens` tokens adds to steps that run anyway: no reading of weights, no launches."""
        counts, c = self.counts, self.constants
        compute = (
            c.prefill_overhead * tokens * (self._dense_multiply + c.prefill_expert_overhead * self._expert_multiply)
        )
        compute += counts.prefill_attention_flops(tokens) / self.attention_flops * c.prefill_attention_overhead
        communication = tokens * self._reduce * c.link_overhead
        overhead = tokens * self._pass
        stages = self.layout.pipeline_parallel_size
        parts = (0.0, 0.0, compute / stages, overhead / stages, communication / stages)
        return Step(sum(parts), *parts)

    def prefill(self, tokens: float, batch: int = 1) -> Step:
        """The time of `batch` prompts of `tokens` tokens until their first tokens. Nothing is cached before.

        No other request runs at the same time.
        """
        counts, c, stages = self.counts, self.constants, self.layout.pipeline_parallel_size
        work = self.prefill_work(tokens)
        read = (self._dense_read + self._head_read) * self._dense_overhead
        read += counts.expert_bytes(tokens * batch) / self.bandwidth * c.expert_overhead
        weights, compute = _overlap(read, batch * work.compute * stages, c.roof_power)
        parts = (
            weights,
            0.0,
            compute,
            self._launch + batch * (c.sequence_seconds + work.overhead * stages),
            self._latency + batch * work.communication * stages,
        )
        return Step(sum(parts), *parts)


def _overlap(read: float, multiply: float, power: float) -> tuple[float, float]:
    """The time of both together, split into the longer one and the time that the shorter one adds."""
    if not read or not multiply:
        return read, multiply
    together: float = (read**power + multiply**power) ** (1 / power)
    return (read, together - read) if read >= multiply else (together - multiply, multiply)


def matrix_flops(gpu: Gpu, weight_dtype: str) -> float:
    """Dense FLOP/s of matrices stored as `weight_dtype`, in their own type if the device can multiply it.

    Other types are widened when they are read: 8- and 4-bit floats on older devices, and integers, whose activations
    stay in 16 bits.
    """
    kind = weight_class(weight_dtype)
    wanted = {"fp8": ("fp8",), "nvfp4": ("fp4",)}.get(kind, ()) if weight_dtype != "fp32" else ("tf32", "fp32")
    for name in (*wanted, "bf16", "fp16", "fp32"):
        found = gpu.flops_per_second.get(name)
        if found:
            return float(found)
    raise ValueError(f"{gpu.name}: no FLOP/s known")


def link_bytes_per_second(gpu: Gpu, devices: int) -> float:
    """Bytes per second that one device sends to its peers.

    They go over its fast link, or over the network if there are more devices than the link connects.
    """
    if gpu.interconnect is None:
        return float(gpu.pcie_bytes_per_second or _PCIE_BYTES_PER_SECOND)
    if devices > gpu.interconnect.devices:
        return min(_NETWORK_BYTES_PER_SECOND, float(gpu.interconnect.bytes_per_second))
    return float(gpu.interconnect.bytes_per_second)
