"""The times of a model on its devices, with an engine's constants, and what they add up to in a step.

The fit of the constants asks with arrays instead of numbers. `SpeedModel` (`roofline.py`) explains a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvcalc.records import NamedTuple
from kvcalc.throughput.choices import distinct_experts, largest_normal
from kvcalc.throughput.constants import BUSY_SEQUENCES, Constants
from kvcalc.throughput.links import (
    NCCL_SECONDS,
    NETWORK_OVERHEAD,
    NETWORK_SECONDS,
    PROMPT_NETWORK_OVERHEAD,
    all_reduce,
    stage_network,
)

if TYPE_CHECKING:
    from kvcalc.throughput.counts import Counts, Matrices
    from kvcalc.throughput.hardware import Gpu

# The most devices of one link in kernel tables.
_LINKED_DEVICES = 8
_ACTIVATION_BYTES = 2  # hidden states are transferred in 16 bits
# A stage sends the hidden states and the residual to the next one (IntermediateTensors in vLLM, PPProxyTensors in
# SGLang), and each device of --tp a part of them (send_tensor_dict with all_gather_group).
_STAGE_TENSORS = 2
_NO_PRODUCTS = 1e-9  # instead of 0 products of tokens with experts, by which nothing can be divided


class MatrixTimes(NamedTuple):
    """Matrices of one weight class: the ideal seconds to read them, and to multiply one token with them."""

    kind: str
    read: float
    multiply: float


class ExpertTimes(NamedTuple):
    """Experts, and the times of one expert in all layers.

    `move` is the time to read and write the activations of one token with one expert once. `groups` is the number of
    groups of ranks that each hold some of the experts whole, and `largest` is `largest_normal` of it.
    """

    experts: float
    read: float
    matrices: tuple[MatrixTimes, ...]
    move: float
    groups: float = 1.0
    largest: float = 0.0


class Times(NamedTuple):
    """The ideal times of a model on a layout of devices, and its counts. `costs_of` applies an engine's constants.

    The fit uses it with arrays instead of numbers. `one_pass` is the time to read or write the hidden state of a token
    in all layers once, and `move` the same for what the dense layers have inside. `transfer` is the time to send what
    all all-reduces of a token send over the link, `network` the same between nodes, and `passed` the time to send what
    a token passes on to stages in other nodes. `is_linked` is 1 if the devices have a fast link, else 0. `devices` are
    those of one DP rank and stage in one node, which all-reduce. `sends` are the sends between nodes of one all-reduce
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
    move: float
    transfer: float
    network: float
    passed: float
    is_linked: float
    devices: float
    sends: float
    stages: float


Overhead = Callable[[Mapping[str, float], str], float]
"""The overhead of a weight class, from those of all classes."""
Pair = tuple[float, float]
"""The times to read and to multiply, which overlap; or the bytes and the operations."""


class PromptWork(NamedTuple):
    """The prompts of a step: the tokens of `sequences` sequences, and the ideal seconds of their scores.

    These are of the busiest DP rank. `expert_tokens` are the tokens of all of them.
    """

    sequences: float
    tokens: float
    scores: float
    expert_tokens: float


NO_PROMPTS = PromptWork(0.0, 0.0, 0.0, 0.0)


class ExpertCosts(NamedTuple):
    """The seconds of the experts of one kind in all layers.

    - read, multiply, prompt: to read one expert, and to multiply one token with it, which decodes or is of a prompt.
    - move: to read and write the activations of one token with all its experts.
    """

    read: float
    multiply: float
    prompt: float
    move: float


class Costs(NamedTuple):
    """The times of a model with an engine's constants. `step_parts` and `prompt_parts` only add and multiply them.

    - matrices: the pairs of the dense layers and the head, for one token.
    - experts: the times of each kind of experts, and `ExpertCosts` of them.
    - kv, scores: factors on the ideal times of attention, and prompt_scores on those of a prompt.
    - launch, sequence, busy_sequence, context: seconds per step, per sequence, per sequence beyond BUSY_SEQUENCES, and
      per token of the longest context.
    - latency, transfer, prompt_transfer: seconds of communication per step, per token, and per token of a prompt.
    - prompt, prompt_sequence: seconds to multiply a token of a prompt with the dense layers, and of the host for a
      prompt in a step.
    - moved: seconds to read and write the hidden states of a token.
    """

    matrices: tuple[Pair, ...]
    experts: tuple[tuple[ExpertTimes, ExpertCosts], ...]
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
    alike: float


def costs_of(t: Times, c: Constants) -> Costs:
    """The costs of a model. Nothing branches on a value, so that everything may be an array."""
    device = c.device_overhead

    def pair(matrices: tuple[MatrixTimes, ...], read_overhead: Overhead = overhead_of) -> Pair:
        return (
            sum(m.read * read_overhead(c.weight_overhead, m.kind) for m in matrices) * device,
            sum(m.multiply * overhead_of(c.compute_overhead, m.kind) for m in matrices) * device,
        )

    dense, experts = pair(t.dense), []
    for e in t.experts:
        read, multiply = pair(e.matrices, experts_overhead_of)
        prompt = multiply * c.prefill_expert_overhead * c.prefill_overhead
        costs = ExpertCosts(
            read * c.expert_overhead, multiply * c.expert_compute_overhead, prompt, e.read * e.move * c.expert_passes
        )
        experts.append((e, costs))
    moved = t.one_pass * c.activation_passes + t.move * c.expert_passes
    pcie = c.pcie_overhead + c.pcie_overhead_per_device * (t.devices - 2)
    transfer = t.transfer * (t.is_linked * c.link_overhead + (1 - t.is_linked) * pcie)
    further = smaller(t.devices, _LINKED_DEVICES) - 2
    # Between stages there is one send, of the bytes of all tokens.
    passed = t.passed * PROMPT_NETWORK_OVERHEAD
    linked = c.prompt_link_overhead + c.prompt_link_overhead_per_device * further
    prompt_transfer = t.transfer * (t.is_linked * linked + (1 - t.is_linked) * pcie)
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
        transfer=transfer + t.network * NETWORK_OVERHEAD + passed,
        prompt_transfer=prompt_transfer + t.network * PROMPT_NETWORK_OVERHEAD + passed,
        prompt=dense[1] * c.prefill_overhead,
        prompt_sequence=c.sequence_seconds,
        moved=moved,
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


