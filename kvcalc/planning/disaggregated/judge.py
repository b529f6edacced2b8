"""Simulate prefill and decode on separate instances, and judge whether they meet the targets of a plan."""

from __future__ import annotations

from typing import Any

from kvcalc.notes import Note
from kvcalc.planning.disaggregated.instances import Instance
from kvcalc.planning.disaggregated.matching import Load
from kvcalc.planning.disaggregated.search import Instances, Split
from kvcalc.planning.judge import Judged, Pools, Simulates, count_requests, factors_of, simulation_decides
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.records import NamedTuple
from kvcalc.throughput.hardware import Devices


class SplitFinalist(NamedTuple):
    """Two pools that were simulated. With `is_alone`, one request after the other, on one instance of each."""

    split: Split
    judged: Judged
    is_alone: bool

    @property
    def missed(self) -> str | None:
        """The target that is missed most. None if all are met."""
        return self.judged.missed

    @property
    def rank(self) -> tuple[float, float]:
        """What the devices count, and of pools with as many, how close the times are to their targets."""
        return self.split.weight, self.judged.worst

    def describe(self, seed: int | None) -> dict[str, Any]:
        """The row in the document of `kvcalc plan`. Keys of a layout with one kind of instance are null."""
        split, kinds = self.split, self.split.kinds
        pools = zip(
            ("prefill", "decode"), kinds.names, (split.match.prefills, split.match.decodes),
            (split.prefill, split.decode),
        )  # fmt: skip
        return {
            "gpu": kinds.text,
            "engine": kinds.decode.engine,
            **dict.fromkeys(split.decode.shape.describe(1)),
            "replicas": None,
            "num_devices": None if self.is_alone else split.num_devices,
            "cost_per_hour": None if self.is_alone else split.cost_per_hour,
            **self.judged.describe(seed),
            "disaggregated": {
                role: {
                    "gpu": gpu,
                    "instances": None if self.is_alone else number,
                    **one.shape.describe(one.case.workload.expert_parallel_size),
                }
                for role, gpu, number, one in pools
            },
        }

    def __str__(self) -> str:
        return self.split.text


class SplitJudge:
    """Simulates the pools of a row. Every pair of layouts and numbers is simulated at most once."""

    def __init__(self, known: Instances, simulation: Simulates) -> None:
        self.known, self.simulation = known, simulation
        self.targets = known.traffic.targets
        self.load = Load(self.targets.requests_per_second, self.targets.concurrency)
        self._found: dict[Any, SplitFinalist] = {}
        self._num_requests = 0  # of all runs alike

    @property
    def decides(self) -> bool:
        """Whether the simulation chooses the pools."""
        return simulation_decides(self.targets, self.simulation)

    def at(self, split: Split, prefills: int, decodes: int) -> SplitFinalist | None:
        """The layouts of `split` with these numbers. None if the closed form has a queue without an end there.

        The closed form counts no prefixes of a trace, and takes its busiest minute for the whole. So with a trace fewer
        instances may do, and then its figures are those of the load that they can serve.
        """
        key = *_layouts(split), prefills, decodes
        if key not in self._found:
            moved = split.with_numbers(prefills, decodes, self.load)
            if moved is None and self.simulation.trace is not None:
                moved = split.with_numbers(prefills, decodes, split.pair.busy_load(prefills, decodes))
            if moved is None:
                return None
            self._found[key] = self._new(moved, (prefills, decodes))
        return self._found[key]

    def alone(self, split: Split) -> SplitFinalist:
        """Requests one after the other. If they are too slow, no number of instances helps."""
        key = _layouts(split)
        if key not in self._found:
            self._found[key] = self._new(split, None)
        return self._found[key]

    def notes(self) -> list[Note]:
        """What was simulated in another way than asked."""
        return list(dict.fromkeys(note for one in self._found.values() for note in one.judged.simulated.notes))

    def describe(self) -> list[dict[str, Any]]:
        """For each pair of layouts, the fewest devices that meet the targets, and the most that do not."""
        shown: dict[Any, SplitFinalist] = {}
        for one in self._found.values():
            is_met = one.missed is None
            if one.is_alone and is_met:
                continue
            key = *_layouts(one.split), is_met
            other = shown.get(key)
            if other is None or (_size(one) < _size(other)) == is_met:
                shown[key] = one
        return [one.describe(self.simulation.seed) for one in shown.values()]

    def _new(self, split: Split, numbers: tuple[int, int] | None) -> SplitFinalist:
        times = split.match.times
        stay = times.ttft_seconds + split.decode.rates.output_tokens * times.tpot_seconds
        in_flight = times.requests_per_second * stay
        self._num_requests = self._num_requests or count_requests(self.simulation, self.targets, in_flight)
        highest = split.tpot_range()[1] / times.tpot_seconds, split.ttft_range()[1] / times.ttft_seconds
        step, ttft = factors_of(highest, self.targets.confidence)
        rate = split.kinds.link.bytes_per_second
        pools = Pools(_question(split.prefill), _question(split.decode), numbers, rate)
        found = self.simulation.run_pools(pools, self.targets, self._num_requests, step)
        judged = Judged(found, step, ttft).against(self.targets, is_alone=numbers is None)
        return SplitFinalist(split, judged, numbers is None)


def _layouts(split: Split) -> tuple[Any, ...]:
    return *split.kinds.names, split.prefill.shape, split.decode.shape


def _size(one: SplitFinalist) -> int:
    return 0 if one.is_alone else one.split.num_devices


def _question(one: Instance) -> Question:
    """The question about an instance, without the lengths of its requests."""
    asked = one.case.question
    speed = asked.speed or SpeedQuestion()
    return asked._replace(
        devices=Devices(asked.devices.gpu, 1) if asked.devices is not None else None,
        speed=speed._replace(input_tokens=None, output_tokens=None, concurrency=None),
    )  # fmt: skip
