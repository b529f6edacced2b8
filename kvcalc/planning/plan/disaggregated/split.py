"""A layout with two pools: prefill and decode instances, their numbers, their times, and the parts of its row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import ceil
from typing import TYPE_CHECKING, cast

from kvcalc.planning.answers.estimate import Answer
from kvcalc.planning.plan.disaggregated.instances import Instance
from kvcalc.planning.plan.disaggregated.platforms import PoolPlatforms
from kvcalc.planning.plan.disaggregated.rates import Pair
from kvcalc.planning.plan.targets import Pools, Simulated, Simulates, Targets
from kvcalc.planning.plan.traffic import Traffic, Trouble, seconds_text
from kvcalc.question.question import Question
from kvcalc.question.request_lengths import Lengths
from kvcalc.records import NamedTuple
from kvcalc.throughput.hardware import Devices
from kvcalc.throughput.power import kwh_per_million, mean_watts

if TYPE_CHECKING:
    import kvcalc.documents as documents


class TwoPools(NamedTuple):
    """A layout with two pools, and the kinds of their devices. `numbers` are those of prefill and decode instances.

    `transfer_bytes` are those of the busiest device. `next_layout` is the second choice, and why it was not chosen.
    `simulated` are the times and the rates that are printed.
    """

    prefill: Instance
    decode: Instance
    kinds: PoolPlatforms
    transfer_bytes: int
    numbers: tuple[int, int] = (1, 1)
    next_layout: str | None = None
    simulated: Simulated | None = None

    @property
    def num_devices(self) -> int:
        return sum(self.devices_of(self.numbers))

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

    @property
    def pair(self) -> Pair:
        """The times of both instances, without their numbers."""
        return Pair(self.prefill.rates, self.decode.rates, self.transfer_bytes / self.kinds.link.bytes_per_second)

    def rate(self, targets: Targets) -> float:
        """The requests per second of a load, if none of them waits for an instance."""
        if targets.clients is None:
            return targets.requests_per_second or 0.0
        decoding = 1.0 if targets.think_seconds else targets.clients / self.numbers[1]
        return targets.clients / (targets.think_seconds + self.pair.stay_seconds(decoding))

    def decoding(self, targets: Targets) -> float:
        """The mean number of requests in the batch of a decode instance (Little's law)."""
        if self.simulated is not None:
            seconds = self.decode.rates.output_tokens * (self.simulated.times["tpot"]["mean"] or 0.0)
            return float(self.simulated.requests_per_second / self.numbers[1] * seconds)
        if targets.clients_without_pause is not None:
            return targets.clients_without_pause / self.numbers[1]
        return float(self.decode.rates.decoding(self.rate(targets) / self.numbers[1]))

    def in_flight(self, simulation: Simulates, targets: Targets) -> float:
        """The requests that are in the simulated system at once."""
        return self.rate(targets) * self.pair.stay_seconds(self.decoding(targets))

    def factors(self, targets: Targets) -> dict[str, tuple[float, float, float]]:
        """The factors on TTFT and TPOT for the ends of their ranges, and for the times that are judged.

        The transfer has none: it is the bytes at the rate of the link.
        """
        sent = self.pair.transfer / self.pair.ttft_seconds
        low, high, judged = (sent + (1 - sent) * factor for factor in self.prefill.ttft_factors(1))
        return {"ttft": (low, high, judged), "tpot": self.decode.step_factors(self.decoding(targets))}

    def keeps_up(self, targets: Targets) -> bool:
        """Whether the instances serve the load with steps as long as they are judged, by the short form.

        A short run may not show a queue that grows slowly. Clients without a pause wait for each other, but all of them
        must run, and the prefill instances may slow them down only if a limit says how long they may wait.
        """
        pair, rate = self.pair, self.rate(targets)
        of_prefills, of_decodes = pair.capacities(*self.numbers)
        if targets.clients_without_pause is not None:
            all_run = targets.clients_without_pause <= self.numbers[1] * pair.decode.largest(pair.transfer)
            return all_run and (targets.limits_waiting or rate <= of_prefills)
        return rate * self._slower <= targets.most_busy * min(of_prefills, of_decodes)

    @property
    def utilization(self) -> float | None:
        """The load as a share of what the busier pool serves at most."""
        if self.simulated is None:
            return None
        return self.simulated.requests_per_second / min(self.pair.capacities(*self.numbers))

    @property
    def _slower(self) -> float:
        """The judged time of a step of the instances as a multiple of its estimate."""
        return max(self.prefill.step_factors(1)[2], self.decode.step_factors(self.decode.rates.largest(0.0))[2])

    def guessed(self, targets: Targets) -> TwoPools:
        """The pools with about as many instances as the load and its limits need."""
        pair, longest = self.pair, targets.max_tpot_seconds
        most = pair.decode.largest(pair.transfer)
        batch = max(1, min(most, self.decode.most_within(longest) or most))
        if targets.clients_without_pause is not None:
            decodes = ceil(targets.clients_without_pause / batch)
        else:
            _, within = pair.capacities(1, 1, batch)
            _, free = pair.capacities(1, 1)
            decodes = ceil(self.rate(targets) * self._slower / min(within, free * targets.most_busy))
        pools = self._replace(numbers=(1, max(1, decodes)))
        # What the limits leave for the queue. If they leave nothing, a percentile may still meet them.
        alone = pools.alone_seconds(targets)
        slack = [limit.seconds - alone[limit.metric] for limit in targets.limits if limit.metric != "tpot"]
        rate = pools.rate(targets) * self._slower
        prefills = pair.prefills(rate, min(slack) if slack and min(slack) > 0 else None, self.kinds.most[0])
        return pools._replace(numbers=(prefills, pools.numbers[1]))

    def alone_seconds(self, targets: Targets) -> dict[str, float]:
        """The judged times of a request that never waits, by metric."""
        factors, pair = self.factors(targets), self.pair
        ttft, tpot = factors["ttft"][2] * pair.ttft_seconds, factors["tpot"][2] * pair.decode.tpot(1)
        return {"ttft": ttft, "tpot": tpot, "e2e": ttft + (pair.decode.output_tokens - 1) * tpot}

    def too_slow(self, targets: Targets) -> Trouble | None:
        """The limit that a request alone misses, as it is judged."""
        seconds = self.alone_seconds(Targets(1, None))
        for limit in targets.limits:
            if seconds[limit.metric] > limit.seconds:
                text = f"{limit.metric.upper()} of one request is up to {seconds_text(seconds[limit.metric])}"
                return Trouble(f"{text}, and the limit is {seconds_text(limit.seconds)}")
        return None

    def at(self, numbers: tuple[int, ...], targets: Targets, *, is_trace: bool) -> TwoPools | None:
        """The same layouts with other numbers of instances. None if the short form says that these cannot serve.

        It counts no prefixes of a trace, and takes its busiest minute for the whole, so fewer may do for a trace.
        """
        pools = self._replace(numbers=cast("tuple[int, int]", numbers))
        return pools if is_trace or pools.keeps_up(targets) else None

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

    def describe(self, row: Mapping[str, object], *, is_alone: bool) -> documents.PlanFinalist:
        """The row of simulated pools. Keys of a layout with one pool are null, and the numbers for requests alone."""
        pools = zip(("prefill", "decode"), self.kinds.names, self.numbers, (self.prefill, self.decode))
        shape = dict.fromkeys((*self.decode.shape.describe_all(), "replicas"))
        instances = {
            role: {
                "gpu": gpu,
                "instances": None if is_alone else number,
                **instance.shape.describe_all(),
            }
            for role, gpu, number, instance in pools
        }
        where = {"gpu": self.kinds.text, "engine": self.kinds.decode.engine}
        return cast("documents.PlanFinalist", {**where, **shape, **row, "disaggregated": instances})

    def devices_of(self, numbers: tuple[int, int]) -> tuple[int, int]:
        """The devices of each pool with other numbers of instances."""
        return numbers[0] * self.prefill.shape.num_devices, numbers[1] * self.decode.shape.num_devices

    def why_more(self, best: TwoPools) -> str | None:
        used, fewer = (layout.devices_of(layout.numbers) for layout in (self, best))
        return self.kinds.why_more(used, (best.kinds, fewer))

    def __str__(self) -> str:
        """The instances, such as `2 x tp 4 prefill + tp 8 decode`. Kinds of device are named if there are two."""
        pools = zip(self.numbers, (self.prefill, self.decode), ("prefill", "decode"))
        where = (f" on {name}" if self.kinds.is_mixed else "" for name in self.kinds.names)
        return " + ".join(f"{count} x {instance.shape} {role}{on}" for (count, instance, role), on in zip(pools, where))


def _question(instance: Instance) -> Question:
    """The question about an instance, without the lengths of its requests.

    It has the limit of running requests if that counts all requests in the cache. Elsewhere, those that are received
    wait beside it, and shorter ones may be more than the limit.
    """
    question = (instance.case if instance.start.needs.limits_held else instance.start).question
    speed = question.speed_asked
    return question._replace(
        devices=Devices(question.devices.gpu, 1) if question.devices is not None else None,
        speed=speed._replace(input_tokens=None, output_tokens=None, concurrency=None),
    )  # fmt: skip


class Busy(NamedTuple):
    """What the instances of simulated pools are busy with, by Little's law: the load and the requests of each instance.

    `prompts` are those of a prefill step and `decoding` those of a decode step. `held` are the requests in the cache of
    a prefill and of a decode instance, those that are sent and received included.
    """

    requests_per_second: float
    prompts: int
    decoding: float
    held: tuple[int, int]

    @staticmethod
    def of(pools: TwoPools, simulated: Simulated, targets: Targets) -> Busy:
        """What the pools are busy with in their simulation."""
        rate, (prefills, _), pair = simulated.requests_per_second, pools.numbers, pools.pair
        prompts = max(1, min(ceil(rate / prefills * simulated.stages["prefill_seconds"]), pair.prefill.most_prompts))
        sent = prompts + ceil(rate / prefills * pair.transfer)
        decoding = pools.decoding(targets)
        received = max(1, pair.decode.held(decoding, pair.transfer))
        slots = pools.prefill.slots, pools.decode.slots
        held = (each if most is None else min(each, most) for each, most in zip((sent, received), slots))
        return Busy(rate, prompts, decoding, cast("tuple[int, int]", tuple(held)))


def describe_ttft(pools: TwoPools, simulated: Simulated) -> dict[str, float]:
    """The parts of the time to first token. The last one is what the others leave of the whole."""
    parts = {"host_seconds": pools.pair.host_seconds, **simulated.stages}
    return {**parts, "first_step_seconds": max(0.0, (simulated.times["ttft"]["mean"] or 0.0) - sum(parts.values()))}


def describe_pools(pools: TwoPools, busy: Busy, answers: tuple[Answer, Answer]) -> dict[str, documents.SplitPool]:
    """The `prefill` and `decode` parts of a row. `answers` are the estimates with the requests in each cache."""
    instances = zip(("prefill", "decode"), (pools.prefill, pools.decode), (busy.prompts, busy.decoding))
    rows = zip(instances, pools.numbers, answers, busy.held, pools.pair.capacities(*pools.numbers))
    return {
        role: {
            "gpu": instance.case.devices.gpu.name,
            "instances": number,
            **instance.shape.describe(),
            "num_devices": number * instance.shape.num_devices,
            "requests_per_instance": requests,
            "requests_held": in_cache,
            "max_requests_held": instance.slots,
            "max_requests_per_second": capacity,
            "utilization": min(1.0, busy.requests_per_second / capacity),
            "transfer_buffer_bytes": instance.buffer_bytes,
            "free_bytes": instance.free_bytes(answer)[0],
        }
        for (role, instance, requests), number, answer, in_cache, capacity in rows
    }


def describe_transfer(traffic: Traffic, pools: TwoPools) -> documents.SplitPoolsTransfer:
    """The `transfer` part of a row."""
    return {
        "link": pools.kinds.link.name,
        "bandwidth_bytes_per_second": pools.kinds.link.bytes_per_second,
        "prompt_tokens": traffic.lengths.input_tokens,
        "bytes_per_device": pools.transfer_bytes,
        "request_bytes": pools.decode.sent.total_bytes,
        "seconds": pools.pair.transfer,
    }


def describe_energy(pools: TwoPools, busy: Busy, lengths: Lengths, tokens_per_second: float) -> dict[str, float]:
    """The power of all devices, and the energy of the output tokens. Empty if the device's TDP is not known.

    Prefills are bound by operations, and a prefill instance is idle between them. A decode instance is idle if no
    request decodes.
    """
    gpus = pools.kinds.prefill.gpu, pools.kinds.decode.gpu
    prefill, decode, rates = pools.prefill.shape, pools.decode.shape, pools.prefill.rates
    (prefills, decodes), each = pools.numbers, rates.seconds(busy.prompts) / busy.prompts / rates.stages
    step = pools.decode.speed.model.decode(max(busy.decoding, 1.0), lengths.input_tokens + lengths.output_tokens / 2)
    watts = (
        mean_watts(gpus[0], prefills * prefill.num_devices, 1.0, busy.requests_per_second / prefills * each),
        mean_watts(gpus[1], decodes * decode.num_devices, step.compute / step.seconds, busy.decoding),
    )
    known = [each for each in watts if each is not None]
    if len(known) < len(watts):
        return {}
    total = sum(known)
    return {"watts": total, "kwh_per_million_output_tokens": kwh_per_million(total / tokens_per_second)}
