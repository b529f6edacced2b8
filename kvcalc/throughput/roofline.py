"""The time of one decode step and one prefill: bytes / bandwidth, operations / FLOP/s, launches and links.

The time of a step is the sum of
    matrices     (read, multiply)        dense layers, the output head, the distinct experts touched
    attention    (read cache, scores)
    all-reduces  two per layer: latency, and bytes over the link; all-to-alls if there are attention replicas
    launches     per kernel, per step, per sequence
A pair (a, b) overlaps as (a^p + b^p)^(1/p). Every overhead is a factor of at least 1, so no result is faster than the
ideal roofline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

from kvcalc.records import NamedTuple
from kvcalc.throughput.constants import BUSY_SEQUENCES, Constants
from kvcalc.throughput.counts import distinct_experts
from kvcalc.throughput.expert_parallel import ExpertExchange

if TYPE_CHECKING:
    from kvcalc.throughput.counts import Counts, HostPart, Matrices
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
    if the devices have a fast link, else 0. `devices` are those of one attention replica and stage, which all-reduce.
    """

    dense: tuple[MatrixTimes, ...]
    head: tuple[MatrixTimes, ...]
    experts: tuple[ExpertTimes, ...]
    all_reduces: float
    attention_layers: float
    launches: float
    kv_heads: float
    one_pass: float
    transfer: float
    is_linked: float
    devices: float
    stages: float


Pair = tuple[float, float]
"""The times to read and to multiply, which overlap; or the bytes and the operations."""


