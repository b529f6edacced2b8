"""The figures of a `runs` row: rates, shares of both roofs, the step predicted by the roofs, the time for all layers.

Also warnings about figures that are not reliable. This module is only arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvcalc.measure.devices.timing import MOST_SPREAD, Timings, describe_timings, summarize
from kvcalc.measure.layers.parts import Part, parts_of
from kvcalc.measure.layers.sharding import share_of_spec
from kvcalc.measure.layers.stack import Request
from kvcalc.measure.run import Measured
from kvcalc.measure.sizes.budget import predicted_bytes, read_bytes, used_weights_bytes
from kvcalc.model.caches import CrossAttention, RecurrentState
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.spec import ModelSpec

if TYPE_CHECKING:
    import kvcalc.documents as documents

# No part should be above this share of a roof. Below it, the difference is that of two measurements.
MOST_OF_ROOF = 1.05


def describe_run(kind: str, spec: ModelSpec, request: Request, roof: documents.MeasureRoof, measured: Measured) -> Any:
    """The row of one run of `spec` (this rank's share), without the self-check, the scaled figures and the ranks."""
    batch, bandwidth, matmul = request.batch_size, roof["read_bytes_per_second"], roof["matmul_flop_per_second"]
    decode, core = describe_timings(measured.decode), None if measured.core is None else describe_timings(measured.core)
    weights, read = used_weights_bytes(spec, request.dtype), read_bytes(spec, request)
    core_read = read_bytes(_attending(spec), request)
    core_flop = core_flop_of_step(spec, request)
    kv_rate = core_read / core["p50"] if core else None
    multiplied = weights // request.dtype.block_bytes
    if request.storage.mla == "expanded":
        # K and V of the new tokens are rebuilt with those of all tokens, in the core.
        multiplied -= sum(_rebuilding(part.shape) for part in parts_of(spec))
    products = 2 * batch * multiplied
    predicted_step = None
    if request.storage.kind == "none":
        read = 0
    else:
        # The best step that both roofs allow: projections, attention and states one after another, each limited by
        # reading or by multiplying. Without launches and links.
        predicted_step = max(weights / bandwidth, products / matmul) + max(core_read / bandwidth, core_flop / matmul)
        predicted_step += (read - core_read) / bandwidth
    of_reading = {
        "attention_core": kv_rate / bandwidth if kv_rate else None,
        "step": (weights + read) / decode["p50"] / bandwidth,
    }
    of_multiplying = {
        "attention_core": core_flop / core["p50"] / matmul if core else None,
        "step": (products + core_flop) / decode["p50"] / matmul if predicted_step else None,
    }
    return {
        "attention": kind,
        "num_layers": spec.num_layers,
        "context_tokens": request.context_tokens,
        "batch_size": batch,
        "lengths": [*request.lengths] or None,
        "predicted_bytes": predicted_bytes(spec, request),
        "held_bytes": measured.held_bytes,
        "allocator_bytes": measured.allocator_bytes,
        "expected_allocator_bytes": measured.expected_allocator_bytes,
        "decode_step_seconds": decode,
        "attention_core_seconds": core,
        "predicted_step_seconds": predicted_step,
        "tokens_per_second": batch / decode["p50"],
        "kv_read_bytes_per_second": kv_rate,
        "attention_core_flop_per_second": core_flop / core["p50"] if core else None,
        "fraction_of_roof": of_reading,
        "fraction_of_matmul_roof": {
            **of_multiplying,
            "prefill": measured.prefill["flop_per_second"] / matmul if measured.prefill else None,
        },
        "binding_roof": {what: _binding(of_reading[what], of_multiplying[what]) for what in of_reading},
        "prefill": measured.prefill,
        "memory": measured.memory,
        "backend": measured.backend,
        "backends": measured.backends,
    }


def _binding(of_reading: float | None, of_multiplying: float | None) -> documents.BindingRoof | None:
    """The roof that limits this work, which is the one it comes nearer to, and the share of it. None if not known."""
    if of_reading is None or of_multiplying is None:
        return None
    roof, fraction = max(("read", of_reading), ("matmul", of_multiplying), key=lambda row: row[1])
    return {"roof": cast(Any, roof), "fraction": fraction}


def core_flop_of_step(spec: ModelSpec, request: Request) -> int:
    """FLOP of attention in one decode step of all sequences, in all parts of `spec`."""
    mla, parts = request.storage.mla, parts_of(spec)
    return sum(number * core_flop_of(part, mla, tokens) for tokens, number in request.loads for part in parts)


def core_flop_of(part: Part, mla: str, tokens: int) -> int:
    """FLOP of attention in one decode step of one sequence: 2 x (k + v widths) for every head and attended token.

    Absorbed MLA uses the widths of the latent. Expanded MLA uses the widths of keys and values, which are rebuilt
    first.
    """
    shape = part.shape
    if not isinstance(shape, AttentionShape):
        return 0
    seen = tokens if part.window is None else min(tokens, part.window)
    if isinstance(part.cache, CrossAttention):
        seen = part.cache.encoder_tokens or 0
    absorbed, rebuilt = Attention(shape).flops(1)[0]
    if not shape.is_latent or mla == "absorbed":
        return absorbed * seen
    return (2 * _rebuilding(shape) + rebuilt) * seen


def _rebuilding(shape: object) -> int:
    """The parameters that rebuild K and V from a latent: W_UK and W_UV."""
    if not isinstance(shape, AttentionShape):
        return 0
    return shape.num_heads * shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)


