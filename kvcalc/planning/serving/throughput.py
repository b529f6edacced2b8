"""The `throughput` part of a document: one decode step, one prefill and serving, with their ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines.options import untimed
from kvcalc.model.memo import remembered_of_two
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.planning.serving.launched import with_launches
from kvcalc.records import NamedTuple
from kvcalc.server.case import Case
from kvcalc.server.dp_attention import spread_names
from kvcalc.server.weights import stored_weights
from kvcalc.throughput.constants import Regime, described_source, device_kind, has_constants, regions, weight_class
from kvcalc.throughput.power import energy_per_token
from kvcalc.throughput.roofline import SpeedModel, Step
from kvcalc.throughput.speed import (
    StoredWeights,
    hide_wide_ranges,
    judged_factor,
    outside,
    range_factors,
    speed_model,
)

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.planning.serving.served import Served
    from kvcalc.throughput.applied import Applied
    from kvcalc.throughput.hardware import Gpu

# The most speeds that are remembered for one model. Each device with figures of its own has another one.
_MOST_SPEEDS = 256


class Speed(NamedTuple):
    """A SpeedModel, the regime its constants were fitted in, the dtype of the weights, and how it was calibrated."""

    model: SpeedModel
    regime: Regime
    weight_dtype: str
    calibration: Applied | None = None


def describe_throughput(case: Case, notes: list[Note]) -> documents.Throughput | None:
    """The `throughput` part of a document: seconds and tokens per second of one replica.

    None, with a note, if they are not known. If requests are served, the case's batch is the number that fit at their
    full length.
    """
    if case.layout.has_whole_copies:
        from kvcalc.server.copies import of_all_copies, one_copy

        found = describe_throughput(one_copy(case), notes)
        return None if found is None else of_all_copies(case, found)
    speed = speed_of(case, notes)
    if isinstance(speed, str):
        notes.append(Note("throughput", "unknown", speed))
        return None
    document = describe_speed(case, speed, notes)
    applied = speed.calibration
    if applied is not None:
        near = [describe_speed(case, speed._replace(model=model), []) for model in applied.near]
        applied.narrow(document, near)
        document["calibration"] = applied.document
    hide_wide_ranges(document)
    return document


def describe_speed(case: Case, speed: Speed, notes: list[Note]) -> documents.Throughput:
    """The `throughput` part of a document for a speed that is known."""
    question = case.question.speed_asked
    context_tokens, batch_size = case.workload.context_tokens, case.workload.batch_size
    model = speed.model
    step = model.decode(batch_size, context_tokens)
    roofline = model.roofline(batch_size, context_tokens)
    unfitted = unfitted_of(case, speed, batch_size)
    is_outside = bool(unfitted)
    low, high = range_factors(model, speed.regime.ranges, speed.weight_dtype, batch_size, is_outside)
    serving = _serving_in(case, speed, (low, high), is_outside, notes)
    if unfitted:
        text = f"not fitted for {', '.join(unfitted)}: the estimate is less certain"
        notes.append(Note("throughput", "not-fitted", text))
    tokens_per_second = batch_size * model.tokens_per_step / step.seconds
    return {
        "decode_step_seconds": step.seconds,
        "decode_tokens_per_second": tokens_per_second,
        "tokens_per_second_per_sequence": model.tokens_per_step / step.seconds,
        "prefill_seconds": model.prefill(context_tokens, batch_size, question.prefix_hit_rate * context_tokens).seconds,
        "bound_by": cast(Any, step.bound_by),
        "parts": {
            "weights_seconds": step.weights,
            "kv_seconds": step.kv,
            "compute_seconds": step.compute,
            "overhead_seconds": step.overhead,
            "communication_seconds": step.communication,
        },
        "roofline_decode_step_seconds": roofline,
        "low_seconds": max(roofline, step.seconds * low),
        "high_seconds": step.seconds * high,
        "serving": serving,
        "host": _describe_host(model, batch_size, context_tokens, notes),
        "energy": _describe_energy(model, step, tokens_per_second, serving, (low, high)),
        "calibration": None,
        "evidence": _describe_evidence(speed, batch_size, unfitted),
    }


def _describe_evidence(speed: Speed, batch_size: int, outside: list[str]) -> documents.SpeedEvidence:
    """What the constants of the speed were fitted to, and how far off they were with a model's family left out."""
    regime, places = speed.regime, regions(device_kind(speed.model.gpu), weight_class(speed.weight_dtype), batch_size)
    place = next(one for one in places if one in regime.ranges)
    low, high = regime.ranges[place]
    error = (regime.evidence.get("error") or {}).get("family") or {}
    return {
        "measured_times": regime.evidence.get("rows", 0),
        "sources": [described_source(name) for name in regime.evidence.get("sources", ())],
        "mean_error": error.get("mean"),
        "median_error": error.get("median"),
        "within_a_quarter": error.get("within_25_percent"),
        "region": place,
        "low_factor": low,
        "high_factor": high,
        "outside": outside,
    }


