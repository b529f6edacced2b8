"""The time of a step if a part of the model is in host memory, as in llama.cpp (-ngl, --n-cpu-moe).

The layers run one after another, on the device or on the host, so their times add up:

    step = the device's part
         + host weights and cache / (host bandwidth x efficiency), or the operations / the host's FLOP/s if they take
           longer
         + a switch for every change between the host and the device

In a step of 32 tokens or more, the device also multiplies the weights in host memory, and copies them for every
micro-batch:

    step = the step of the device with all weights
         + bytes of the copied weights / PCIe
         + attention over the host's cache

Sources, in llama.cpp: the 32 tokens are GGML_OP_OFFLOAD_MIN_BATCH (ggml-cuda.cu). Experts that no token uses are not
copied since pull request 15346. Copies and multiplications do not overlap (ggml-org/llama.cpp#25859). Attention stays
where its cache is, because only operations on weights are moved (ggml_backend_sched_backend_id_from_cur,
ggml-backend.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcalc.throughput.counts import Counts, HostPart, bytes_of
from kvcalc.throughput.roofline import Part, SpeedModel, Step

# Steps of this many tokens copy the host's weights to the device.
COPIED_FROM_TOKENS = 32
# The share of the theoretical bandwidth that llama.cpp's CPU kernels reach while they decode. It is the one fitted
# constant here: the median of published figures is 0.41 (benchmarks/score/host_memory.py, docs/concepts/offload.md).
EFFICIENCY = 0.4
# Operations per second of a desktop CPU on quantized weights. A Core i9-13900K prefills Llama-7B at 55 tokens per
# second, each of 13.5 billion operations (ggml-org/llama.cpp#34).
FLOPS = 0.74e12
# A change between the host and the device: a copy, which takes about 10 us even if it is small, and waiting for the
# other side, taken to be as long (cs.virginia.edu/~mwb7w/cuda_support/memory_transfer_overhead.html).
SWITCH_SECONDS = 20e-6
# PCIe 4.0 x16 in one direction, used if the device's own rate is not known.
_PCIE_BYTES_PER_SECOND = 32e9
# Activations are in fp32 between backends.
_ACTIVATION_BYTES = 4


class HostedModel(SpeedModel):
    """A SpeedModel of the whole model on the device, of which the host holds and computes a part."""

    host: HostPart

    def __init__(self, whole: SpeedModel, device: Counts, host: HostPart) -> None:
        super().__init__(whole.counts, whole.gpu, whole.constants)
        self.host = host
        self._whole = whole
        self._device = SpeedModel(device, whole.gpu, whole.constants)
        self._pcie = float(whole.gpu.pcie_bytes_per_second or _PCIE_BYTES_PER_SECOND)

    def decode(self, batch: float, context_tokens: float, query_tokens: int = 1, busiest: float | None = None) -> Step:
        """One decode step of `batch` sequences. The host's reads are part of `weights` and `kv`."""
        batch = max(1.0, batch)
        tokens = batch * query_tokens
        step = self._computing(tokens).decode(batch, context_tokens, query_tokens)
        attention = self._attention(batch, context_tokens, query_tokens)
        if tokens >= COPIED_FROM_TOKENS:
            return _with(step, attention, self._copies(tokens))
        return _with(step, self._own(tokens, attention), self._moves(tokens))

    def roofline(self, batch: float, context_tokens: float, query_tokens: int = 1) -> float:
        """The ideal seconds of the same step: the device's, and then the host's at its full bandwidth."""
        batch, counts = max(1.0, batch), self.host.counts
        tokens, cache = batch * query_tokens, batch * counts.kv_read_bytes(context_tokens) / self.host.bandwidth
        if tokens >= COPIED_FROM_TOKENS:
            ideal = self._whole.roofline(batch, context_tokens, query_tokens)
            return max(ideal, _read_bytes(counts, tokens) / self._pcie) + cache
        weights = _read_bytes(counts, tokens) / self.host.bandwidth
        return self._device.roofline(batch, context_tokens, query_tokens) + weights + cache

    def prefill_work(self, tokens: float, cached_tokens: float = 0.0) -> Step:
        """The time a prompt adds to steps that run anyway. The host's weights are copied for every micro-batch."""
        work = self._computing(tokens - cached_tokens).prefill_work(tokens, cached_tokens)
        return self._prefilled(work, [Part(cached_tokens, tokens)])

    def alone(self, parts: Sequence[Part]) -> Step:
        """The time of parts of prompts and nothing else. They share the micro-batches."""
        return self._prefilled(self._computing(_tokens_of(parts)).alone(parts), parts)

    def beside(
        self, parts: Sequence[Part], batch: float, query_tokens: int = 1, busiest: float | None = None
    ) -> Step:  # fmt: skip
        """What prompts add to a decode step. If the step alone copies nothing, its weights are now copied too."""
        batch, added = max(1.0, batch), _tokens_of(parts)
        tokens = batch * query_tokens
        before, after = self._computing(tokens), self._computing(tokens + added)
        step = after.beside(parts, batch, query_tokens, busiest)
        if before is not after:
            moved = (b - a for b, a in zip(after.decode(batch, 1, query_tokens), before.decode(batch, 1, query_tokens)))
            step = Step(*(seconds + more for seconds, more in zip(step, moved)))
        host, scores = self._weights(tokens + added) - self._weights(tokens), self._scores(parts)
        return _with(step, (0.0, 0.0, scores), host)

    def _weights(self, tokens: float) -> float:
        """The seconds that the host's weights take in a step of `tokens` tokens, without attention."""
        if tokens >= COPIED_FROM_TOKENS:
            return self._copies(tokens)
        return sum(self._own(tokens, (0.0, 0.0, 0.0))) + self._moves(tokens)

    def _computing(self, tokens: float) -> SpeedModel:
        """The device's part of a step of `tokens` tokens: all weights if they are copied, else those on the device."""
        return self._whole if tokens >= COPIED_FROM_TOKENS else self._device

    def _scores(self, parts: Sequence[Part]) -> float:
        """The host's seconds for the scores of parts of prompts."""
        flops = self.host.counts.prefill_attention_flops
        return sum(part.number * (flops(part.end) - flops(part.start)) for part in parts) / FLOPS

    def _prefilled(self, step: Step, parts: Sequence[Part]) -> Step:
        """The device's `step` for parts of prompts, with the host's share."""
        together, scores = _tokens_of(parts), self._scores(parts)
        if together < COPIED_FROM_TOKENS:
            seconds = self._own(together, self._attention(together, 1))
            return _with(step, (seconds[0], 0.0, seconds[2] + scores), self._moves(together))
        return _with(step, (0.0, 0.0, scores), self._copies(together))

    def host_seconds(self, batch: float, context_tokens: float, query_tokens: int = 1) -> float:
        batch = max(1.0, batch)
        tokens, attention = batch * query_tokens, self._attention(batch, context_tokens, query_tokens)
        if tokens >= COPIED_FROM_TOKENS:
            return sum(attention) + self._copies(tokens)
        return sum(self._own(tokens, attention)) + self._moves(tokens)

    def prefill_copied_bytes(self, tokens: float, batch: int) -> float:
        """0 for a prompt that is too short to copy anything."""
        together = tokens * batch
        return self._copies(together) * self._pcie if together >= COPIED_FROM_TOKENS else 0.0

    def _own(self, tokens: float, attention: tuple[float, float, float]) -> tuple[float, float, float]:
        """The seconds in which the host reads its weights and its cache, and multiplies beyond that."""
        counts, rate = self.host.counts, self.host.bandwidth * EFFICIENCY
        weights = _read_bytes(counts, tokens) / rate
        _, kv, scores = attention
        return weights, kv, max(0.0, 2 * tokens * _elements_per_token(counts) / FLOPS - weights) + scores

    def _attention(self, batch: float, context_tokens: float, query_tokens: int = 1) -> tuple[float, float, float]:
        """The seconds of attention over the cache in host memory, like `_own`."""
        counts = self.host.counts
        kv = batch * counts.kv_read_bytes(context_tokens) / (self.host.bandwidth * EFFICIENCY)
        scores = batch * query_tokens * counts.attention_flops(context_tokens) / FLOPS
        return 0.0, kv, max(0.0, scores - kv)

    def _copies(self, tokens: float) -> float:
        """The seconds in which the host's weights are copied to the device, once for every micro-batch."""
        counts, size = self.host.counts, self.host.ubatch_tokens
        whole, rest = divmod(tokens, size)
        copied = whole * _read_bytes(counts, size) + (_read_bytes(counts, rest) if rest else 0.0)
        return copied / self._pcie

    def _moves(self, tokens: float) -> float:
        """The seconds in which activations go from the host to the device or back."""
        switch = SWITCH_SECONDS + tokens * self.host.counts.hidden_size * _ACTIVATION_BYTES / self._pcie
        return self.host.switches * switch


def _tokens_of(parts: Sequence[Part]) -> float:
    return sum(part.number * (part.end - part.start) for part in parts)


def _read_bytes(counts: Counts, tokens: float) -> float:
    """The bytes of the weights that a step of `tokens` tokens reads. The host's kernels read all types alike."""
    experts = sum(row.touched(tokens) * bytes_of(row.matrices) for row in counts.experts)
    return bytes_of(counts.dense) + bytes_of(counts.head) + experts


def _elements_per_token(counts: Counts) -> int:
    """The elements of the weights that one token is multiplied with."""
    always = sum(matrices.elements for matrices in (*counts.dense, *counts.head))
    return always + sum(row.read * matrices.elements for row in counts.experts for matrices in row.matrices)


def _with(step: Step, host: tuple[float, float, float], moved: float) -> Step:
    """`step` with the host's seconds for weights, cache and operations, and with those of transfers."""
    weights, kv, compute = host
    parts = (step.weights + weights, step.kv + kv, step.compute + compute, step.overhead, step.communication + moved)
    return Step(sum(parts), *parts)
