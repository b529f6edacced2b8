"""The time of a step that decodes, computes prompts, or both.

It follows from bytes / bandwidth, operations / FLOP/s, launches and links.

The time of a step is the sum of
    matrices     (read, multiply)        dense layers, the output head, the distinct experts touched
    attention    (read cache, scores), and the scores of prompts
    all-reduces  two per layer: latency, and bytes over the link and between nodes; all-to-alls if there are DP
                 ranks
    launches     per kernel, per step, per sequence
In a step that does both, the tokens of decoding requests and of prompts are multiplied with the same matrices, which
are read once. A pair (a, b) overlaps as (a^p + b^p)^(1/p). Every overhead is a factor of at least 1, so no result is
faster than the ideal roofline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

from kvcalc.records import NamedTuple
from kvcalc.throughput.constants import BUSY_SEQUENCES, Constants
from kvcalc.throughput.counts import distinct_experts
from kvcalc.throughput.expert_parallel import ExpertExchange
from kvcalc.throughput.links import (
    NCCL_SECONDS,
    NETWORK_OVERHEAD,
    NETWORK_SECONDS,
    PROMPT_NETWORK_OVERHEAD,
    all_reduce,
    link_bytes_per_second,
)

if TYPE_CHECKING:
    from kvcalc.throughput.counts import Counts, HostPart, Matrices
    from kvcalc.throughput.hardware import Gpu

_ACTIVATION_BYTES = 2  # hidden states are transferred in 16 bits


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
    """Experts, and the times of one expert in all layers.

    `move` is the time to read and write the activations of one token with one expert once.
    """

    experts: float
    read: float
    matrices: tuple[MatrixTimes, ...]
    move: float


class Times(NamedTuple):
    """The ideal times of a model on a layout of devices, and its counts. `costs_of` applies an engine's constants.

    The fit uses it with arrays instead of numbers. `one_pass` is the time to read or write the hidden state of a token
    in all layers once. `transfer` is the time to send what all all-reduces of a token send over the link, and `network`
    the same between nodes. `is_linked` is 1 if the devices have a fast link, else 0. `devices` are those of one
    DP rank and stage in one node, which all-reduce. `sends` are the sends between nodes of one all-reduce
    that wait for each other.
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
    network: float
    is_linked: float
    devices: float
    sends: float
    stages: float


Pair = tuple[float, float]
"""The times to read and to multiply, which overlap; or the bytes and the operations."""


class Part(NamedTuple):
    """The tokens of a prompt from `start` to before `end`, which a step computes. Those before `start` are cached.

    The step computes a `number` of equal ones, and `share` of them in the busiest DP rank.
    """

    start: float
    end: float
    share: float = 1.0
    number: float = 1.0


class PromptWork(NamedTuple):
    """What a step computes of prompts: tokens of so many sequences, and the ideal seconds of their scores.

    These are of the busiest DP rank. `expert_tokens` are the tokens of all of them.
    """

    sequences: float
    tokens: float
    scores: float
    expert_tokens: float


NO_PROMPTS = PromptWork(0.0, 0.0, 0.0, 0.0)


class Costs(NamedTuple):
    """The times of a model with an engine's constants. `step_parts` and `prompt_parts` only add and multiply them.

    - matrices: the pairs of the dense layers and the head, for one token. experts: `ExpertTimes` of each kind as
      (experts, read, pair of one expert, seconds to multiply a token of a prompt with one expert).
    - kv, scores: factors on the ideal times of attention, and prompt_scores on those of a prompt.
    - launch, sequence, busy_sequence, context: seconds per step, per sequence, per sequence beyond BUSY_SEQUENCES, and
      per token of the longest context.
    - latency, transfer, prompt_transfer: seconds of communication per step, per token, and per token of a prompt.
    - prompt, prompt_sequence: seconds to multiply a token of a prompt with the dense layers, and of the host for a
      prompt in a step.
    - moved, expert_moved: seconds to read and write the activations of a token: the hidden states, and those of its
      experts.
    """

    matrices: tuple[Pair, ...]
    experts: tuple[tuple[float, float, Pair, float], ...]
    kv: float
    scores: float
    prompt_scores: float
    launch: float
    sequence: float
    busy_sequence: float
    context: float
    latency: float
    transfer: float
    prompt_transfer: float
    prompt: float
    prompt_sequence: float
    moved: float
    expert_moved: float
    alike: float


