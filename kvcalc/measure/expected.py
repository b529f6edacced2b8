"""How long a run will take, from its bytes and operations and the roofs of the device. Only for the progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.measure.devices.device import last_level_cache_bytes
from kvcalc.measure.figures import core_flop_of, core_flop_of_step
from kvcalc.measure.layers.parts import parts_of
from kvcalc.measure.layers.stack import Request
from kvcalc.measure.progress import PlannedRun
from kvcalc.measure.run import WARM_UP_STEPS
from kvcalc.measure.sizes.budget import predicted_bytes, prompt_of, read_bytes, weights_bytes_of
from kvcalc.model.spec import ModelSpec

if TYPE_CHECKING:
    import kvcalc.documents as documents

# Shares of the roofs that such work usually reaches.
_READING, _MULTIPLYING = 0.5, 0.5
# Bytes are written once from a block of random numbers, or drawn on the device.
_WRITING, _DRAWING = 0.25, 0.05
# The calls of each kernel when kernels are compared.
_CALLS, _KERNELS = 9, 3
# Compiling kernels for the first run of a kind: three in Triton, at 1 to 2 seconds each on an Epyc, and flex_attention.
COMPILE_SECONDS = {"cuda": 15.0}


def planned_run(
    kind: str, spec: ModelSpec, request: Request, roof: documents.MeasureRoof, is_first: bool
) -> PlannedRun:
    """The run of `spec`, this rank's share, with the expected seconds of its phases. The first of its kind compiles."""
    reading = _READING * roof["read_bytes_per_second"]
    multiplying = _MULTIPLYING * roof["matmul_flop_per_second"]
    weights, read = weights_bytes_of(spec, request.dtype), read_bytes(spec, request)
    weight_flop = 2 * weights / request.dtype.block_bytes
    attending = sum(core_flop_of(part, request.storage.mla, request.context_tokens) for part in parts_of(spec))
    core = max(read / reading, core_flop_of_step(spec, request) / multiplying)
    step = max(weights / reading, request.batch_size * weight_flop / multiplying) + core
    flush = 2 * last_level_cache_bytes(request.device) / roof["read_bytes_per_second"]
    prompt = prompt_of(request)
    prefill = prompt.batch_size * prompt.context_tokens * (weight_flop + attending / 2) / multiplying
    steps = request.steps + WARM_UP_STEPS
    longest = "up to " if request.lengths else ""
    title = f"{kind.upper()}, {longest}{request.context_tokens:,} tokens, batch {request.batch_size}"
    compiling = COMPILE_SECONDS.get(request.device.type, 0.0) if is_first else 0.0
    made = weights / (_WRITING * roof["read_bytes_per_second"])
    if request.storage.kind == "none":
        return PlannedRun(title, {"weights": made, "decode": request.steps * prefill})
    seconds = {
        "weights": made,
        "prefill": prefill,
        "fill the cache": predicted_bytes(spec, request) / (_DRAWING * roof["read_bytes_per_second"]),
        "compare kernels": compiling + _KERNELS * _CALLS * (core / max(1, spec.num_layers) + flush),
        "decode": steps * (step + flush),
        "attention core": steps * (core + flush),
    }
    return PlannedRun(title, seconds)
