"""The smallest layout of one kind of device that serves the traffic.

A layout is a number of replicas, each split over `tensor_parallel_size` x `pipeline_parallel_size` devices, times the
DP ranks that were asked for (`--dp`). DP ranks are parts of one replica of the model. The search
uses the figures of `kvcalc estimate`: `fit` says whether the running requests fit, and `throughput.serving` says how
fast they are. More requests per replica are never faster, so bisection finds the largest number that meets the targets.
Targets for percentiles are judged by a simulation (`planning.plan.finalists`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from math import ceil, inf
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import engine_class
from kvcalc.errors import KvcalcError, LayoutError
from kvcalc.model.layout import Layout
from kvcalc.planning.plan.shapes import all_shapes, copies_asked, expert_shapes, stage_shapes, usual_shapes
from kvcalc.planning.plan.traffic import (
    MOST_RUNNING,
    Platform,
    Probe,
    Refused,
    Traffic,
    Trouble,
    probe,
    replica_of,
)
from kvcalc.question.fields import AT_RANDOM
from kvcalc.records import NamedTuple
from kvcalc.search import largest_where, smallest_where

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.planning.plan.targets import Simulated, Simulates, Targets

# A time, the ends of its range, which are null if they are not known, and what is judged.
ENDS = ("", "low_", "high_", "judged_")
# The most replicas that are simulated together: at a rate, and for clients.
_FEW_REPLICAS, _FEW_OF_CLIENTS = 4, 8
# A queue of this share beside the requests that run keeps a replica of a job busy.
_MORE_THAN_RUN = 1.25
# The rounds by which `_needs_more` approaches the requests that run together.
_MOST_ROUNDS = 4
WORTH_IT = 1.02
"""A layout is faster than another one, or has more headroom, if it is so by this factor."""


class OnePool(NamedTuple):
    """A layout with one pool, of replicas.

    `next_layout` is the second choice, and why it was not chosen. `most_running` is the limit of running requests of an
    DP rank in the simulation, None without one. `simulated` are the times and the rates that are printed.
    """

    traffic: Traffic
    kind: Platform
    shape: Layout
    replicas: int
    probe: Probe
    next_layout: str | None = None
    most_running: int | None = None
    simulated: Simulated | None = None

    @property
    def key(self) -> Layout:
        return self.shape

    @property
    def numbers(self) -> tuple[int]:
        return (self.replicas,)

    @property
    def num_devices(self) -> int:
        """The devices of all replicas, the spare ones too."""
        return (self.replicas + self.traffic.spare_replicas) * self.shape.num_devices

    @property
    def utilization(self) -> float | None:
        """The load as a share of what the replicas serve at most, without limits on their times.

        None for clients who do not think: they keep any number of replicas busy.
        """
        targets = self.traffic.targets
        rate = targets.requests_per_second
        if targets.think_seconds and self.simulated is not None:
            rate = self.simulated.requests_per_second
        replica = Replica(self.traffic, self.kind, self.shape)
        return (
            None if rate is None else rate / (self.replicas * replica.full(self.probe).serving["requests_per_second"])
        )

    @property
    def least_replicas(self) -> int:
        """The fewest replicas that may serve the load, by the short form: those that keep up with a rate.

        If no limit is on the time in the queue, they run all clients at once.
        """
        targets = self.traffic.targets
        if targets.deadline_seconds is not None or (targets.clients is not None and targets.limits_waiting):
            return 1
        free = smallest(self.traffic.without_limits(), self.kind, self.shape)
        return free.replicas if isinstance(free, OnePool) else self.replicas

    @property
    def least_gain(self) -> float:
        """How many times as fast it must be as others. Another way to split experts must be faster by 2 %."""
        return 1.0 if self.shape.is_plain else WORTH_IT

    @property
    def weight(self) -> float:
        """What the devices count when layouts are compared."""
        return self.num_devices

    @property
    def cost_per_hour(self) -> float | None:
        return None if self.kind.price is None else self.kind.price * self.num_devices

    def in_flight(self, simulation: Simulates, targets: Targets) -> float:
        """The requests that are in the simulated system at once."""
        return self.together(simulation, targets) * self.probe.running

    def factors(self, targets: Targets) -> dict[str, tuple[float, float, float]]:
        """The factors on TTFT and TPOT for the ends of their ranges, and for the times that are judged."""
        serving: Any = self.probe.serving
        times = {metric: [serving[f"{metric}_{end}seconds"] for end in ENDS] for metric in ("ttft", "tpot")}
        return {
            metric: ((low or 0.0) / estimate, (high or inf) / estimate, judged / estimate)
            for metric, (estimate, low, high, judged) in times.items()
        }

    def at(self, numbers: tuple[int, ...], targets: Targets | None = None, *, is_trace: bool = False) -> OnePool:
        """The layout with the short form's figures for another number of replicas."""
        (replicas,) = numbers
        if self.replicas == replicas:
            return self
        # The shape is known to hold a request, but may be too slow for the load.
        replica = Replica(self.traffic.without_limits(), self.kind, self.shape)
        return self._replace(replicas=replicas, probe=replica.whole(replica.running(replicas, replica.most_running())))

    def most_replicas(self, num_devices: int) -> int:
        """The most replicas on `num_devices` devices. In a closed loop, every replica has a client."""
        most = num_devices // self.shape.num_devices - self.traffic.spare_replicas
        clients = self.traffic.targets.clients
        return max(0, most if clients is None else min(most, clients))

    def alone(self) -> OnePool:
        """The layout for requests one after the other."""
        return self.at((1,))

    def run(
        self, simulation: Simulates, targets: Targets, num_requests: int | None, step_factor: float, *, is_alone: bool
    ) -> tuple[OnePool, Simulated]:
        """The layout with what its simulation says, and the simulation."""
        number = 1 if is_alone else self.together(simulation, targets)
        if targets.deadline_seconds is not None and not is_alone:
            targets = targets._replace(concurrency=self.job_clients, requests_per_second=None)
        elif number < self.replicas and not is_alone:
            targets = targets.of_share(number / self.replicas)
        # Whole copies of a model are servers of their own.
        copy, copies = self.shape.one_copy, self.shape.num_devices // self.shape.one_copy.num_devices
        question = replica_of(self.traffic, self.kind, copy, number * copies)
        question = question._replace(context_tokens=self.traffic.context_for(self.kind.engine))
        simulated = simulation.run(question, targets, None if is_alone else number * copies, num_requests, step_factor)
        simulated = simulated.times_as_many(self.replicas / number)
        return self._replace(most_running=simulated.most_running), simulated

    @property
    def job_clients(self) -> int:
        """How many requests of a job each replica holds at once.

        These are more than it runs at once, unless the job has fewer.
        """
        most = self.probe.most_running(None)
        return min(ceil(_MORE_THAN_RUN * most), ceil((self.traffic.targets.num_requests or 1) / self.replicas))

    def together(self, simulation: Simulates, targets: Targets) -> int:
        """The replicas that are simulated together. Of many, a few have their share (`Targets.of_share`).

        That is exact for one of the replicas whose requests arrive at random. Of clients, a router sends some replicas
        more than others. A number of requests that was asked for is that of all replicas.
        """
        if targets.deadline_seconds is not None:
            return 1
        has_order = simulation.trace is not None or simulation.router != AT_RANDOM
        if has_order or simulation.num_requests is not None or self.replicas <= _FEW_REPLICAS:
            return self.replicas
        return 1 if targets.clients is None else min(self.replicas, _FEW_OF_CLIENTS)

    def why_more(self, best: OnePool) -> str | None:
        """What it takes more than the best layout. None if it does not."""
        return (
            more_devices(self.kind, self.num_devices, best.num_devices) if self.num_devices > best.num_devices else None
        )

    def describe(self, row: Mapping[str, object], *, is_alone: bool) -> documents.PlanFinalist:
        """The row of a simulated layout. The number of replicas is null for requests alone."""
        where = {"gpu": self.kind.gpu.name, "engine": self.kind.engine}
        layout = {**self.shape.describe_all(), "replicas": None if is_alone else self.replicas}
        return cast("documents.PlanFinalist", {**where, **layout, **row, "disaggregated": None})

    @property
    def tokens_per_second(self) -> float:
        """The output tokens per second of all replicas."""
        return self.replicas * float(self.probe.serving["tokens_per_second"])

    def __str__(self) -> str:
        return f"{self.replicas} x {self.shape}" if self.replicas > 1 else str(self.shape)