def costs_of(t: Times, c: Constants) -> Costs:
    """The costs of a model. Nothing branches on a value, so that everything may be an array."""
    device = c.device_overhead

    def pair(matrices: tuple[MatrixTimes, ...]) -> Pair:
        return (
            sum(m.read * overhead_of(c.weight_overhead, m.kind) for m in matrices) * device,
            sum(m.multiply * overhead_of(c.compute_overhead, m.kind) for m in matrices) * device,
        )

    dense, experts = pair(t.dense), []
    for e in t.experts:
        read, multiply = pair(e.matrices)
        one = read * c.expert_overhead, multiply * c.expert_compute_overhead
        experts.append((e.experts, e.read, one, multiply * c.prefill_expert_overhead * c.prefill_overhead))
    moved = t.one_pass * c.activation_passes
    transfer = t.transfer * (t.is_linked * c.link_overhead + (1 - t.is_linked) * c.pcie_overhead)
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
        transfer=transfer + t.network * NETWORK_OVERHEAD,
        prompt_transfer=transfer + t.network * PROMPT_NETWORK_OVERHEAD,
        prompt=dense[1] * c.prefill_overhead,
        prompt_sequence=c.sequence_seconds,
        moved=moved,
        expert_moved=sum(e.read * e.move for e in t.experts) * c.expert_passes,
        alike=c.token_overlap,
    )


def _latency(t: Times, c: Constants) -> float:
    """The seconds of all all-reduces of a step without their bytes."""
    linked = c.all_reduce_seconds + c.all_reduce_device_seconds * (t.devices - 2)
    pcie = c.pcie_all_reduce_seconds + c.pcie_all_reduce_device_seconds * (t.devices - 2)
    within = (t.devices > 1) * (t.is_linked * linked + (1 - t.is_linked) * pcie)
    return t.all_reduces * (within + (t.sends > 0) * NCCL_SECONDS + t.sends * NETWORK_SECONDS)


def alike(tokens: float, overhead: float) -> float:
    """The tokens that would choose as many distinct experts if each chose at random. May be arrays."""
    return 1 + (tokens - 1) / overhead


def overhead_of(overheads: Mapping[str, float], kind: str) -> float:
    """The overhead of a weight class, or that of 16 bits if the class has none."""
    return overheads[kind] if kind in overheads else overheads["bf16"]


def step_parts(
    costs: Costs, batch: float, kv_read: float, scores: float, context_tokens: float, expert_batch: float,
    query_tokens: float = 1,
) -> tuple[list[Pair], float, float]:  # fmt: skip
    """The parts of a decode step: its pairs (the last one is attention), its launches, and its communication.

    `batch` is the number of sequences in one pipeline stage of a DP rank, and `expert_batch` in that stage
    of all DP ranks. `kv_read` and `scores` are the ideal times of attention for one sequence and one token of
    it. Each sequence computes `query_tokens` tokens, which read the weights and the cache once, share one block of the
    attention kernel per KV head, and are scheduled together. Nothing branches on a value, so that everything may be an
    array.
    """
    tokens = batch * query_tokens
    pairs = [(read, multiply * tokens) for read, multiply in costs.matrices]
    for experts, read, (reading, multiply), _ in costs.experts:
        touched = distinct_experts(experts, read, alike(expert_batch * query_tokens, costs.alike))
        pairs.append((reading * touched, multiply * read * expert_batch * query_tokens))
    pairs.append((batch * kv_read * costs.kv, tokens * scores * costs.scores))
    overhead = (
        costs.launch + batch * (costs.sequence + (query_tokens - 1) * costs.moved) + context_tokens * costs.context
        + expert_batch * query_tokens * costs.expert_moved
        + (batch > BUSY_SEQUENCES) * (batch - BUSY_SEQUENCES) * costs.busy_sequence
    )  # fmt: skip
    return pairs, overhead, costs.latency + tokens * costs.transfer


