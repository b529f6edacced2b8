"""The time of one decode step and one prefill: bytes / bandwidth, operations / FLOP/s, launches and links.

The time of a step is the sum of
    matrices     (read, multiply)        dense layers, the output head, the distinct experts touched
    attention    (read cache, scores)
    all-reduces  two per layer: latency, and bytes over the link
    launches     per kernel, per step, per sequence
A pair (a, b) overlaps as (a^p + b^p)^(1/p). Every overhead is a factor of at least 1, so no result is faster than the
ideal roofline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvcalc.throughput.constants import BUSY_SEQUENCES, Constants

if TYPE_CHECKING:
    from kvcalc.throughput.counts import Counts, Matrices
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


class MatrixTimes(NamedTuple):
    """Matrices of one weight class: the ideal seconds to read them, and to multiply one token with them."""

    kind: str
    read: float
    multiply: float


class ExpertTimes(NamedTuple):
    """Experts, and the times of one expert in all layers."""

    experts: float
    read: float
    matrices: tuple[MatrixTimes, ...]


class Times(NamedTuple):
    """The ideal times of a model on a layout of devices, and its counts. `costs_of` applies an engine's constants.

    The fit uses it with arrays instead of numbers. `one_pass` is the time to read or write the hidden state of a token
    in all layers once, `transfer` the time to send what all all-reduces of a token send over the link. `is_linked` is 1
    if the devices have a fast link, else 0.
    """

    dense: tuple[MatrixTimes, ...]
    head: tuple[MatrixTimes, ...]
    experts: tuple[ExpertTimes, ...]
    num_layers: float
    attention_layers: float
    launches: float
    kv_heads: float
    one_pass: float
    transfer: float
    is_linked: float
    devices: float
    stages: float


Pair = tuple[float, float]
"""The times to read and to multiply, which overlap."""


class Costs(NamedTuple):
    """The times of a model with an engine's constants. `step_parts` and `prompt_parts` only add and multiply them.

    - matrices: the pairs of the dense layers and the head, for one token. experts: `ExpertTimes` of each kind as
      (experts, read, pair of one expert).
    - kv, scores: factors on the ideal times of attention, and prompt_scores on those of a prompt.
    - launch, sequence, busy_sequence, context: seconds per step, per sequence, per sequence beyond BUSY_SEQUENCES, and
      per token of the longest context.
    - latency, transfer: seconds of communication per step, and per token.
    - prompt, moved: seconds to multiply a token of a prompt, and to read and write its hidden states.
    """

    matrices: tuple[Pair, ...]
    experts: tuple[tuple[float, float, Pair], ...]
    kv: float
    scores: float
    prompt_scores: float
    launch: float
    sequence: float
    busy_sequence: float
    context: float
    latency: float
    transfer: float
    prompt: float
    moved: float


def costs_of(t: Times, c: Constants) -> Costs:
    """The costs of a model. Nothing branches on a value, so that everything may be an array."""
    device = c.device_overhead

    def pair(matrices: tuple[MatrixTimes, ...]) -> Pair:
        return (
            sum(m.read * overhead_of(c.weight_overhead, m.kind) for m in matrices) * device,
            sum(m.multiply * overhead_of(c.compute_overhead, m.kind) for m in matrices) * device,
        )

    dense, experts, prompt = pair(t.dense), [], 0.0
    for e in t.experts:
        read, multiply = pair(e.matrices)
        experts.append((e.experts, e.read, (read * c.expert_overhead, multiply * c.expert_compute_overhead)))
        prompt = prompt + multiply * e.read * c.prefill_expert_overhead
    moved = t.one_pass * c.activation_passes
    return Costs(
        matrices=(dense, pair(t.head)),
        experts=tuple(experts),
        kv=c.kv_overhead * device,
        scores=c.attention_compute_overhead * device,
        prompt_scores=c.prefill_attention_overhead * device,
        launch=t.launches * c.kernel_seconds + c.step_seconds + (t.stages - 1) * c.stage_seconds,
        sequence=c.sequence_seconds + moved + t.kv_heads * c.head_seconds,
        busy_sequence=c.busy_sequence_seconds,
        context=t.attention_layers * c.kv_token_seconds,
        latency=_latency(t, c),
        transfer=t.transfer * (t.is_linked * c.link_overhead + (1 - t.is_linked) * c.pcie_overhead),
        prompt=(dense[1] + prompt) * c.prefill_overhead,
        moved=moved,
    )


def _latency(t: Times, c: Constants) -> float:
    """The seconds of all all-reduces of a step without their bytes: two in each layer."""
    linked = c.all_reduce_seconds + c.all_reduce_device_seconds * (t.devices - 2)
    pcie = c.pcie_all_reduce_seconds + c.pcie_all_reduce_device_seconds * (t.devices - 2)
    return 2 * t.num_layers * (t.devices > 1) * (t.is_linked * linked + (1 - t.is_linked) * pcie)


def overhead_of(overheads: Mapping[str, float], kind: str) -> float:
    """The overhead of a weight class, or that of 16 bits if the class has none."""
    return overheads[kind] if kind in overheads else overheads["bf16"]


def step_parts(
    costs: Costs, batch: float, kv_read: float, scores: float, context_tokens: float
) -> tuple[list[Pair], float, float]:
    """The parts of a decode step: its pairs (the last one is attention), its launches, and its communication.

    `batch` is the number of sequences in one pipeline stage. `kv_read` and `scores` are the ideal times of attention
    for one sequence. Nothing branches on a value, so that everything may be an array.
    """
    pairs = [(read, multiply * batch) for read, multiply in costs.matrices]
    for experts, read, (reading, multiply) in costs.experts:
        touched = experts * (1.0 - (1.0 - read / experts) ** batch)
        pairs.append((reading * touched, multiply * read * batch))
    pairs.append((batch * kv_read * costs.kv, batch * scores * costs.scores))
    overhead = (
        costs.launch + batch * costs.sequence + context_tokens * costs.context
        + (batch > BUSY_SEQUENCES) * (batch - BUSY_SEQUENCES) * costs.busy_sequence
    )  # fmt: skip
    return pairs, overhead, costs.latency + batch * costs.transfer


def prompt_parts(costs: Costs, tokens: float, scores: float) -> tuple[float, float, float]:
    """A prompt's multiplying, its passes over the hidden states, and its communication. `scores` is their ideal time.

    Nothing branches on a value, so that everything may be an array.
    """
    return tokens * costs.prompt + scores * costs.prompt_scores, tokens * costs.moved, tokens * costs.transfer


def together(read: float, multiply: float, power: float) -> float:
    """The time of reading and multiplying, which overlap."""
    found: float = (read**power + multiply**power) ** (1 / power)
    return found


def times_of(counts: Counts, gpu: Gpu) -> Times:
    """The ideal times of `counts` on devices `gpu`."""
    size, bandwidth = counts.layout.tensor_parallel_size, float(gpu.bandwidth_bytes_per_second)

    def timed(matrices: tuple[Matrices, ...]) -> tuple[MatrixTimes, ...]:
        return tuple(
            MatrixTimes(m.kind, m.bytes / bandwidth, 2 * m.elements / matrix_flops(gpu, m.kind)) for m in matrices
        )

    token_bytes = counts.num_layers * counts.hidden_size * _ACTIVATION_BYTES
    link = link_bytes_per_second(gpu, counts.layout.devices)
    return Times(
        timed(counts.dense),
        timed(counts.head),
        tuple(ExpertTimes(row.experts, row.read, timed(row.matrices)) for row in counts.experts),
        counts.num_layers,
        counts.attention_layers,
        counts.launches,
        counts.kv_heads,
        token_bytes / bandwidth,
        # Two all-reduces per layer. A ring transfers each byte twice, except one device's share.
        2 * token_bytes * 2 * (size - 1) / size / link,
        float(gpu.interconnect is not None),
        size,
        counts.layout.pipeline_parallel_size,
    )


class SpeedModel:
    """The speed of a model on a layout of devices with an engine. After construction, `decode` is only arithmetic.

    Batch and context are those of the whole replica. With pipeline stages, each stage holds batch / stages sequences at
    a time.
    """

    def __init__(self, counts: Counts, gpu: Gpu, constants: Constants) -> None:
        self.counts, self.gpu, self.constants, self.layout = counts, gpu, constants, counts.layout
        self.bandwidth = float(gpu.bandwidth_bytes_per_second)
        self.attention_flops = matrix_flops(gpu, "bf16")
        self.times = times_of(counts, gpu)
        self.costs = costs_of(self.times, constants)

    def decode(self, batch: float, context_tokens: float) -> Step:
        """One decode step of `batch` sequences with `context_tokens` tokens in the cache. Each gets one new token."""
        counts, power = self.counts, self.constants.roof_power
        batch = max(1.0, batch / self.layout.pipeline_parallel_size)
        pairs, overhead, communication = step_parts(
            self.costs, batch, counts.kv_read_bytes(context_tokens) / self.bandwidth,
            counts.attention_flops(context_tokens) / self.attention_flops, context_tokens,
        )  # fmt: skip
        weights = compute = 0.0
        for read, multiply in pairs[:-1]:
            a, b = _overlap(read, multiply, power)
            weights += a
            compute += b
        kv, scores = _overlap(*pairs[-1], power)
        compute += scores
        seconds = weights + kv + compute + overhead + communication
        return Step(seconds, weights, kv, compute, overhead, communication)

    def roofline(self, batch: float, context_tokens: float) -> float:
        """The ideal seconds of the same step: all bytes at full bandwidth, or all operations at full speed."""
        counts, t = self.counts, self.times
        batch = max(1.0, batch / self.layout.pipeline_parallel_size)
        read = batch * counts.kv_read_bytes(context_tokens) / self.bandwidth
        multiply = batch * counts.attention_flops(context_tokens) / self.attention_flops
        for m in (*t.dense, *t.head):
            read += m.read
            multiply += batch * m.multiply
        for experts, row in zip(t.experts, counts.experts):
            for m in experts.matrices:
                read += row.touched(batch) * m.read
                multiply += batch * row.read * m.multiply
        return max(read, multiply)

    def prefill_work(self, tokens: float) -> Step:
        """The time a prompt of `tokens` tokens adds to steps that run anyway: no reading of weights, no launches."""
        stages = self.layout.pipeline_parallel_size
        scores = self.counts.prefill_attention_flops(tokens) / self.attention_flops
        compute, overhead, communication = (part / stages for part in prompt_parts(self.costs, tokens, scores))
        return Step(compute + overhead + communication, 0.0, 0.0, compute, overhead, communication)

    def prefill(self, tokens: float, batch: int = 1) -> Step:
        """The time of `batch` prompts of `tokens` tokens until their first tokens. Nothing is cached before.

        No other request runs at the same time.
        """
        costs, c = self.costs, self.constants
        scores = self.counts.prefill_attention_flops(tokens) / self.attention_flops
        work, moved, communication = prompt_parts(costs, tokens, scores)
        pairs, _, _ = step_parts(costs, tokens * batch, 0.0, 0.0, 0.0)
        weights, compute = _overlap(sum(read for read, _ in pairs), batch * work, c.roof_power)
        overhead = costs.launch + batch * (c.sequence_seconds + moved)
        communication = costs.latency + batch * communication
        return Step(weights + compute + overhead + communication, weights, 0.0, compute, overhead, communication)


def _overlap(read: float, multiply: float, power: float) -> tuple[float, float]:
    """The time of both together, split into the longer one and the time that the shorter one adds."""
    if not read or not multiply:
        return read, multiply
    both = together(read, multiply, power)
    return (read, both - read) if read >= multiply else (both - multiply, multiply)


def matrix_flops(gpu: Gpu, kind: str) -> float:
    """Dense FLOP/s of matrices of a weight class, in their own type if the device can multiply it.

    Other types are widened when they are read: 8- and 4-bit floats on older devices, and integers, whose activations
    stay in 16 bits.
    """
    wanted = {"fp8": ("fp8",), "nvfp4": ("fp4",), "mxfp4": ("fp4",), "fp32": ("tf32", "fp32")}.get(kind, ())
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