class Found(NamedTuple):
    """The layouts that serve the traffic, the best first, and why the largest of the others does not, or None."""

    layouts: list[OnePool]
    trouble: Trouble | None


def find_layouts(traffic: Traffic, kind: Platform, keep: int = 2) -> Iterator[Found]:
    """The layouts that serve the traffic, for each list of shapes. A list is tried only if the next one is asked for.

    With all layouts, those that cannot be among the best `keep` are left out.
    """
    if traffic.refusal is not None:
        yield Found([], traffic.refusal)
        return
    trouble = None
    for shapes in _lists_of_shapes(traffic, kind):
        layouts = _layouts(traffic, kind, shapes, keep)
        trouble = layouts.trouble or trouble
        yield layouts._replace(trouble=trouble)
    if trouble is None and traffic.question.data_parallel_size > 1:
        # Raises the reason why there can be no DP ranks.
        probe(traffic, kind, copies_asked(traffic.question, kind.engine).with_experts(None), 1)


def shapes_of(traffic: Traffic, kind: Platform) -> list[Layout]:
    """All shapes of `find_layouts` for which there are enough devices."""
    return [shape for shapes in _lists_of_shapes(traffic, kind) for shape in shapes]


def _lists_of_shapes(traffic: Traffic, kind: Platform) -> Iterator[list[Layout]]:
    if not engine_class(kind.engine).splits_heads:
        lists = iter([stage_shapes(kind.gpu, kind.engine)])
    elif traffic.all_layouts:
        lists = iter([all_shapes(kind.gpu, traffic.question, kind.engine)])
    elif traffic.divides_experts(kind.engine):
        lists = expert_shapes(kind.gpu, traffic.question, kind.engine)
    else:
        lists = usual_shapes(kind.gpu, traffic.question, kind.engine)
    for shapes in lists:
        yield [shape for shape in shapes if shape.num_devices <= kind.max_devices]