def prompt_parts(
    costs: Costs, prompts: PromptWork, tokens: float = 0.0, expert_tokens: float = 0.0
) -> tuple[list[Pair], float, float, float]:
    """The parts of a step that computes prompts besides `tokens` tokens of decoding requests.

    They are the pairs of the matrices for all these tokens, and what the prompts add: the time of their scores, the
    time of the host and of passes over hidden states, and the communication. `tokens` are those of one DP rank,
    `expert_tokens` those of all. Nothing branches on a value, so that everything may be an array.
    """
    dense, head = costs.matrices
    pairs = [
        (dense[0], dense[1] * tokens + costs.prompt * prompts.tokens),
        (head[0], head[1] * (tokens + prompts.sequences)),
    ]
    for experts, read, (reading, multiply), prompt in costs.experts:
        touched = distinct_experts(experts, read, alike(expert_tokens + prompts.expert_tokens, costs.alike))
        pairs.append((reading * touched, read * (multiply * expert_tokens + prompt * prompts.expert_tokens)))
    overhead = (
        prompts.tokens * costs.moved + prompts.expert_tokens * costs.expert_moved
        + prompts.sequences * costs.prompt_sequence
    )  # fmt: skip
    return pairs, prompts.scores * costs.prompt_scores, overhead, prompts.tokens * costs.prompt_transfer


def together(read: float, multiply: float, power: float) -> float:
    """The time of reading and multiplying, which overlap."""
    found: float = (read**power + multiply**power) ** (1 / power)
    return found


def times_of(counts: Counts, gpu: Gpu) -> Times:
    """The ideal times of `counts` on devices `gpu`."""
    layout, bandwidth = counts.layout, gpu.read_bytes_per_second

    def timed(matrices: tuple[Matrices, ...]) -> tuple[MatrixTimes, ...]:
        return tuple(
            MatrixTimes(m.kind, m.bytes / bandwidth, 2 * m.elements / matrix_flops(gpu, m.kind)) for m in matrices
        )

    hidden_bytes = counts.hidden_size * _ACTIVATION_BYTES
    # Two all-reduces per layer, over the devices of one DP rank and stage. With DP ranks, experts
    # have all-to-alls instead. Engines put these devices into one node if they fit, so other stages do not matter.
    all_reduces, way = 2 * counts.num_layers, all_reduce(gpu, layout.tensor_parallel_size)
    if layout.token_ranks > 1:
        # The queries of all heads are gathered, and the outputs are reduced: together as much as one more all-reduce.
        all_reduces += counts.attention_layers
    if layout.prompt_ranks > 1:
        # The copies gather the latents of each other's tokens, which are much shorter than the hidden states.
        all_reduces += counts.attention_layers
    if layout.data_parallel_size > 1:
        all_reduces -= counts.moe_layers
    return Times(
        timed(counts.dense),
        timed(counts.head),
        tuple(
            ExpertTimes(row.experts, row.read, timed(row.matrices), _ACTIVATION_BYTES * row.moved / bandwidth)
            for row in counts.experts
        ),
        all_reduces,
        counts.attention_layers,
        counts.launches,
        counts.kv_heads,
        counts.num_layers * hidden_bytes / bandwidth,
        all_reduces * hidden_bytes * way.link,
        all_reduces * hidden_bytes * way.network,
        float(gpu.interconnect is not None),
        way.devices,
        way.sends,
        layout.pipeline_parallel_size,
    )


