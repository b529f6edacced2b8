"""A layout with two pools: prefill and decode instances, their numbers, their times, and the parts of its row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, cast

from kvcalc.planning.answers.estimate import Answer
from kvcalc.planning.plan.disaggregated.instances import Instance
from kvcalc.planning.plan.disaggregated.platforms import PoolPlatforms
from kvcalc.planning.plan.disaggregated.rates import Load, Match, Pair, Times
from kvcalc.planning.plan.targets import Pools, Simulated, Simulates, Targets
from kvcalc.planning.plan.traffic import Traffic
from kvcalc.question.question import Question
from kvcalc.question.request_lengths import Lengths
from kvcalc.records import NamedTuple
from kvcalc.throughput.hardware import Devices
from kvcalc.throughput.power import kwh_per_million, mean_watts
from kvcalc.throughput.speed import known_range

if TYPE_CHECKING:
    import kvcalc.documents as documents


# The parts of the time to first token before the first decode step.
_STAGES = ("host_seconds", "queue_seconds", "prefill_seconds", "transfer_seconds")


class TwoPools(NamedTuple):
    """A layout with two pools, and the kinds of their devices.

    `transfer_bytes` are those of the busiest device. `next_layout` is the second choice, and why it was not chosen.
    `simulated` are the times and the rates that are printed.
    """

    prefill: Instance
    decode: Instance
    kinds: PoolPlatforms
    transfer_bytes: int
    match: Match
    next_layout: str | None = None
    simulated: Simulated | None = None

    @property
    def num_devices(self) -> int:
        return sum(self.devices_of(self.numbers))

    @property
    def numbers(self) -> tuple[int, int]:
        return self.match.prefills, self.match.decodes

    @property
    def key(self) -> Hashable:
        return self.kinds.names, self.prefill.shape, self.decode.shape

    @property
    def least_gain(self) -> float:
        return 1.0

    @property
    def weight(self) -> float:
        return self.kinds.weigh(self.devices_of(self.numbers))

    @property
    def cost_per_hour(self) -> float | None:
        return self.kinds.cost_per_hour(self.devices_of(self.numbers))

    def in_flight(self, simulation: Simulates, targets: Targets) -> float:
        """The requests that are in the simulated system at once."""
        times = self.match.times
        stay: float = times.ttft_seconds + self.decode.rates.output_tokens * times.tpot_seconds
        return times.requests_per_second * stay

    def ranges(self) -> dict[str, tuple[float, float, float]]:
        """The low and high ends of TTFT and TPOT, and the times that are judged."""
        return {
            metric: times_between(metric, self.prefill, self.decode, self.match.times) for metric in ("ttft", "tpot")
        }

    def times(self) -> dict[str, tuple[float, float]]:
        """The estimates of TTFT and TPOT, and the times that are judged."""
        ranges, times = self.ranges(), self.match.times
        return {"ttft": (times.ttft_seconds, ranges["ttft"][2]), "tpot": (times.tpot_seconds, ranges["tpot"][2])}

    @property
    def pair(self) -> Pair:
        """The times of both instances, without their numbers."""
        return Pair(self.prefill.rates, self.decode.rates, self.match.times.transfer_seconds)

    def at(self, numbers: tuple[int, ...], targets: Targets, *, is_trace: bool) -> TwoPools | None:
        """The same layouts with other numbers of instances. None if these cannot serve the load.

        A short run may not show that they are too busy, so the short form says so, with steps as long as judged.
        The short form counts no prefixes of a trace, and takes its busiest minute for the whole. So with a trace fewer
        instances may do, and then its figures are those of the load that they can serve.
        """
        prefills, decodes = numbers
        load = load_of(targets, self.pair)
        judged = judged_load(load, self.prefill, self.decode).requests_per_second or 0.0
        if not is_trace and judged > targets.most_busy * min(self.pair.capacities(prefills, decodes)):
            return None
        times = self.pair.times(prefills, decodes, load)
        if times is None and is_trace:
            times = self.pair.times(prefills, decodes, self.pair.busy_load(prefills, decodes))
        if times is None:
            return None
        return self._replace(match=Match(prefills, decodes, times))

    def allows(self, numbers: tuple[int, int], most: float | None) -> bool:
        """Whether these numbers of instances are allowed, and their devices count at most `most`."""
        devices = self.devices_of(numbers)
        return self.kinds.allow(devices) and (most is None or self.kinds.weigh(devices) <= most)

    def alone(self) -> TwoPools:
        return self

    def run(
        self, simulation: Simulates, targets: Targets, num_requests: int | None, step_factor: float, *, is_alone: bool
    ) -> tuple[TwoPools, Simulated]:
        questions = _question(self.prefill), _question(self.decode)
        pools = Pools(*questions, None if is_alone else self.numbers, self.kinds.link.bytes_per_second)
        return self, simulation.run_pools(pools, targets, num_requests, step_factor)

    def with_times(self, simulation: Simulates, targets: Targets, known: Simulated | None) -> TwoPools:
        """The pools with the times and the rates of their load, simulated with steps as long as they are estimated.

        `known` are these if they have been simulated.
        """
        return self._replace(simulated=known or self.run(simulation, targets, None, 1.0, is_alone=False)[1])

    def seconds(self, metric: str) -> float:
        """The mean TTFT or TPOT: simulated, or by the short form."""
        mean = None if self.simulated is None else self.simulated.times[metric]["mean"]
        return mean or float(getattr(self.match.times, f"{metric}_seconds"))

    def printed(self) -> dict[str, float | None]:
        """The times and the rates of its row. The ranges are as wide as those of the short form."""
        printed = dict[str, float | None]()
        for metric, (low, high, judged) in self.ranges().items():
            seconds = self.seconds(metric)
            longer = seconds / getattr(self.match.times, f"{metric}_seconds")
            ends = known_range(low * longer, high * longer)
            printed |= {f"{metric}_seconds": seconds, f"{metric}_judged_seconds": judged * longer}
            printed |= {f"{metric}_low_seconds": ends[0], f"{metric}_high_seconds": ends[1]}
        shortest, longest = printed["tpot_low_seconds"], printed["tpot_high_seconds"]
        tokens, tpot = self.tokens_per_second, self.seconds("tpot")
        rates = self.simulated or self.match.times
        return printed | {
            "requests_per_second": rates.requests_per_second,
            "tokens_per_second": tokens,
            "tokens_per_second_low": longest and tokens * tpot / longest,
            "tokens_per_second_high": shortest and tokens * tpot / shortest,
        }

    def ttft_parts(self) -> dict[str, float]:
        """The parts of the time to first token. The last one is what the others leave of the whole."""
        parts = {name: getattr(self.match.times, name) for name in _STAGES}
        if self.simulated is not None:
            parts |= self.simulated.stages
        return {**parts, "first_step_seconds": max(0.0, self.seconds("ttft") - sum(parts.values()))}

    def devices_of(self, numbers: tuple[int, int]) -> tuple[int, int]:
        """The devices of each pool with other numbers of instances."""
        return numbers[0] * self.prefill.shape.num_devices, numbers[1] * self.decode.shape.num_devices

    def why_more(self, best: TwoPools) -> str | None:
        used, fewer = (one.devices_of(one.numbers) for one in (self, best))
        return self.kinds.why_more(used, (best.kinds, fewer))

    def describe(self, row: Mapping[str, object], *, is_alone: bool) -> documents.PlanFinalist:
        """The row of simulated pools. Keys of a layout with one pool are null, and the numbers for requests alone."""
        pools = zip(("prefill", "decode"), self.kinds.names, self.numbers, (self.prefill, self.decode))
        shape = dict.fromkeys((*self.decode.shape.describe_all(), "replicas"))
        instances = {
            role: {
                "gpu": gpu,
                "instances": None if is_alone else number,
                **one.shape.describe_all(),
            }
            for role, gpu, number, one in pools
        }
        where = {"gpu": self.kinds.text, "engine": self.kinds.decode.engine}
        return cast("documents.PlanFinalist", {**where, **shape, **row, "disaggregated": instances})

    @property
    def tokens_per_second(self) -> float:
        """The output tokens per second of all instances: simulated, or by the short form."""
        if self.simulated is not None:
            return self.simulated.tokens_per_second
        return self.match.times.requests_per_second * float(self.decode.rates.output_tokens)

    def __str__(self) -> str:
        """The instances, such as `2 x tp 4 prefill + tp 8 decode`. Kinds of device are named if there are two."""
        pools = zip(self.numbers, (self.prefill, self.decode), ("prefill", "decode"))
        where = (f" on {name}" if self.kinds.is_mixed else "" for name in self.kinds.names)
        return " + ".join(f"{count} x {one.shape} {role}{on}" for (count, one, role), on in zip(pools, where))


def load_of(targets: Targets, pair: Pair) -> Load:
    """The load of targets. Users who think send the requests that they would if none of these waited for another."""
    clients, alone = targets.clients, None
    if clients is not None and targets.think_seconds:
        alone = pair.times(1, 1, Load(concurrency=1))
    if clients is None or alone is None:
        return Load(targets.requests_per_second, clients)
    stay = alone.ttft_seconds + pair.decode.output_tokens * alone.tpot_seconds
    return Load(clients / (targets.think_seconds + stay))


def judged_load(load: Load, prefill: Instance, decode: Instance) -> Load:
    """The load that keeps the instances as busy as the given one does if their steps are as long as they are judged."""
    if load.requests_per_second is None:
        return load
    factor = max(prefill.step_factors(1)[2], decode.step_factors(decode.rates.largest(0.0))[2])
    return load._replace(requests_per_second=load.requests_per_second * factor)


def times_between(metric: str, prefill: Instance, decode: Instance, times: Times) -> tuple[float, float, float]:
    """The low and high end of TTFT or TPOT, and the time that is judged.

    The prefill, what is waited for it, and the steps have the ranges of their engine. The transfer has none: it is the
    bytes at the rate of the link.
    """
    low, high, judged = step = decode.step_factors(times.decoding)
    if metric == "tpot":
        return times.tpot_seconds * low, times.tpot_seconds * high, times.tpot_seconds * judged
    computed = times.host_seconds + times.queue_seconds + times.prefill_seconds
    low, high, judged = (
        computed * each + times.transfer_seconds + times.first_step_seconds * other
        for each, other in zip(prefill.ttft_factors(times.prompts), step)
    )
    return low, high, judged


def _question(one: Instance) -> Question:
    """The question about an instance, without the lengths of its requests.

    It has the limit of running requests if that counts all requests in the cache. Elsewhere, those that are received
    wait beside it, and shorter ones may be more than the limit.
    """
    asked = (one.case if one.start.needs.limits_held else one.start).question
    speed = asked.speed_asked
    return asked._replace(
        devices=Devices(asked.devices.gpu, 1) if asked.devices is not None else None,
        speed=speed._replace(input_tokens=None, output_tokens=None, concurrency=None),
    )  # fmt: skip


def prompts_held(found: TwoPools) -> int:
    """The prompts in the cache of a prefill instance: those of a step, and those being sent."""
    times = found.match.times
    sent = times.requests_per_second / found.match.prefills * times.transfer_seconds
    held = times.prompts + -int(-sent // 1)
    return held if found.prefill.slots is None else min(held, found.prefill.slots)


def describe_pools(
    found: TwoPools, answers: tuple[Answer, Answer], held: tuple[int, int]
) -> dict[str, documents.SplitPool]:
    """The `prefill` and `decode` parts of a row. `answers` are the estimates with the requests `held` in each cache."""
    match, times = found.match, found.match.times
    rate, capacities = times.requests_per_second, found.pair.capacities(match.prefills, match.decodes)
    instances = zip(("prefill", "decode"), (found.prefill, found.decode))
    rows = zip(instances, (match.prefills, match.decodes), answers, held, capacities)
    return {
        role: {
            "gpu": one.case.devices.gpu.name,
            "instances": number,
            **one.shape.describe(),
            "num_devices": number * one.shape.num_devices,
            "requests_per_instance": times.prompts if role == "prefill" else times.decoding,
            "requests_held": in_cache,
            "max_requests_held": one.slots,
            "max_requests_per_second": capacity,
            "utilization": min(1.0, rate / capacity),
            "transfer_buffer_bytes": one.buffer_bytes,
            "free_bytes": one.free_bytes(answer)[0],
        }
        for (role, one), number, answer, in_cache, capacity in rows
    }


def describe_transfer(traffic: Traffic, found: TwoPools) -> documents.SplitPoolsTransfer:
    """The `transfer` part of a row."""
    return {
        "link": found.kinds.link.name,
        "bandwidth_bytes_per_second": found.kinds.link.bytes_per_second,
        "prompt_tokens": traffic.lengths.input_tokens,
        "bytes_per_device": found.transfer_bytes,
        "request_bytes": found.decode.sent.total_bytes,
        "seconds": found.match.times.transfer_seconds,
    }


def describe_energy(found: TwoPools, lengths: Lengths) -> dict[str, float]:
    """The power of all devices, and the energy of the output tokens. Empty if the device's TDP is not known.

    Prefills are bound by operations, and a prefill instance is idle between them. A decode instance is idle if no
    request decodes.
    """
    match, times = found.match, found.match.times
    gpus = found.kinds.prefill.gpu, found.kinds.decode.gpu
    prefill, decode, rates = found.prefill.shape, found.decode.shape, found.prefill.rates
    busy = times.requests_per_second / match.prefills * rates.seconds(times.prompts) / times.prompts / rates.stages
    step = found.decode.speed.model.decode(max(times.decoding, 1.0), lengths.input_tokens + lengths.output_tokens / 2)
    watts = (
        mean_watts(gpus[0], match.prefills * prefill.num_devices, 1.0, busy),
        mean_watts(gpus[1], match.decodes * decode.num_devices, step.compute / step.seconds, times.decoding),
    )
    known = [each for each in watts if each is not None]
    if len(known) < len(watts):
        return {}
    total = sum(known)
    return {"watts": total, "kwh_per_million_output_tokens": kwh_per_million(total / found.tokens_per_second)}
