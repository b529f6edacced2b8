"""The `throughput` part of a document: one decode step, one prefill and serving, with their ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines.options import untimed
from kvcalc.notes import Note
from kvcalc.server.admission import serves_nothing
from kvcalc.server.case import Case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.throughput.constants import described_source, device_kind, regions, weight_class
from kvcalc.throughput.power import energy_per_token
from kvcalc.throughput.roofline import SpeedModel, Step
from kvcalc.throughput.speed import (
    Gap,
    gap_note,
    hide_wide_ranges,
    judged_factor,
    outside,
    range_factors,
)

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.question.question import SpeedQuestion
    from kvcalc.simulation.served import Served


def describe_throughput(case: Case, notes: list[Note]) -> documents.Throughput | None:
    """The `throughput` part of a document: seconds and tokens per second of one replica.

    None, with a note, if they are not known. If requests are served, the case's batch is the number that fit at their
    full length.
    """
    if case.layout.has_whole_copies:
        from kvcalc.server.copies import of_all_copies, one_copy

        throughput = describe_throughput(one_copy(case), notes)
        return None if throughput is None else of_all_copies(case, throughput)
    speed = speed_of(case, notes)
    if isinstance(speed, str):
        notes.append(Note("throughput", "unknown", speed))
        return None
    document = describe_speed(case, speed, notes)
    applied = speed.calibration
    if applied is not None:
        short = in_short_form(case)
        near = [describe_speed(short, speed._replace(model=model), []) for model in (speed.model, *applied.near)]
        applied.narrow(document, near[0], near[1:])
        document["calibration"] = applied.document
    hide_wide_ranges(document)
    return document


def in_short_form(case: Case) -> Case:
    """The case whose load, if it has one, is answered by the short form."""
    speed = case.question.speed
    if speed is None:
        return case
    return case._replace(question=case.question._replace(speed=speed._replace(short_form=True)))


def describe_speed(case: Case, speed: Speed, notes: list[Note]) -> documents.Throughput:
    """The `throughput` part of a document for a speed that is known."""
    question = case.question.speed_asked
    context_tokens, batch_size = case.workload.context_tokens, case.workload.batch_size
    model = speed.model
    step = model.decode(batch_size, context_tokens)
    roofline = model.roofline(batch_size, context_tokens)
    gaps = gaps_of(case, speed, batch_size)
    low, high = range_factors(model, speed.regime.ranges, speed.weight_dtype, batch_size, gaps)
    serving = _serving_in(case, speed, (low, high), gaps, notes)
    if gaps:
        notes.append(gap_note(gaps))
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
        "evidence": _describe_evidence(speed, batch_size, gaps),
    }


def _describe_evidence(speed: Speed, batch_size: int, gaps: list[Gap]) -> documents.SpeedEvidence:
    """What the constants of the speed were fitted to, and how far off they were with a model's family left out."""
    regime, places = speed.regime, regions(device_kind(speed.model.gpu), weight_class(speed.weight_dtype), batch_size)
    place = next(region for region in places if region in regime.ranges)
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
        "outside": [gap.text for gap in gaps],
    }


def describe_serving(case: Case, speed: Speed, notes: list[Note]) -> documents.Serving | None:
    """The `serving` part of `describe_speed`, and its notes. None if no requests are served."""
    batch = case.workload.batch_size
    gaps = gaps_of(case, speed, batch)
    factors = range_factors(speed.model, speed.regime.ranges, speed.weight_dtype, batch, gaps)
    return _serving_in(case, speed, factors, gaps, notes)


def _serving_in(
    case: Case, speed: Speed, factors: tuple[float, float], gaps: list[Gap], notes: list[Note]
) -> documents.Serving | None:
    if case.question.speed is None or case.question.speed.request_tokens is None:
        return None
    alone = serves_nothing(case.engine.role)
    if alone is not None:
        notes.append(alone)
        return None
    load: Served | None
    # Imported here because most questions are about one step and do not need it.
    if case.question.speed.short_form:
        from kvcalc.planning.answers.short_form import short_form_of

        load = short_form_of(case, speed.model, notes)
    else:
        from kvcalc.simulation.served import serve_load

        load = serve_load(case, speed.model, notes)
    if load is None:
        return None
    first = range_factors(speed.model, speed.regime.ttft_ranges, speed.weight_dtype, load.running, gaps)
    return _describe_serving(speed.model, load, factors, first, case.question.speed)


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
    energy = energy_per_token(model.gpu, model.layout.num_devices, share, rate, time_range)
    if energy is None:
        return None
    figures = {**energy._asdict(), "kwh_per_million_tokens": energy.kwh_per_million_tokens}
    return cast("documents.Energy", figures)


def _describe_serving(
    model: SpeedModel, load: Served, factors: tuple[float, float], ttft_factors: tuple[float, float],
    speed: SpeedQuestion,
) -> documents.Serving:  # fmt: skip
    low, high = factors
    return {
        "input_tokens": round(load.prompt.mean_tokens),
        "output_tokens": round(load.answer.mean_tokens),
        "input_lengths": load.prompt.text,
        "output_lengths": load.answer.text,
        "longest_tokens": load.prompt.longest_tokens + load.answer.longest_tokens,
        "concurrency": load.clients,
        "is_benchmark": speed.benchmark,
        "running_requests": round(load.running),
        "confidence": speed.confidence,
        "tpot_seconds": load.tpot_seconds,
        "tpot_low_seconds": load.tpot_seconds * low,
        "tpot_high_seconds": load.tpot_seconds * high,
        "tpot_judged_seconds": load.tpot_seconds * judged_factor(high, speed.confidence),
        "ttft_seconds": load.ttft_seconds,
        "ttft_low_seconds": load.ttft_seconds * ttft_factors[0],
        "ttft_high_seconds": load.ttft_seconds * ttft_factors[1],
        "ttft_judged_seconds": load.ttft_seconds * judged_factor(ttft_factors[1], speed.confidence),
        "tokens_per_second": load.tokens_per_second,
        "tokens_per_second_low": load.tokens_per_second / high,
        "tokens_per_second_high": load.tokens_per_second / low,
        "tokens_per_second_per_device": load.tokens_per_second / model.layout.num_devices,
        "requests_per_second": load.requests_per_second,
        "prefill_share": load.prefill_share,
    }


def gaps_of(case: Case, speed: Speed, batch_size: float) -> list[Gap]:
    """The properties of this question that the fit did not cover (`throughput.speed.outside`).

    No measurement in the fit drafted tokens.
    """
    gaps = outside(speed.model, speed.regime, speed.weight_dtype, batch_size)
    gaps += map(Gap, untimed(case.question.engine, case.question.engine_settings or {}))
    return gaps if case.question.speculative is None else [*gaps, Gap("drafted tokens")]