def describe_serving(case: Case, speed: Speed, notes: list[Note]) -> documents.Serving | None:
    """The `serving` part of `describe_speed`, and its notes. None if no requests are served."""
    batch = case.workload.batch_size
    is_outside = bool(unfitted_of(case, speed, batch))
    factors = range_factors(speed.model, speed.regime.ranges, speed.weight_dtype, batch, is_outside)
    return _serving_in(case, speed, factors, is_outside, notes)


def _serving_in(
    case: Case, speed: Speed, factors: tuple[float, float], is_outside: bool, notes: list[Note]
) -> documents.Serving | None:
    if case.question.speed is None or case.question.speed.request_tokens is None:
        return None
    # Imported here because most questions are about one step and do not need it.
    from kvcalc.planning.serving.admission import serves_nothing
    from kvcalc.planning.serving.served import served

    alone = serves_nothing(case.engine.role)
    if alone is not None:
        notes.append(alone)
        return None
    found = served(case, speed.model, notes)
    if found is None:
        return None
    first = range_factors(speed.model, speed.regime.ttft_ranges, speed.weight_dtype, found.running, is_outside)
    return _describe_serving(speed.model, found, factors, first, case.question.speed.confidence)


def _describe_host(model: SpeedModel, batch: int, tokens: int, notes: list[Note]) -> documents.HostSpeed | None:
    """The `host` part: the time that a part of the model in host memory takes. None if there is none."""
    if model.host is None:
        return None
    if model.host.is_default_bandwidth:
        rate = f"{model.host.bandwidth / 1e9:g} GB/s, two channels of DDR5-5600"
        text = f"the host's memory is assumed to have {rate}; --host-bandwidth sets it"
        notes.append(Note("throughput", "host-bandwidth", text))
    return {
        "bandwidth_bytes_per_second": int(model.host.bandwidth),
        "decode_seconds": model.host_seconds(batch, tokens),
        "prefill_copied_bytes": int(model.prefill_copied_bytes(tokens, batch)),
    }


def _describe_energy(
    model: SpeedModel, step: Step, tokens_per_second: float, serving: documents.Serving | None,
    time_range: tuple[float, float],
) -> documents.Energy | None:  # fmt: skip
    """The `energy` part: per output token, of one decode step or of serving. `tokens_per_second` are the step's.

    None if the device's TDP is not known, or if the host computes a part of the model.
    """
    if model.host is not None:
        return None
    share, rate = step.compute / step.seconds, tokens_per_second
    if serving is not None:
        # Prefills are bound by operations.
        share, rate = share + (1 - share) * serving["prefill_share"], serving["tokens_per_second"]
    found = energy_per_token(model.gpu, model.layout.num_devices, share, rate, time_range)
    if found is None:
        return None
    figures = {**found._asdict(), "kwh_per_million_tokens": found.kwh_per_million_tokens}
    return cast("documents.Energy", figures)


def _describe_serving(
    model: SpeedModel, load: Served, factors: tuple[float, float], ttft_factors: tuple[float, float], confidence: int
) -> documents.Serving:
    found, (low, high) = load.serving, factors
    return {
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "input_lengths": load.lengths[0],
        "output_lengths": load.lengths[1],
        "concurrency": load.concurrency,
        "running_requests": round(load.running),
        "confidence": confidence,
        "tpot_seconds": found.tpot_seconds,
        "tpot_low_seconds": found.tpot_seconds * low,
        "tpot_high_seconds": found.tpot_seconds * high,
        "tpot_judged_seconds": found.tpot_seconds * judged_factor(high, confidence),
        "ttft_seconds": found.ttft_seconds,
        "ttft_low_seconds": found.ttft_seconds * ttft_factors[0],
        "ttft_high_seconds": found.ttft_seconds * ttft_factors[1],
        "ttft_judged_seconds": found.ttft_seconds * judged_factor(ttft_factors[1], confidence),
        "steady_ttft_seconds": found.steady_ttft_seconds,
        "random_ttft_seconds": found.random_ttft_seconds,
        "tokens_per_second": found.tokens_per_second,
        "tokens_per_second_low": found.tokens_per_second / high,
        "tokens_per_second_high": found.tokens_per_second / low,
        "tokens_per_second_per_device": found.tokens_per_second / model.layout.num_devices,
        "requests_per_second": found.requests_per_second,
        "prefill_share": found.prefill_share,
    }


