"""The `throughput` part of a document: one decode step, one prefill, and serving, with how sure each is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvcalc.errors import UsageError
from kvcalc.memory.workload import Workload
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.weights import stored_weights
from kvcalc.throughput.constants import Regime
from kvcalc.throughput.counts import Layout
from kvcalc.throughput.roofline import SpeedModel, Step
from kvcalc.throughput.serving import room, serve
from kvcalc.throughput.speed import StoredWeights, cache_dtype, outside, range_factors, speed_model

if TYPE_CHECKING:
    from kvcalc.throughput.calibrate import Calibration
    from kvcalc.throughput.hardware import Gpu

_KEPT_MODELS = 256


class Traffic(NamedTuple):
    """Requests to serve: `concurrency` of them in flight, None: as many as fit."""

    input_tokens: int
    output_tokens: int
    concurrency: int | None = None


class Speed(NamedTuple):
    """A SpeedModel, where its constants were fitted, the weights' type, and what must be said of it."""

    model: SpeedModel
    regime: Regime
    weight_dtype: str
    notes: tuple[str, ...]


def traffic_of(input_tokens: int | None, output_tokens: int | None, concurrency: int | None) -> Traffic | None:
    """What the options ask for; None where none was given. UsageError (exit 2) where one of two lengths is missing."""
    if input_tokens is None and output_tokens is None:
        if concurrency is not None:
            raise UsageError(
                "--concurrency needs --input-tokens and --output-tokens", "or --batch for a step of so many"
            )
        return None
    if input_tokens is None or output_tokens is None:
        missing = "--input-tokens" if input_tokens is None else "--output-tokens"
        raise UsageError(f"serving needs {missing} too", "for example --input-tokens 2k --output-tokens 500")
    return Traffic(input_tokens, output_tokens, concurrency)


def describe_throughput(
    speed: Speed | str,
    context_tokens: int,
    batch_size: int,
    traffic: Traffic | None,
    running_limit: float | None,
    warnings: list[str],
) -> dict[str, Any] | None:
    """What stands under `throughput`: seconds and tokens a second of one replica; None, with a warning, where unknown.

    `running_limit`: how many requests' caches the engine's own pool holds; None: reckoned from the device's memory.
    """
    if isinstance(speed, str):
        warnings.append(f"throughput: {speed}")
        return None
    model = speed.model
    step = model.decode(batch_size, context_tokens)
    warnings += [f"throughput: {note}" for note in speed.notes]
    unfitted = outside(model, speed.regime, speed.weight_dtype, batch_size)
    low, high = range_factors(speed.regime, bool(unfitted))
    serving = None
    if traffic is not None:
        limit = running_limit if running_limit is not None else room(model, traffic.input_tokens, traffic.output_tokens)
        serving, more = _describe_serving(speed, traffic, limit, (low, high))
        unfitted += [what for what in more if what not in unfitted]
    if unfitted:
        warnings.append(f"throughput: not fitted for {', '.join(unfitted)}: the range is wider")
    roofline = model.roofline(batch_size, context_tokens)
    return {
        "decode_step_seconds": step.seconds,
        "decode_tokens_per_second": batch_size / step.seconds,
        "tokens_per_second_per_sequence": 1 / step.seconds,
        "prefill_seconds": model.prefill(context_tokens, batch_size).seconds,
        "bound_by": step.bound_by,
        "parts": _parts(step),
        "roofline_decode_step_seconds": roofline,
        "low": max(roofline, step.seconds * low),
        "high": step.seconds * high,
        "serving": serving,
    }


def _parts(step: Step) -> dict[str, float]:
    return {
        "weights_seconds": step.weights,
        "kv_seconds": step.kv,
        "compute_seconds": step.compute,
        "overhead_seconds": step.overhead,
        "communication_seconds": step.communication,
    }


def _describe_serving(
    speed: Speed, traffic: Traffic, limit: float | None, factors: tuple[float, float]
) -> tuple[dict[str, Any], list[str]]:
    model = speed.model
    found = serve(model, traffic.input_tokens, traffic.output_tokens, traffic.concurrency, limit)
    more = outside(model, speed.regime, speed.weight_dtype, found.running)
    low, high = factors if not more else range_factors(speed.regime, True)
    running = int(found.running)
    wanted = traffic.concurrency or running
    return {
        "input_tokens": traffic.input_tokens,
        "output_tokens": traffic.output_tokens,
        "concurrency": wanted,
        "running_requests": min(running, wanted),
        "tpot_seconds": found.tpot_seconds,
        "tpot_low_seconds": found.tpot_seconds * low,
        "tpot_high_seconds": found.tpot_seconds * high,
        "ttft_seconds": found.ttft_seconds,
        "tokens_per_second": found.tokens_per_second,
        "tokens_per_second_per_device": found.tokens_per_second / model.layout.devices,
        "requests_per_second": found.requests_per_second,
        "prefill_share": found.prefill_share,
    }, more


_kept: dict[tuple[Any, ...], tuple[ModelSpec, Speed | str]] = {}


def speed_of(
    model: ModelSpec,
    spec: ModelSpec,
    workload: Workload,
    gpu: Gpu,
    engine: str,
    *,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    layout: Layout = Layout(),
    calibration: Calibration | None = None,
) -> Speed | str:
    """The speed of `spec` (bound to its workload; `model` without the what-if), or why it is not known.

    Kept, because it costs a millisecond where a step costs microseconds: one per model, device, types and layout.
    """
    # The config is one object as long as its model is kept, which the value sees to.
    key = (
        id(model.config), spec.attention, spec.layers, workload.kv_dtype, workload.model_dtype, dtype, kv_dtype,
        gpu[:3], gpu.bandwidth_bytes_per_second, gpu.memory_bytes, tuple(gpu.flops_per_second.items()), engine, layout,
        calibration,
    )  # fmt: skip
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= _KEPT_MODELS:
            _kept.clear()
        found = _kept[key] = (model, _speed(model, spec, workload, gpu, engine, dtype, kv_dtype, layout, calibration))
    return found[1]


def _speed(
    model: ModelSpec,
    spec: ModelSpec,
    workload: Workload,
    gpu: Gpu,
    engine: str,
    dtype: str | None,
    kv_dtype: str,
    layout: Layout,
    calibration: Calibration | None,
) -> Speed | str:
    if spec.is_encoder:
        return f"{spec.name} is an encoder: it never decodes"
    if not gpu.bandwidth_bytes_per_second or not gpu.flops_per_second:
        return f"the bandwidth and FLOP/s of {gpu.name} are not known: --gpu-bandwidth, --flops"
    stored = stored_weights(model, spec, dtype, workload.model_dtype)
    if not isinstance(stored, StoredWeights):
        return stored
    name = engine.partition("@")[0]
    read = cache_dtype(name, stored.name, workload.kv_dtype, kv_dtype.casefold() == "auto")
    notes = []
    if read != workload.kv_dtype:
        notes.append(
            f"TensorRT-LLM's {stored.name} checkpoints keep their cache in {read.name}, and so it is read here; "
            "--kv-dtype says otherwise"
        )
    found, regime = speed_model(spec, stored, read, gpu, name, layout)
    if calibration is not None:
        found = calibration.apply(found, stored.name)
    return Speed(found, regime, stored.name, tuple(notes))
