"""The parts of a row about both pools, the transfer between them, and their power."""

from __future__ import annotations

from typing import Any

from kvcalc.planning.estimate import Answer
from kvcalc.planning.lengths import Lengths
from kvcalc.planning.plan.disaggregated.split import Split
from kvcalc.planning.plan.traffic import Traffic
from kvcalc.throughput.power import kwh_per_million, mean_watts


def prompts_held(found: Split) -> int:
    """The prompts in the cache of a prefill instance: those of a step, and those being sent."""
    times = found.match.times
    sent = times.requests_per_second / found.match.prefills * times.transfer_seconds
    held = times.prompts + -int(-sent // 1)
    return held if found.prefill.slots is None else min(held, found.prefill.slots)


def describe_pools(found: Split, answers: tuple[Answer, Answer], held: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """The `prefill` and `decode` parts of a row. `answers` are the estimates with the requests `held` in each cache."""
    match, times = found.match, found.match.times
    rate, capacities = times.requests_per_second, found.pair.capacities(match.prefills, match.decodes)
    rows = zip(
        ("prefill", "decode"), (found.prefill, found.decode), (match.prefills, match.decodes), answers, held, capacities
    )
    return {
        role: {
            "gpu": one.case.devices.gpu.name,
            "instances": number,
            "tensor_parallel_size": one.shape.tensor,
            "pipeline_parallel_size": one.shape.stages,
            "data_parallel_size": one.shape.attention_replicas,
            "expert_parallel_size": one.case.workload.expert_parallel_size,
            "num_devices": number * one.shape.devices,
            "requests_per_instance": times.prompts if role == "prefill" else times.decoding,
            "requests_held": in_cache,
            "max_requests_held": one.slots,
            "max_requests_per_second": capacity,
            "utilization": min(1.0, rate / capacity),
            "transfer_buffer_bytes": one.buffer_bytes,
            "free_bytes": one.free_bytes(answer)[0],
        }
        for role, one, number, answer, in_cache, capacity in rows
    }


def describe_transfer(traffic: Traffic, found: Split) -> dict[str, Any]:
    """The `transfer` part of a row."""
    return {
        "link": found.kinds.link.name,
        "bandwidth_bytes_per_second": found.kinds.link.bytes_per_second,
        "prompt_tokens": traffic.lengths.input_tokens,
        "bytes_per_device": found.transfer_bytes,
        "request_bytes": found.decode.sent.total_bytes,
        "seconds": found.match.times.transfer_seconds,
    }


def describe_energy(found: Split, lengths: Lengths) -> dict[str, float]:
    """The power of all devices, and the energy of the output tokens. Empty if the device's TDP is not known.

    Prefills are bound by operations, and a prefill instance is idle between them. A decode instance is idle if no
    request decodes.
    """
    match, times = found.match, found.match.times
    gpus = found.kinds.prefill.gpu, found.kinds.decode.gpu
    prefill, rates = found.prefill.shape, found.prefill.rates
    busy = times.requests_per_second / match.prefills * rates.seconds(times.prompts) / times.prompts / rates.stages
    step = found.decode.speed.model.decode(max(times.decoding, 1.0), lengths.input_tokens + lengths.output_tokens / 2)
    watts = (
        mean_watts(gpus[0], match.prefills * prefill.devices, 1.0, busy),
        mean_watts(gpus[1], match.decodes * found.decode.shape.devices, step.compute / step.seconds, times.decoding),
    )
    known = [each for each in watts if each is not None]
    if len(known) < len(watts):
        return {}
    total = sum(known)
    return {"watts": total, "kwh_per_million_output_tokens": kwh_per_million(total / found.tokens_per_second)}