def _layouts(traffic: Traffic, kind: Platform, shapes: list[Layout], keep: int) -> Found:
    layouts: list[OnePool] = []
    trouble = refused = None
    for shape in shapes:
        most = None
        if traffic.has_many_layouts(kind.engine) and len(layouts) >= keep:
            most = layouts[keep - 1].num_devices
            if shape.num_devices > most:
                break
        layout = smallest(traffic, kind, shape, most)
        if isinstance(layout, OnePool):
            layouts.append(layout)
            layouts.sort(key=devices_then_speed)
        elif isinstance(layout, Refused):
            refused = refused or layout
        else:
            trouble = layout or trouble
    return Found(layouts, trouble or (None if layouts else refused))


def as_many_devices(slower: float, faster: float) -> str:
    """Why a layout lost that needs the same number of devices: by its tokens per second, if it is slower by 2 %."""
    is_slower = slower * WORTH_IT < faster
    speed = f"{slower:,.0f} tokens per second, not {faster:,.0f}" if is_slower else "as fast"
    return f"same number of devices, {speed}"


def more_devices(kind: Platform, num_devices: int, fewer: int) -> str:
    """A larger number of devices than `fewer`, and their price if it is known."""
    cost = "" if kind.price is None else f", {kind.price * num_devices:,.2f} per hour"
    return f"{num_devices:,} devices instead of {fewer:,}{cost}"


def devices_then_speed(layout: OnePool) -> tuple[int, float]:
    """The order of layouts by the short form."""
    return layout.num_devices, -layout.tokens_per_second / layout.least_gain