class SpeedModel:
    """The speed of a model on a layout of devices with an engine. After construction, `decode` is only arithmetic.

    Batch and context are those of the whole replica. With pipeline stages, each stage holds batch / stages sequences at
    a time. With DP ranks, each of them runs batch / replicas sequences, and the experts get all tokens.
    `tokens_per_step` is the mean number of tokens that a step gives a sequence: more than 1 only if tokens are drafted
    (`kvcalc.throughput.drafting`).
    """

    tokens_per_step = 1.0
    host: HostPart | None = None  # what the host has of the model (kvcalc.throughput.host)

    def __init__(self, counts: Counts, gpu: Gpu, constants: Constants) -> None:
        self.counts, self.gpu, self.constants, self.layout = counts, gpu, constants, counts.layout
        self.bandwidth = gpu.read_bytes_per_second
        self.attention_flops = matrix_flops(gpu, "bf16")
        self.times = times_of(counts, gpu)
        self.costs = costs_of(self.times, constants)
        self._asked: tuple[float, Pair] = (-1.0, (0.0, 0.0))
        is_split = self.layout.data_parallel_size > 1
        self.exchange = ExpertExchange(counts, gpu, link_bytes_per_second) if is_split else None

    def decode(self, batch: float, context_tokens: float, query_tokens: int = 1, busiest: float | None = None) -> Step:
        """One decode step of `batch` sequences with `context_tokens` tokens in the cache.

        Each sequence computes `query_tokens` tokens: the next one, and the drafted tokens that the step checks.
        `busiest` is the number of sequences in the DP rank that all others wait for, whose context this is.
        None is the largest number if the sequences are spread as evenly as possible.
        """
        power, (kv_bytes, flops) = self.constants.roof_power, self._attention_of_one(context_tokens)
        local, batch = self._attention_batch(batch, busiest), max(1.0, batch / self.layout.pipeline_parallel_size)
        pairs, overhead, communication = step_parts(
            self.costs, local, kv_bytes / self.bandwidth, flops / self.attention_flops, context_tokens, batch,
            query_tokens,
        )  # fmt: skip
        if self.exchange is not None:
            pairs = [*self.exchange.on_busiest_rank(pairs[:-1], batch * query_tokens), pairs[-1]]
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
                read += row.touched(alike(tokens, self.costs.alike)) * m.read
                multiply += tokens * row.read * m.multiply
        return max(read, multiply)

    def attention_seconds(self, batch: float, context_tokens: float) -> float:
        """The seconds of attention over the cache in a decode step: reading it, and the scores. See `decode`."""
        kv_bytes, flops = self._attention_of_one(context_tokens)
        local = self._attention_batch(batch)
        read, multiply = local * kv_bytes / self.bandwidth, local * flops / self.attention_flops
        return together(read * self.costs.kv, multiply * self.costs.scores, self.constants.roof_power)

    def _attention_of_one(self, context_tokens: float) -> Pair:
        """The bytes of cache that attention reads for one sequence, and its operations for one token of it.

        Serving asks this several times for one context, so the last answer is kept.
        """
        if context_tokens != self._asked[0]:
            counts = self.counts
            self._asked = context_tokens, (counts.kv_read_bytes(context_tokens), counts.attention_flops(context_tokens))
        return self._asked[1]

    def _attention_batch(self, batch: float, busiest: float | None = None) -> float:
        """The sequences of a stage that the busiest DP rank runs.

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

    def prefill_work(self, tokens: float, cached_tokens: float = 0.0) -> Step:
        """The time that a prompt adds to steps which multiplying bounds: nothing is read or launched for it.

        The first `cached_tokens` of its tokens are found in the prefix cache. Only the others are computed, and they
        attend to all tokens before them. DP ranks prefill different prompts at the same time, so a prompt
        takes its part of their time.
        """
        stages = self.layout.pipeline_parallel_size
        prompts = self._prompt_work([Part(cached_tokens, tokens, 1 / self.layout.data_parallel_size)])
        prompts = prompts._replace(sequences=0.0)
        pairs, scores, overhead, communication = prompt_parts(self.costs, prompts)
        compute = sum(multiply for _, multiply in pairs) + scores
        if self.exchange is not None:
            communication += self.exchange.prompt_seconds(prompts.tokens)
        parts = [part / stages for part in (compute, overhead, communication)]
        return Step(sum(parts), 0.0, 0.0, *parts)

    def beside(
        self, parts: Sequence[Part], batch: float, query_tokens: int = 1, busiest: float | None = None
    ) -> Step:  # fmt: skip
        """The time that prompts add to a decode step of `batch` sequences, which computes them too (see `decode`).

        Their tokens and those of the sequences are multiplied with the same matrices, which are read once.
        """
        stages = self.layout.pipeline_parallel_size
        tokens = self._attention_batch(batch, busiest) * query_tokens
        of_all = max(1.0, batch / stages) * query_tokens
        work = self._prompt_work(parts)
        if stages > 1:  # each stage computes another part of the prompts at the same time
            work = PromptWork(*(one / stages for one in work))
        before, after = self._matrices(NO_PROMPTS, tokens, of_all), self._matrices(work, tokens, of_all)
        return Step(*(more - less for more, less in zip(after, before)))

    def alone(self, parts: Sequence[Part]) -> Step:
        """The time of a step that only computes these prompts."""
        step = self._matrices(self._prompt_work(parts), 0.0, 0.0)
        latency = self.costs.latency + (self.exchange.latency if self.exchange else 0.0)
        seconds = step.seconds + self.costs.launch + latency
        overhead, communication = step.overhead + self.costs.launch, step.communication + latency
        return step._replace(seconds=seconds, overhead=overhead, communication=communication)

    def prefill(self, tokens: float, batch: int = 1, cached_tokens: float = 0.0) -> Step:
        """The time of `batch` prompts of `tokens` tokens until their first tokens, if no other request runs.

        `cached_tokens` of each prompt are found in the prefix cache.
        """
        return self.alone([Part(cached_tokens, tokens, self.share_of_prompts(batch), batch)])

    def launch_wait(self, prefill: float) -> float:
        """How much longer the host takes to launch the kernels of a prompt than the device to compute it."""
        return max(0.0, self.constants.prompt_launch_seconds * self.counts.launches - prefill)

    def share_of_prompts(self, prompts: int) -> float:
        """The share of the prompts that the busiest copy of the attention computes. Some copies divide each prompt."""
        ranks = self.layout.prompt_ranks
        return ceil(prompts / (self.layout.data_parallel_size // ranks)) / (prompts * ranks)

    def _prompt_work(self, parts: Sequence[Part]) -> PromptWork:
        sequences = tokens = scores = of_all = 0.0
        for start, end, share, number in parts:
            own = share * number
            sequences, tokens, of_all = sequences + own, tokens + own * (end - start), of_all + number * (end - start)
            if own:
                scores += own * self._prompt_scores(end, start)
        return PromptWork(sequences, tokens, scores, of_all)

    def _matrices(self, prompts: PromptWork, tokens: float, expert_tokens: float) -> Step:
        """The times of the matrices of a step, and what its prompts add, as in `prompt_parts`."""
        pairs, scores, overhead, communication = prompt_parts(self.costs, prompts, tokens, expert_tokens)
        if self.exchange is not None:
            pairs = self.exchange.on_busiest_rank(pairs, expert_tokens + prompts.expert_tokens)
            communication += self.exchange.prompt_seconds(prompts.tokens)
        weights, compute, power = 0.0, scores, self.constants.roof_power
        for read, multiply in pairs:
            a, b = _overlap(read, multiply, power)
            weights += a
            compute += b
        return Step(
            weights + compute + overhead + communication, weights, 0.0, compute, overhead, communication
        )  # fmt: skip

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
    # The power of a sum may be rounded to less than its larger part.
    both = max(together(read, multiply, power), read, multiply)
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
