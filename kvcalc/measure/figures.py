"""What was measured, as the figures of a `runs` row: rates, shares of both roofs, what the roofs predict, what all
layers would take. Arithmetic alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcalc.measure.budget import weights_bytes_of
from kvcalc.measure.parts import Part, parts_of
from kvcalc.measure.run import Measured
from kvcalc.measure.sharding import share_of_spec
from kvcalc.measure.stack import Request
from kvcalc.measure.storage import predicted_bytes, read_bytes
from kvcalc.measure.timing import Timings, describe_timings, summarize
from kvcalc.model.caches import CrossAttention, RecurrentState
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.spec import ModelSpec


class Figures(NamedTuple):
    """One run of `spec`, this rank's share: bytes its cache must hold, and a step reads of cache and weights."""

    kind: str
    spec: ModelSpec
    request: Request
    roof: dict[str, Any]
    predicted_bytes: int
    read_bytes: int
    weights_bytes: int

    def describe(self, found: Measured) -> dict[str, Any]:
        """The row, but for the self-check, the scaled figures and the ranks."""
        request, spec, batch = self.request, self.spec, self.request.batch_size
        decode, core = describe_timings(found.decode), None if found.core is None else describe_timings(found.core)
        bandwidth, matmul = self.roof["read_bytes_per_second"], self.roof["matmul_flop_per_second"]
        core_read = read_bytes(_attending(spec), request.dtype, request.context_tokens, batch, request.storage)
        core_flop = batch * sum(core_flop_of(p, request.storage.mla, request.context_tokens) for p in parts_of(spec))
        kv_rate = core_read / core["p50"] if core else None
        is_cached = request.storage.kind != "none"
        step_bytes = self.weights_bytes + (self.read_bytes if is_cached else 0)
        return {
            "attention": self.kind,
            "num_layers": spec.num_layers,
            "context_tokens": request.context_tokens,
            "batch_size": batch,
            "predicted_bytes": self.predicted_bytes,
            "held_bytes": found.held_bytes,
            "allocator_bytes": found.allocator_bytes,
            "decode_step_seconds": decode,
            "attention_core_seconds": core,
            "predicted_step_seconds": self._step_seconds(core_read, core_flop) if is_cached else None,
            "tokens_per_second": batch / decode["p50"],
            "kv_read_bytes_per_second": kv_rate,
            "attention_core_flop_per_second": core_flop / core["p50"] if core else None,
            "fraction_of_roof": {
                "attention_core": kv_rate / bandwidth if kv_rate else None,
                "step": step_bytes / decode["p50"] / bandwidth,
            },
            "fraction_of_matmul_roof": {
                "attention_core": core_flop / core["p50"] / matmul if core else None,
                "prefill": found.prefill["flop_per_second"] / matmul if found.prefill else None,
            },
            "prefill": found.prefill,
            "memory": found.memory,
            "backend": found.backend,
            "backends": found.backends,
        }

    def _step_seconds(self, core_read: int, core_flop: int) -> float:
        """What both roofs of this run allow a step at best: projections, attention and states one after the other, each
        bound by what it reads or by what it multiplies. No launches, no links."""
        bandwidth, matmul = self.roof["read_bytes_per_second"], self.roof["matmul_flop_per_second"]
        products = 2 * self.request.batch_size * self.weights_bytes // self.request.dtype.block_bytes
        seconds: float = max(self.weights_bytes / bandwidth, products / matmul)
        seconds += max(core_read / bandwidth, core_flop / matmul)
        return seconds + float((self.read_bytes - core_read) / bandwidth)


def core_flop_of(part: Part, mla: str, tokens: int) -> int:
    """FLOP of one sequence's step of attention: 2 x (k + v widths) for every head and token seen; MLA's widths are the
    latent's where it is absorbed, else those of keys and values, which are rebuilt first."""
    shape = part.shape
    if not isinstance(shape, AttentionShape):
        return 0
    seen = tokens if part.window is None else min(tokens, part.window)
    if isinstance(part.cache, CrossAttention):
        seen = part.cache.encoder_tokens or 0
    if not shape.is_latent:
        return 2 * shape.num_heads * (shape.qk_head_dim + shape.v_head_dim) * seen
    if mla == "absorbed":
        return 2 * shape.num_heads * (2 * shape.kv_lora_rank + shape.qk_rope_head_dim) * seen
    rebuilt = shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
    return 2 * shape.num_heads * (rebuilt + shape.qk_head_dim + shape.v_head_dim) * seen


def scaled(model: ModelSpec, run: ModelSpec, request: Request, taken: Timings) -> dict[str, Any] | None:
    """What all layers would take, from those that were run, in proportion to the bytes a step reads; null where all
    were run."""
    if run.num_layers == model.num_layers:
        return None

    def step_bytes(spec: ModelSpec) -> int:
        share = share_of_spec(spec, request.group.size)
        read = read_bytes(share, request.dtype, request.context_tokens, request.batch_size, request.storage)
        return weights_bytes_of(share, request.dtype) + read

    factor = step_bytes(model) / step_bytes(run)
    share = share_of_spec(model, request.group.size)
    return {
        "num_layers": model.num_layers,
        "factor": factor,
        "predicted_bytes": predicted_bytes(
            share, request.dtype, request.context_tokens, request.batch_size, request.storage
        ),
        "decode_step_seconds": summarize(taken.seconds)["p50"] * factor,
    }


def _attending(spec: ModelSpec) -> ModelSpec:
    """The model with its caches of attention alone: what the core reads."""
    kept = (
        group._replace(caches=tuple(cache for cache in group.caches if not isinstance(cache, RecurrentState)))
        for group in spec.layers
    )
    return spec._replace(layers=tuple(kept))