class Costs(NamedTuple):
    """The times of a model with an engine's constants. `step_parts` and `prompt_parts` only add and multiply them.

    - matrices: the pairs of the dense layers and the head, for one token. experts: `ExpertTimes` of each kind as
      (experts, read, pair of one expert).
    - kv, scores: factors on the ideal times of attention, and prompt_scores on those of a prompt.
    - launch, sequence, busy_sequence, context: seconds per step, per sequence, per sequence beyond BUSY_SEQUENCES, and
      per token of the longest context.
    - latency, transfer: seconds of communication per step, and per token.
    - prompt, prompt_experts, moved: seconds to multiply a token of a prompt with the dense layers and with its experts,
      and to read and write its hidden states.
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
    prompt_experts: float
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
        prompt=dense[1] * c.prefill_overhead,
        prompt_experts=prompt * c.prefill_overhead,
        moved=moved,
    )


def _latency(t: Times, c: Constants) -> float:
    """The seconds of all all-reduces of a step without their bytes."""
    linked = c.all_reduce_seconds + c.all_reduce_device_seconds * (t.devices - 2)
    pcie = c.pcie_all_reduce_seconds + c.pcie_all_reduce_device_seconds * (t.devices - 2)
    return t.all_reduces * (t.devices > 1) * (t.is_linked * linked + (1 - t.is_linked) * pcie)


def overhead_of(overheads: Mapping[str, float], kind: str) -> float:
    """The overhead of a weight class, or that of 16 bits if the class has none."""
    return overheads[kind] if kind in overheads else overheads["bf16"]


def step_parts(
    costs: Costs, batch: float, kv_read: float, scores: float, context_tokens: float, expert_batch: float,
    query_tokens: float = 1,
) -> tuple[list[Pair], float, float]:  # fmt: skip
    """The parts of a decode step: its pairs (the last one is attention), its launches, and its communication.

    `batch` is the number of sequences in one pipeline stage of an attention replica, and `expert_batch` in that stage
    of all attention replicas. `kv_read` and `scores` are the ideal times of attention for one sequence and one token of
    it. Each sequence computes `query_tokens` tokens, which read the weights and the cache once, share one block of the
    attention kernel per KV head, and are scheduled together. Nothing branches on a value, so that everything may be an
    array.
    """
    tokens = batch * query_tokens
    pairs = [(read, multiply * tokens) for read, multiply in costs.matrices]
    for experts, read, (reading, multiply) in costs.experts:
        touched = distinct_experts(experts, read, expert_batch * query_tokens)
        pairs.append((reading * touched, multiply * read * expert_batch * query_tokens))
    pairs.append((batch * kv_read * costs.kv, tokens * scores * costs.scores))
    overhead = (
        costs.launch + batch * (costs.sequence + (query_tokens - 1) * costs.moved) + context_tokens * costs.context
        + (batch > BUSY_SEQUENCES) * (batch - BUSY_SEQUENCES) * costs.busy_sequence
    )  # fmt: skip
    return pairs, overhead, costs.latency + tokens * costs.transfer


def prompt_parts(costs: Costs, tokens: float, scores: float, expert_tokens: float) -> tuple[float, float, float]:
    """A prompt's multiplying, its passes over the hidden states, and its communication. `scores` is their ideal time.

    `tokens` are those of one attention replica, and `expert_tokens` those of all. Nothing branches on a value, so that
    everything may be an array.
    """
    multiply = tokens * costs.prompt + expert_tokens * costs.prompt_experts + scores * costs.prompt_scores
    return multiply, tokens * costs.moved, tokens * costs.transfer


def together(read: float, multiply: float, power: float) -> float:
    """The time of reading and multiplying, which overlap."""
    found: float = (read**power + multiply**power) ** (1 / power)
    return found


def times_of(counts: Counts, gpu: Gpu) -> Times:
    """The ideal times of `counts` on devices `gpu`."""
    layout, bandwidth = counts.layout, float(gpu.bandwidth_bytes_per_second)
    size = layout.tensor_parallel_size

    def timed(matrices: tuple[Matrices, ...]) -> tuple[MatrixTimes, ...]:
        return tuple(
            MatrixTimes(m.kind, m.bytes / bandwidth, 2 * m.elements / matrix_flops(gpu, m.kind)) for m in matrices
        )

    hidden_bytes = counts.hidden_size * _ACTIVATION_BYTES
    # Two all-reduces per layer. With attention replicas, they stay within one, and experts have all-to-alls instead.
    all_reduces, peers = 2 * counts.num_layers, layout.devices
    if layout.token_ranks > 1:
        # The queries of all heads are gathered, and the outputs are reduced: together as much as one more all-reduce.
        all_reduces += counts.attention_layers
    if layout.prompt_ranks > 1:
        # The copies gather the latents of each other's tokens, which are much shorter than the hidden states.
        all_reduces += counts.attention_layers
    if layout.data_parallel_size > 1:
        all_reduces -= counts.moe_layers
        peers = size if counts.experts else layout.devices_of_copy
    return Times(
        timed(counts.dense),
        timed(counts.head),
        tuple(ExpertTimes(row.experts, row.read, timed(row.matrices)) for row in counts.experts),
        all_reduces,
        counts.attention_layers,
        counts.launches,
        counts.kv_heads,
        counts.num_layers * hidden_bytes / bandwidth,
        # A ring transfers each byte twice, except one device's share.
        all_reduces * hidden_bytes * 2 * (size - 1) / size / link_bytes_per_second(gpu, peers),
        float(gpu.interconnect is not None),
        size,
        layout.pipeline_parallel_size,
    )


class SpeedModel:
    """The speed of a model on a layout of devices with an engine. After construction, `decode` is only arithmetic.

    Batch and context are those of the whole replica. With pipeline stages, each stage holds batch / stages sequences at
    a time. With attention replicas, each of them runs batch / replicas sequences, and the experts get all tokens.
    `tokens_per_step` is the mean number of tokens that a step gives a sequence: more than 1 only if tokens are drafted
    (`kvcalc.throughput.drafting`).
    """

    tokens_per_step = 1.0
    host: HostPart | None = None  # what the host has of the model (kvcalc.throughput.host)

    def __init__(self, counts: Counts, gpu: Gpu, constants: Constants) -> None:
        self.counts, self.gpu, self.constants, self.layout = counts, gpu, constants, counts.layout
        self.bandwidth = float(gpu.bandwidth_bytes_per_second)
        self.attention_flops = matrix_flops(gpu, "bf16")
        self.times = times_of(counts, gpu)
        self.costs = costs_of(self.times, constants)
        self._asked: tuple[float, Pair] = (-1.0, (0.0, 0.0))
        is_split = self.layout.data_parallel_size > 1
        self.exchange = ExpertExchange(counts, gpu, link_bytes_per_second) if is_split else None

    def decode(self, batch: float, context_tokens: float, query_tokens: int = 1, busiest: float | None = None) -> Step:
        """One decode step of `batch` sequences with `context_tokens` tokens in the cache.

        Each sequence computes `query_tokens` tokens: the next one, and the drafted tokens that the step checks.
        `busiest` is the number of sequences in the attention replica that all others wait for, whose context this is.
        None is the largest number if the sequences are spread as evenly as possible.
        """
        power, (kv_bytes, flops) = self.constants.roof_power, self._attention_of_one(context_tokens)
        local, batch = self._attention_batch(batch, busiest), max(1.0, batch / self.layout.pipeline_parallel_size)
        pairs, overhead, communication = step_parts(
            self.costs, local, kv_bytes / self.bandwidth, flops / self.attention_flops, context_tokens, batch,
            query_tokens,
        )  # fmt: skip
        if self.exchange is not None:
            pairs = self.exchange.on_busiest_rank(pairs, batch * query_tokens)
            communication += self.exchange.seconds(local * query_tokens)
        weights = compute = 0.0
        for read, multiply in pairs[:-1]:
            a, b = _overlap(read, multiply, power)
            weights += a
            compute += b
        kv, scores = _overlap(*pairs[-1], power)
        compute += scores
        seconds = weights + kv + compute + overhead + communication
        return Step(seconds, weights, kv, compute, overhead, communication)

    def host_seconds(self, batch: float, context_tokens: float, query_tokens: int = 1) -> float:
        """The seconds of a decode step that the host, its memory or the copies from it take."""
        return 0.0

    def prefill_copied_bytes(self, tokens: float, batch: int) -> float:
        """The bytes that a prefill copies from host memory to the device."""
        return 0.0

    def roofline(self, batch: float, context_tokens: float, query_tokens: int = 1) -> float:
        """The ideal seconds of the same step: all bytes at full bandwidth, or all operations at full speed."""
        counts, t, (kv_bytes, flops) = self.counts, self.times, self._attention_of_one(context_tokens)
        local, batch = self._attention_batch(batch), max(1.0, batch / self.layout.pipeline_parallel_size)
        tokens = batch * query_tokens
        read = local * kv_bytes / self.bandwidth
        multiply = local * query_tokens * flops / self.attention_flops
        for m in (*t.dense, *t.head):
            read += m.read
            multiply += local * query_tokens * m.multiply
        for experts, row in zip(t.experts, counts.experts):
            for m in experts.matrices:
                read += row.touched(tokens) * m.read
                multiply += tokens * row.read * m.multiply
        return max(read, multiply)

    def _attention_of_one(self, context_tokens: float) -> Pair:
        """The bytes of cache that attention reads for one sequence, and its operations for one token of it.

        Serving asks this several times for one context, so the last answer is kept.
        """
        if context_tokens != self._asked[0]:
            counts = self.counts
            self._asked = context_tokens, (counts.kv_read_bytes(context_tokens), counts.attention_flops(context_tokens))
        return self._asked[1]

    def _attention_batch(self, batch: float, busiest: float | None = None) -> float:
        """The sequences of a stage that the busiest attention replica runs.

        A mean of 8.3 sequences is 8 in 70% of the steps and 9 in 30%.
        """
        replicas, most = self.layout.data_parallel_size, batch if busiest is None else busiest
        if self.layout.prompt_ranks > 1 and not self.layout.divides_decode:
            # Every copy attends with every request.
            replicas //= self.layout.prompt_ranks
        if replicas > 1 and busiest is None:
            low, share = divmod(batch, 1)
            most = (1 - share) * ceil(low / replicas) + share * ceil((low + 1) / replicas)
        return max(1.0, most / self.layout.pipeline_parallel_size)

    def prefill_work(self, tokens: float, cached_tokens: float = 0.0, share: float | None = None) -> Step:
        """The time a prompt of `tokens` tokens adds to steps that run anyway: no reading of weights, no launches.

        The first `cached_tokens` of them are found in the prefix cache. Only the others are computed, and they attend
        to all tokens before them. Attention replicas prefill different prompts at the same time, so a prompt takes its
        part of their time. With a `share`, it is the time of one of these replicas: 1 for the one that computes the
        prompt, and 0 for the others, which have the experts of its tokens.
        """
        stages = self.layout.pipeline_parallel_size
        share = 1 / self.layout.data_parallel_size if share is None else share
        parts = self._prompt_parts(tokens, cached_tokens, share)
        compute, overhead, communication = (part / stages for part in parts)
        return Step(compute + overhead + communication, 0.0, 0.0, compute, overhead, communication)

    def _prompt_parts(self, tokens: float, cached_tokens: float, share: float) -> tuple[float, float, float]:
        """`prompt_parts` of one of several prompts, of which the busiest attention replica computes `share`."""
        missed, scores = tokens - cached_tokens, self._prompt_scores(tokens, cached_tokens)
        compute, moved, communication = prompt_parts(self.costs, share * missed, share * scores, missed)
        if self.exchange is not None:
            communication += self.exchange.prompt_seconds(share * missed)
        return compute, moved, communication

    def prefill(self, tokens: float, batch: int = 1, cached_tokens: float = 0.0) -> Step:
        """The time of `batch` prompts of `tokens` tokens until their first tokens, if no other request runs.

        `cached_tokens` of each prompt are found in the prefix cache.
        """
        share, missed = self._share_of_prompts(batch), tokens - cached_tokens
        work, moved, communication = self._prompt_parts(tokens, cached_tokens, share)
        overhead = batch * (share * self.constants.sequence_seconds + moved)
        return self._alone(batch * work, overhead, batch * communication, missed * batch, share * missed * batch)

    def prefill_chunks(
        self, chunks: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]] | None = None
    ) -> Step:
        """The time of a step that computes parts of prompts and nothing else.

        A chunk is the place in its prompt of its first token, and of the token after its last one. With attention
        replicas, the chunks are spread over them; or, if `others` are given, one replica computes `chunks`, its time is
        asked for, and `others` are those of the other replicas.
        """
        share = 1.0 if others is not None else self._share_of_prompts(len(chunks))
        work = overhead = communication = tokens = own = 0.0
        for part, group in ((share, chunks), (0.0, others or ())):
            for start, end in group:
                multiply, moved, sent = self._prompt_parts(end, start, part)
                work, communication, tokens = work + multiply, communication + sent, tokens + end - start
                overhead, own = overhead + part * self.constants.sequence_seconds + moved, own + part * (end - start)
        return self._alone(work, overhead, communication, tokens, own)

    def _share_of_prompts(self, prompts: int) -> float:
        """The share of the prompts that the busiest copy of the attention computes. Some copies divide each prompt."""
        ranks = self.layout.prompt_ranks
        return ceil(prompts / (self.layout.data_parallel_size // ranks)) / (prompts * ranks)

    def _alone(self, work: float, overhead: float, communication: float, tokens: float, own: float) -> Step:
        """A step of prompts alone, with their `_prompt_parts`.

        `tokens` are those of all attention replicas, and `own` those of the busiest one.
        """
        pairs, _, _ = step_parts(self.costs, own, 0.0, 0.0, 0.0, tokens)
        weights, compute = _overlap(sum(read for read, _ in pairs), work, self.constants.roof_power)
        overhead = self.costs.launch + overhead
        communication = self.costs.latency + communication + (self.exchange.latency if self.exchange else 0.0)
        return Step(weights + compute + overhead + communication, weights, 0.0, compute, overhead, communication)

    def _prompt_scores(self, tokens: float, cached_tokens: float) -> float:
        """The ideal time of the scores of a prompt's tokens, without those of its first `cached_tokens`."""
        flops = self.counts.prefill_attention_flops(tokens)
        if cached_tokens:
            flops -= self.counts.prefill_attention_flops(cached_tokens)
        return flops / self.attention_flops


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