def experts_overhead_of(overheads: Mapping[str, float], kind: str) -> float:
    """The overhead of experts of a weight class: that of their own kernels if it is known, else that of the class."""
    return overhead_of(overheads, f"{kind} experts" if f"{kind} experts" in overheads else kind)


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
    moved = 0.0
    for row, of_row in costs.experts:
        experts, busier = busiest_rank(row, expert_batch * query_tokens, costs.alike)
        pairs.append((of_row.read * experts, of_row.multiply * row.read * expert_batch * query_tokens * busier))
        moved = moved + expert_batch * query_tokens * of_row.move * busier
    pairs.append((batch * kv_read * costs.kv, tokens * scores * costs.scores))
    overhead = (
        costs.launch + batch * (costs.sequence + (query_tokens - 1) * costs.moved) + context_tokens * costs.context
        + moved + (batch > BUSY_SEQUENCES) * (batch - BUSY_SEQUENCES) * costs.busy_sequence
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
    moved = 0.0
    for row, of_row in costs.experts:
        experts, busier = busiest_rank(row, expert_tokens + prompts.expert_tokens, costs.alike)
        multiply = row.read * (of_row.multiply * expert_tokens + of_row.prompt * prompts.expert_tokens)
        pairs.append((of_row.read * experts, multiply * busier))
        moved = moved + prompts.expert_tokens * of_row.move * busier
    overhead = prompts.tokens * costs.moved + moved + prompts.sequences * costs.prompt_sequence
    return pairs, prompts.scores * costs.prompt_scores, overhead, prompts.tokens * costs.prompt_transfer


def busiest_rank(row: ExpertTimes, tokens: float, overlap: float) -> Pair:
    """The work of `tokens` tokens in one layer for the rank that all others wait for.

    Tokens choose experts at random. If each group of ranks holds some experts whole, one group has more of the chosen
    experts than the mean, and more products of a token with an expert. The result is the distinct experts that it
    reads, times the number of groups (for the mean group, as many as if each rank had a part of each expert), and
    its products divided by the mean. May be arrays.
    """
    held, mean = row.experts / row.groups, distinct_experts(row.experts, row.read, alike(tokens, overlap)) / row.groups
    # An expert is chosen or not, independently of the others: a binomial distribution on each rank.
    most = smaller(held, mean + row.largest * (mean * abs(1 - mean / held)) ** 0.5)
    products = tokens * row.read / row.groups + _NO_PRODUCTS
    busier = 1 + row.largest * ((1 - 1 / row.groups) / products) ** 0.5
    # A token has each expert of a rank at most once.
    return most * row.groups, smaller(busier, smaller(row.groups, row.experts / row.read))


def smaller(a: float, b: float) -> float:
    """The smaller value, also of arrays."""
    return a * (a <= b) + b * (a > b)


def together(read: float, multiply: float, power: float) -> float:
    """The time of reading and multiplying, which overlap."""
    seconds: float = (read**power + multiply**power) ** (1 / power)
    return seconds


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
        # The queries of all heads are gathered, and the outputs are reduced: together the bytes of one more all-reduce.
        all_reduces += counts.attention_layers
    if layout.prompt_ranks > 1:
        # The copies gather the latents of each other's tokens, which are much shorter than the hidden states.
        all_reduces += counts.attention_layers
    if layout.attention_copies > 1:
        all_reduces -= counts.moe_layers
    return Times(
        timed(counts.dense),
        timed(counts.head),
        tuple(
            ExpertTimes(
                row.experts,
                row.read,
                timed(row.matrices),
                _ACTIVATION_BYTES * row.moved / bandwidth,
                layout.expert_parallel_size,
                largest_normal(layout.expert_parallel_size),
            )
            for row in counts.experts
        ),
        all_reduces,
        counts.attention_layers,
        counts.launches,
        counts.kv_heads,
        counts.num_layers * hidden_bytes / bandwidth,
        _ACTIVATION_BYTES * counts.moved / bandwidth,
        all_reduces * hidden_bytes * way.link,
        all_reduces * hidden_bytes * way.network,
        _STAGE_TENSORS * hidden_bytes * stage_network(gpu, layout),
        float(gpu.interconnect is not None),
        way.devices,
        way.sends,
        layout.pipeline_parallel_size,
    )


def matrix_flops(gpu: Gpu, kind: str) -> float:
    """Dense FLOP/s of matrices of a weight class, in their own type if the device can multiply it.

    Other types are widened when they are read: 8- and 4-bit floats on older devices, and integers, whose activations
    stay in 16 bits.
    """
    wanted = {"fp8": ("fp8",), "nvfp4": ("fp4",), "mxfp4": ("fp4",), "fp32": ("tf32", "fp32")}.get(kind, ())
    for name in (*wanted, "bf16", "fp16", "fp32"):
        flops = gpu.flops_per_second.get(name)
        if flops:
            return float(flops)
    raise ValueError(f"{gpu.name}: no FLOP/s known")