def unfitted_of(case: Case, speed: Speed, batch_size: int) -> list[str]:
    """The properties of this question that the fit did not cover, as text (`throughput.speed.outside`).

    No measurement in the fit drafted tokens.
    """
    found = outside(speed.model, speed.regime, speed.weight_dtype, batch_size)
    found += untimed(case.question.engine, case.question.engine_settings or {})
    return found if case.question.speculative is None else [*found, "drafted tokens"]


@remembered_of_two
def _speeds_of(model: ModelSpec, spec: ModelSpec) -> dict[tuple[Any, ...], tuple[Speed | str, Gpu]]:
    """The speeds computed so far for this model, and the device of each, so that its id() is not reused."""
    return {}


def speed_of(case: Case, notes: list[Note]) -> Speed | str:
    """The speed of a case on its device, or the reason if it is not known.

    Cached per model, device, dtypes, layout and the engine's settings, which decide how it stores the cache. Building
    it takes a millisecond, and a step only microseconds.
    """
    asked, workload, gpu = case.question, case.workload, case.devices.gpu
    if case.engine.settings.get("split_mode") == "row":
        return "the speed of --split-mode row is not modelled"
    calibration = None if asked.speed is None else asked.speed.calibration
    key: tuple[Any, ...] = (
        asked.engine, id(gpu), workload.kv_dtype, workload.model_dtype, asked.dtype, case.engine.placement, calibration,
        workload.layout, *sorted(case.settings.items()),
    )  # fmt: skip
    if asked.speculative is not None:
        from kvcalc.server.drafting.drafter import key_of

        key += key_of(asked.speculative)
    known = _speeds_of(case.model, case.spec)
    kept = known.get(key)
    if kept is None:
        kept = _new_speed(case), gpu
        if len(known) >= _MOST_SPEEDS:
            known.clear()
        known[key] = kept
    found = kept[0]
    if isinstance(found, Speed) and found.calibration is not None:
        notes += found.calibration.notes
    return found


def _new_speed(case: Case) -> Speed | str:
    found = _speed(case)
    asked = case.question.speed
    if isinstance(found, Speed) and asked is not None and asked.calibration is not None:
        found = asked.calibration.apply(case, found)
    return _with_other_parts(case, found) if isinstance(found, Speed) else found


def _speed(case: Case) -> Speed | str:
    spec, workload, gpu = case.spec, case.workload, case.devices.gpu
    if spec.is_encoder:
        return f"{spec.name} is an encoder and does not decode"
    if not has_constants(case.question.engine):
        return f"the speed of {case.engine_name} is not known: nobody has measured it"
    if not gpu.bandwidth_bytes_per_second or not gpu.flops_per_second:
        return f"the bandwidth and FLOP/s of {gpu.name} are not known: give --gpu-bandwidth and --flops"
    stored = stored_weights(case.model, spec, case.question.dtype, workload.model_dtype)
    if not isinstance(stored, StoredWeights):
        return stored
    found, regime = speed_model(
        case.engine.attended(spec), stored, case.reads(0, spec.num_layers), gpu, case.question.engine, case.layout,
        spread_names(spec, case.engine, case.layout),
    )  # fmt: skip
    return Speed(with_launches(case, stored.weights, found), regime, stored.name)


def _with_other_parts(case: Case, speed: Speed) -> Speed | str:
    """The speed with what runs beside the model on the device: the host's part of it, and what drafts tokens."""
    if case.engine.placement is None and case.question.speculative is None:
        return speed
    stored = stored_weights(case.model, case.spec, case.question.dtype, case.workload.model_dtype)
    if not isinstance(stored, StoredWeights):
        return stored
    models = []
    for model in (speed.model, *(() if speed.calibration is None else speed.calibration.near)):
        around = _around(case, stored, model)
        if isinstance(around, str):
            return around
        models.append(around)
    first, *near = models
    mark = None if speed.calibration is None else speed.calibration._replace(near=tuple(near))
    return speed._replace(model=first, calibration=mark)


def _around(case: Case, stored: StoredWeights, model: SpeedModel) -> SpeedModel | str:
    if case.engine.placement is not None:
        from kvcalc.server.host import hosted

        model = hosted(case, case.engine.placement, stored, model)
    if case.question.speculative is None:
        return model
    from kvcalc.server.drafting.drafter import speed_of_drafting

    return speed_of_drafting(case, model)
