"""The time of a step that decodes, computes prompts, or both.

It follows from bytes / bandwidth, operations / FLOP/s, launches and links.

The time of a step is the sum of
    matrices     (read, multiply)        dense layers, the output head, the distinct experts touched
    attention    (read cache, scores), and the scores of prompts
    all-reduces  two per layer: latency, and bytes over the link and between nodes; all-to-alls if there are DP
                 ranks
    launches     per kernel, per step, per sequence; without CUDA graphs, at least the host's time to launch them
In a step that does both, the tokens of decoding requests and of prompts are multiplied with the same matrices, which
are read once. A pair (a, b) overlaps as (a^p + b^p)^(1/p). Every overhead is a factor of at least 1, so no result is
faster than the ideal roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from math import ceil
from operator import sub
from typing import TYPE_CHECKING

from kvcalc.records import NamedTuple
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.costs import (
    NO_PROMPTS,
    Pair,
    PromptWork,
    alike,
    costs_of,
    matrix_flops,
    prompt_parts,
    step_parts,
    times_of,
    together,
)
from kvcalc.throughput.expert_parallel import ExpertExchange
from kvcalc.throughput.links import link_bytes_per_second

if TYPE_CHECKING:
    from kvcalc.throughput.counts import Counts, HostPart
    from kvcalc.throughput.hardware import Gpu


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


class Part(NamedTuple):
    """The tokens of a prompt from `start` to before `end`, which a step computes. Those before `start` are cached.

    The step computes a `number` of equal ones, and `share` of them in the busiest DP rank.
    """

    start: float
    end: float
    share: float = 1.0
    number: float = 1.0


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
        copies, dp_ranks = self.layout.attention_copies, self.layout.data_parallel_size
        # Copies that do not divide the requests of a step all attend with every request.
        self._decode_copies = copies if self.layout.divides_decode else dp_ranks
        self.bandwidth = gpu.read_bytes_per_second
        self.attention_flops = matrix_flops(gpu, "bf16")
        self.times = times_of(counts, gpu)
        self.costs = costs_of(self.times, constants)
        launching = constants.decode_launch_seconds * counts.launches
        self.host_launch_seconds = launching + constants.step_seconds if launching else 0.0
        self._asked: tuple[float, Pair] = (-1.0, (0.0, 0.0))
        # Many prompts are computed beside the same sequences.
        self._without_prompts = lru_cache(maxsize=1024)(partial(self._matrices, NO_PROMPTS))
        self.exchange = ExpertExchange(counts, gpu, link_bytes_per_second) if copies > 1 else None

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
            communication += self.exchange.seconds(local * query_tokens)
        weights = compute = 0.0
        for read, multiply in pairs[:-1]:
            a, b = _overlap(read, multiply, power)
            weights += a
            compute += b
        kv, scores = _overlap(*pairs[-1], power)
        compute += scores
        if self.counts.adapters is not None:
            overhead += self.counts.adapters.seconds(local, self.bandwidth)
        seconds = weights + kv + compute + overhead + communication
        # Without a CUDA graph, the device waits for the host if that launches the kernels more slowly than they run.
        wait = self.host_launch_seconds - seconds
        if wait > 0:
            seconds, overhead = self.host_launch_seconds, overhead + wait
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
        copies, most = self._decode_copies, batch if busiest is None else busiest
        if copies > 1 and busiest is None:
            low, share = divmod(batch, 1)
            most = (1 - share) * ceil(low / copies) + share * ceil((low + 1) / copies)
        return max(1.0, most / self.layout.pipeline_parallel_size)

    def prefill_work(self, tokens: float, cached_tokens: float = 0.0) -> Step:
        """The time that a prompt adds to steps which multiplying bounds: nothing is read or launched for it.

        The first `cached_tokens` of its tokens are found in the prefix cache. Only the others are computed, and they
        attend to all tokens before them. DP ranks prefill different prompts at the same time, so a prompt
        takes its part of their time.
        """
        stages = self.layout.pipeline_parallel_size
        prompts = self._prompt_work([Part(cached_tokens, tokens, 1 / self.layout.attention_copies)])
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
            work = PromptWork(*(part / stages for part in work))
        return Step._make(map(sub, self._matrices(work, tokens, of_all), self._without_prompts(tokens, of_all)))

    def alone(self, parts: Sequence[Part]) -> Step:
        """The time of a step that only computes these prompts."""
        seconds, weights, kv, compute, overhead, sent = self._matrices(self._prompt_work(parts), 0.0, 0.0)
        launch, latency = self.costs.launch, self.costs.latency + (self.exchange.latency if self.exchange else 0.0)
        return Step(seconds + launch + latency, weights, kv, compute, overhead + launch, sent + latency)

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
        return self.layout.attention_batch(prompts) / (prompts * self.layout.prompt_ranks)

    def _prompt_work(self, parts: Sequence[Part]) -> PromptWork:
        sequences = tokens = scores = of_all = 0.0
        for start, end, share, number in parts:
            share_of_all = share * number
            of_all += number * (end - start)
            if share_of_all:
                sequences, tokens = sequences + share_of_all, tokens + share_of_all * (end - start)
                scores += share_of_all * self._prompt_scores(end, start)
        return PromptWork(sequences, tokens, scores, of_all)

    def _matrices(self, prompts: PromptWork, tokens: float, expert_tokens: float) -> Step:
        """The times of the matrices of a step, and what its prompts add, as in `prompt_parts`."""
        pairs, scores, overhead, communication = prompt_parts(self.costs, prompts, tokens, expert_tokens)
        if self.exchange is not None:
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
    both = together(read, multiply, power)
    # The power of a sum may be rounded to less than its larger part.
    if read >= multiply:
        return read, both - read if both > read else 0.0
    return both - multiply if both > multiply else 0.0, multiply
