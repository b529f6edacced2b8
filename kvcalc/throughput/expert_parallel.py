"""The exchange of tokens between DP ranks and the experts of all replicas.

Every layer with experts has two all-to-alls: one sends the tokens to the ranks of their experts (dispatch), the other
brings the results back (combine). The all-to-alls of decoding have a fixed cost and a cost per token:
    seconds = 2 x latency + tokens x ranks reached x bytes x overhead / rate of the link
The tokens are those of one rank. A token reaches a rank once, however many of its experts are there. Ranks beyond the
fast link are reached over the network at the same time. Prompts cross the network once per node, and are then sent on
over the fast link (DeepEP's normal kernels).

Experts are chosen at random with equal probability, as if the engine's load balancer (EPLB) were perfect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcalc.throughput.hardware import node_devices
from kvcalc.throughput.links import nodes

if TYPE_CHECKING:
    from kvcalc.throughput.counts import Counts, Experts
    from kvcalc.throughput.hardware import Gpu

# The kernel tables of ai-dynamo/aiconfigurator (Apache-2.0), hidden size 7168, 8 of 256 experts. An all-to-all of one
# token takes 12 us on H200 with 8 ranks (DeepEP, low latency; SGLang 0.5.12) and 12 to 14 us on GB200 with 4 to 64
# ranks (TensorRT-LLM 1.2). Per further token, a combine in bf16 takes 0.46 us on H200, 0.16 on B200 and 0.20 on GB200.
# The bytes alone take 0.15 us over NVLink 4 and 0.07 over NVLink 5.
_ALL_TO_ALL_SECONDS = 12e-6
_LINK_OVERHEAD = 2.7
# Large all-to-alls: 0.23 us for a combine in bf16 and 0.11 for a dispatch in fp8 on H200 (DeepEP, normal kernels).
_PROMPT_LINK_OVERHEAD = 1.6
# DeepEP's low-latency kernels move 39 to 46 GB/s over a port of 50 GB/s with 64 to 256 ranks (docs/legacy.md), and its
# normal kernels 43 to 47 GB/s with 16 to 64.
_NETWORK_OVERHEAD = 1.25

# Results are combined in bf16. Tokens are dispatched in fp8 if the experts multiply in 8 bits or less, with a scale in
# fp32 for each 128 elements, else in bf16. Source: README.md of DeepEP and its low_latency_dispatch.
_COMBINE_BYTES, _BF16_BYTES, _FP8_BYTES = 2.0, 2.0, 1 + 4 / 128


class ExpertExchange:
    """The all-to-alls of a model with DP ranks.

    `rate` gives the bytes per second that a device sends to its peers, by the number of devices. `latency` is the
    seconds of all all-to-alls of a step without their bytes.
    """

    def __init__(self, counts: Counts, gpu: Gpu, rate: Callable[[Gpu, int], float]) -> None:
        layout = counts.layout
        self.ranks, self.groups = layout.ranks, layout.expert_parallel_size
        self.latency = 2 * counts.moe_layers * _ALL_TO_ALL_SECONDS
        self._tensor_ranks = layout.tensor_parallel_size
        read = max((row.read for row in counts.experts), default=0)
        token_bytes = counts.moe_layers * counts.hidden_size * (_dispatch_bytes(gpu, counts.experts) + _COMBINE_BYTES)
        reached = ranks_reached(self.ranks, self.groups, read)
        near = min(self.ranks, node_devices(gpu))
        far_share = (self.ranks - near) / (self.ranks - 1)
        self._near = token_bytes * reached * (1 - far_share) / rate(gpu, near)
        self._far = token_bytes * reached * far_share / rate(gpu, self.ranks)
        self._prompt_near, self._prompt_far, spanned = self._near, self._far, nodes(gpu, self.ranks)
        if spanned > 1:
            # A token goes to one device of each other node that it needs, which sends it on to the others there.
            self._prompt_near += token_bytes * reached * far_share * (near - 1) / near / rate(gpu, near)
            reached_nodes = ranks_reached(spanned, min(spanned, self.groups), read)
            self._prompt_far = token_bytes * reached_nodes / rate(gpu, self.ranks)

    def seconds(self, tokens: float) -> float:
        """The all-to-alls of a decode step in which each DP rank has `tokens` tokens."""
        return self.latency + self._bytes_seconds(tokens, self._near * _LINK_OVERHEAD, self._far)

    def prompt_seconds(self, tokens: float) -> float:
        """The time that `tokens` tokens of prompts in each DP rank add to all-to-alls that run anyway."""
        return self._bytes_seconds(tokens, self._prompt_near * _PROMPT_LINK_OVERHEAD, self._prompt_far)

    def _bytes_seconds(self, tokens: float, near: float, far: float) -> float:
        # The ranks of a replica each send their part of its tokens (sequence parallelism).
        return tokens / self._tensor_ranks * max(near, far * _NETWORK_OVERHEAD)


def ranks_reached(ranks: int, groups: int, read: int) -> float:
    """The expected number of other ranks to which a token is sent, if `read` experts are chosen for it at random.

    Each of `groups` groups of ranks holds whole experts, split over the ranks of the group.
    """
    return (ranks - 1) * (1 - (1 - 1 / groups) ** read)


def _dispatch_bytes(gpu: Gpu, experts: tuple[Experts, ...]) -> float:
    """Bytes of one element of a token on its way to its experts, in the type that most of them multiply."""
    largest = max((m for row in experts for m in row.matrices), key=lambda m: m.elements, default=None)
    needed = None if largest is None else {"fp8": "fp8", "nvfp4": "fp4"}.get(largest.kind)
    return _FP8_BYTES if needed is not None and gpu.flops_per_second.get(needed) else _BF16_BYTES
