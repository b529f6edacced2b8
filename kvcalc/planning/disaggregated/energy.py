"""The power of both pools, and the energy of an output token."""

from __future__ import annotations

from kvcalc.planning.disaggregated.search import Split
from kvcalc.planning.lengths import Lengths
from kvcalc.throughput.power import kwh_per_million, mean_watts


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