def scaled(model: ModelSpec, run: ModelSpec, request: Request, taken: Timings) -> documents.RunScaled | None:
    """The figures for all layers, scaled from the layers that ran by the bytes that a step reads.

    None if all layers ran.
    """
    if run.num_layers == model.num_layers:
        return None
    whole, part = (share_of_spec(spec, request.group.size) for spec in (model, run))
    step_bytes = [used_weights_bytes(spec, request.dtype) + read_bytes(spec, request) for spec in (whole, part)]
    factor = step_bytes[0] / step_bytes[1]
    return {
        "num_layers": model.num_layers,
        "factor": factor,
        "predicted_bytes": predicted_bytes(whole, request),
        "decode_step_seconds": summarize(taken.seconds)["p50"] * factor,
    }


def above_roof(run: documents.Run, most: float = 1.0) -> list[tuple[str, str, float]]:
    """The parts of a run above `most` times a roof: the part, the roof (`read` or `matmul`), and its share of that."""
    shares = (("read", run["fraction_of_roof"]), ("matmul", run["fraction_of_matmul_roof"]))
    return [
        (part, name, share)
        for name, parts in shares
        for part, share in cast("dict[str, float | None]", parts).items()
        if share is not None and share > most
    ]


def remarks_on_runs(
    runs: list[documents.Run], roof: documents.MeasureRoof, cache_bytes: int, slack_bytes: int = 0
) -> list[str]:
    """A warning for every part that ran above its `roof`, with the cause, and for every time that varies too much.

    `cache_bytes` is the last-level cache. There is a warning too if the allocator's figure is not the expected one,
    give or take `slack_bytes` for each tensor.
    """
    remarks = []
    for run in runs:
        whose: str = run["attention"]
        if len({(r["context_tokens"], r["batch_size"]) for r in runs}) > 1:
            whose += f" at {run['context_tokens']:,} tokens, batch {run['batch_size']}"
        for part, name, share in above_roof(run, MOST_OF_ROOF):
            cause = _cause(run, part, name, share, roof, cache_bytes)
            remarks.append(f"{whose}: its {part.replace('_', ' ')} ran at {share:.0%} of the {name} roof: {cause}")
        expected, tensors = run["expected_allocator_bytes"], 8 * run["num_layers"]
        if expected is not None and not 0 <= run["allocator_bytes"] - expected <= tensors * slack_bytes:
            remarks.append(
                f"{whose}: the allocator reports {run['allocator_bytes']:,} bytes, but the tensors of the cache take "
                f"{expected:,}"
            )
        for what, times in (("step", run["decode_step_seconds"]), ("attention core", run["attention_core_seconds"])):
            if times is not None and times["spread"] > MOST_SPREAD:
                remarks.append(
                    f"{whose}: the times of its {what} vary by {times['spread']:.0%} of their median and are not "
                    "reliable; something else was running"
                )
    return remarks


def _cause(
    run: documents.Run, part: str, name: str, share: float, roof: documents.MeasureRoof, cache_bytes: int
) -> str:
    """Why a part ran above its roof. Its work is counted exactly, and its roof is the highest rate that was found."""
    times = run["attention_core_seconds"] if part == "attention_core" else run["decode_step_seconds"]
    if name == "read" and times is not None:
        size = round(share * roof["read_bytes_per_second"] * times["p50"])
        if size <= cache_bytes:
            return f"the {size:,} bytes that it reads fit in the last-level cache of {cache_bytes:,} bytes"
    return "the device was slower while the roof was measured"


def _attending(spec: ModelSpec) -> ModelSpec:
    """The model with only its attention caches, which are what the core reads."""
    kept = (
        group._replace(caches=tuple(cache for cache in group.caches if not isinstance(cache, RecurrentState)))
        for group in spec.layers
    )
    return spec._replace(layers=tuple(kept))