def smallest(
    traffic: Traffic, kind: Platform, shape: Layout, most_devices: int | None = None
) -> OnePool | Trouble | None:
    """The fewest replicas of this shape, or why it does not serve.

    None if more than `most_devices` are needed, or if a part that nobody asked for is refused.
    """
    replica = Replica(traffic, kind, shape)
    try:
        alone = replica.whole(1)
    except LayoutError as error:
        return Refused(error.message, error.hint)
    except KvcalcError:
        # What is refused for a part that nobody asked for does not refuse the model.
        stages = shape.pipeline_parallel_size > 1 and not engine_class(kind.engine).splits_heads
        if stages or not shape.is_plain:
            return None
        raise
    if alone.trouble is not None:
        return alone.trouble._replace(reason=f"{shape}: {alone.trouble.reason}")
    if most_devices is not None and replica.needs_more(alone, most_devices // shape.num_devices):
        return None
    most = replica.most_running()
    replicas = ceil(
        replica.clients / replica.held(most) if replica.clients else replica.rate / replica.at(most).judged_rate
    )
    if replica.rate:
        replicas = max(replicas, ceil(replica.rate / replica.full(alone).judged_rate / traffic.most_busy))
    needed = (replicas + traffic.spare_replicas) * shape.num_devices
    if needed > kind.max_devices:
        more = f"--gpu {kind.gpu.name}x{needed}" if kind.is_named_limit else f"--max-gpus {needed}"
        reason = f"{replicas:,} replicas of {shape} need {needed:,} devices, but the limit is {kind.max_devices:,}"
        return Trouble(reason, more)
    return OnePool(traffic, kind, shape, replicas, replica.whole(replica.running(replicas, most)))


class Replica:
    """One replica of a shape, with any number of running requests. Each number is computed once.

    `rate` and `clients` are those of all replicas, and `wanted` is the largest number of running requests worth trying.
    """

    def __init__(self, traffic: Traffic, kind: Platform, shape: Layout) -> None:
        self._traffic, self._kind, self._shape = traffic, kind, shape
        self.rate, self.clients = traffic.targets.requests_per_second or 0.0, traffic.targets.clients
        self._think = traffic.targets.think_seconds
        self.wanted = self.clients or MOST_RUNNING * shape.data_parallel_size
        self.at: Callable[[int], Probe] = lru_cache(maxsize=None)(partial(probe, traffic, kind, shape, is_brief=True))

    def held(self, running: int) -> float:
        """The clients of a replica: those whose requests run, and those who think (Little's law)."""
        return running + (self._think * self.rate_at(running) if self._think else 0.0)

    def whole(self, running: int) -> Probe:
        """The replica with the whole answer, not only what a search needs."""
        return probe(self._traffic, self._kind, self._shape, running)

    def rate_at(self, running: int) -> float:
        """The requests per second that it serves."""
        return self.at(running).serving["requests_per_second"]

    def needs_more(self, alone: Probe, replicas: int) -> bool:
        """Whether the load certainly needs more than `replicas` replicas. It takes a few probes, `smallest` dozens.

        By Little's law, a replica runs its share of the rate times the seconds that a request stays, which grow with
        the running requests. So at least that many requests must run together and meet the targets.
        """
        if self._think:
            return replicas * self.held(self.most_running()) < (self.clients or 0)
        if self.clients is not None:
            return self.at(-(-self.clients // replicas)).trouble is not None
        running, probed = 1, alone
        for _ in range(_MOST_ROUNDS):
            needed = ceil(self.rate / replicas * running / probed.serving["requests_per_second"])
            if needed <= running:
                return False
            running = needed
            if running > self.wanted:
                return True
            probed = self.at(running)
            if probed.trouble is not None:
                return True
        return False

    def full(self, any_probe: Probe) -> Probe:
        """The replica with as many requests as the memory holds, without limits on their times. `any_probe` is any."""
        most = min(self.wanted, max(any_probe.running, any_probe.memory.fit["max_batch_size"] or 0))
        full = probe(self._traffic.without_limits(), self._kind, self._shape, most, is_brief=True)
        return any_probe if full.trouble is not None else full

    def running(self, replicas: int, most: int) -> int:
        """The fewest running requests, and at most `most`, with which `replicas` replicas serve the load."""
        if self.clients is not None and (not self._think or replicas * self.held(most) < self.clients):
            return min(-(-self.clients // replicas), most)
        if self.clients is not None:
            each = self.clients / replicas
            return smallest_where(lambda running: self.held(running) >= each, 1, most)
        if replicas * self.rate_at(most) < self.rate:
            return most
        # Fewer concurrent requests may also reach the rate, and each is answered sooner.
        return smallest_where(lambda running: replicas * self.rate_at(running) >= self.rate, 1, most)

    def most_running(self) -> int:
        """The most requests that are served within the targets, at most `wanted`. It is known to serve one."""
        if self.at(self.wanted).trouble is None:
            return self.wanted
        return largest_where(lambda running: self.at(running).trouble is None, 1, self.wanted)
