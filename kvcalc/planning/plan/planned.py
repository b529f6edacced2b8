"""The requests of a plan, simulated: how `kvcalc plan` judges a percentile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from kvcalc.notes import Note
from kvcalc.planning.answers.simulate import simulate
from kvcalc.planning.plan.targets import Pools, Simulated, Targets
from kvcalc.question.lengths import Distribution, lengths_of, parse_distribution
from kvcalc.question.question import Question
from kvcalc.question.request_lengths import Lengths
from kvcalc.records import NamedTuple
from kvcalc.simulation.loads.load import MEANS, Load
from kvcalc.simulation.loads.recorded import Recording, record

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.simulation.fleet import Progress

# Requests that arrive this many seconds apart never run together.
_APART_SECONDS = 1e5


class PlannedLoad(NamedTuple):
    """Requests that arrive at random at the rate of a plan, in a closed loop, or as in a `recording`.

    `pairs` are the prompt and answer tokens of the requests in a file, from which requests are drawn; without them, all
    requests have the mean `lengths`. A recording has both, and its number of requests is `num_requests`. `router` says
    which replica gets a request; separate instances get them in turn. `progress` is called with the finished requests
    of each run.
    """

    lengths: Lengths
    pairs: Sequence[tuple[int, int]] | None = None
    burstiness: float = 1.0
    seed: int | None = 0
    num_requests: int | None = None
    recording: Recording | None = None
    router: str = "random"
    progress: Progress | None = None

    @property
    def trace(self) -> documents.PlanTrace | None:
        """See `planning.plan.targets.Simulates`."""
        return None if self.recording is None else self.recording.describe()

    @property
    def notes(self) -> Sequence[Note]:
        """See `planning.plan.targets.Simulates`."""
        return () if self.recording is None else self.recording.notes

    def seeded(self, more: int) -> PlannedLoad:
        """See `planning.plan.targets.Simulates`. A recording has no seed."""
        return self if self.seed is None else self._replace(seed=self.seed + more)

    def rated(self, targets: Targets) -> Targets:
        """The targets with the rate of the busiest minute of the recording."""
        if self.recording is None:
            return targets
        return targets._replace(requests_per_second=self.recording.peak_requests_per_second)

    def run(
        self, question: Question, targets: Targets, replicas: int | None, num_requests: int | None, step_factor: float
    ) -> Simulated:
        """See `planning.plan.targets.Simulates`."""
        load, is_open = self._load(
            targets, num_requests, is_alone=replicas is None, has_prefix=question.reuse is not None
        )
        load = load._replace(router=self.router)
        if question.fits_context:  # the server chooses a context that fits, which no request exceeds
            question = question._replace(context_tokens=None, fits_context=False)
        document = simulate(
            question, load, replicas=replicas or 1, step_factor=step_factor, progress=self.progress,
            is_detailed=False, assumes=True,
        )  # fmt: skip
        return simulated_of(document, is_open)

    def run_pools(self, pools: Pools, targets: Targets, num_requests: int | None, step_factor: float) -> Simulated:
        """See `planning.plan.targets.Simulates`."""
        from kvcalc.planning.answers.simulate_pools import Prefills, simulate_pools

        other, (prefills, decodes) = pools.prefill, pools.numbers or (1, 1)
        load, is_open = self._load(
            targets, num_requests, is_alone=pools.numbers is None, has_prefix=other.reuse is not None
        )
        # The simulation is asked about decode instances, with what prefill instances find and the settings of both.
        reuse = None if other.reuse is None else other.reuse._replace(transfer=None)
        rate = 0.0 if other.speed is None else other.speed.prefix_hit_rate
        speed = pools.decode.speed_asked._replace(prefix_hit_rate=rate)
        question = pools.decode._replace(
            context_tokens=None, reuse=reuse, speed=speed, engine_settings=other.engine_settings
        )
        instances = Prefills(
            prefills, pools.transfer, other.layout, other.engine_settings or {},
            None if other.devices is None else other.devices.gpu,
        )  # fmt: skip
        document = simulate_pools(
            question, load, instances, replicas=decodes, step_factor=step_factor, progress=self.progress,
            is_detailed=False,
        )  # fmt: skip
        prefill = document["prefill"]
        stages = {
            "queue_seconds": prefill["mean_queue_seconds"],
            "prefill_seconds": prefill["mean_prefill_seconds"],
            "transfer_seconds": prefill["mean_transfer_seconds"],
        }
        return simulated_of(document, is_open)._replace(stages=stages)

    def _load(
        self, targets: Targets, num_requests: int | None, *, is_alone: bool, has_prefix: bool
    ) -> tuple[Load, bool]:
        """The requests, and whether they go on after the simulation, so that the engine must keep up with them."""
        if self.recording is None:
            load = self._drawn(targets, num_requests, is_alone, has_prefix)
        else:
            load = _recorded(self.recording, is_alone)
        # A trace ends, so a limit on the wait says all. The clients of a closed loop wait, so the engine keeps up.
        return load, not is_alone and not (self.recording is not None and targets.limits_waiting)

    def _drawn(self, targets: Targets, num_requests: int | None, are_alone: bool, has_prefix: bool) -> Load:
        prompt, answer = self._distributions()
        load = Load(prompt, answer, num_requests=num_requests, seed=self.seed or 0, cold=False)
        if num_requests is None:
            load = load._replace(settling=MEANS, is_brief=True)
        if are_alone:
            # Requests with the same lengths take the same time if each is alone, unless the first computes a prefix.
            are_alike = self.pairs is None and not has_prefix and targets.sessions is None
            if are_alike:
                means = self.lengths.input_tokens, self.lengths.output_tokens
                prompt, answer = (parse_distribution(f"fixed:{tokens}", "tokens") for tokens in means)
                load = load._replace(prompt=prompt, answer=answer)
            number = 1 if are_alike else num_requests
            return load._replace(concurrency=1, num_requests=number, sessions=targets.sessions, has_run=True)
        load = targets.arrivals(load)._replace(burstiness=self.burstiness)
        if targets.clients is None and targets.highest_percentile is not None:
            return load
        # All clients start together, and at a rate the last requests are alone. So a run goes on until what is judged
        # has settled, or what is printed.
        limits = () if num_requests is None else targets.limits
        judged = tuple((limit.metric, limit.percentile) for limit in limits)
        return load._replace(
            num_requests=self.num_requests, fewest_requests=num_requests, settling=judged or load.settling,
            is_brief=targets.clients is None or load.is_brief,
        )  # fmt: skip

    def _distributions(self) -> tuple[Distribution | None, Distribution | None]:
        if self.pairs is None:
            lengths = self.lengths
            return lengths_of(lengths.input_tokens, "input_tokens"), lengths_of(lengths.output_tokens, "output_tokens")
        return _drawn_together(self.pairs, self.lengths)


def simulated_of(document: Mapping[str, Any], is_open: bool) -> Simulated:
    """The figures of a layout from the document of its simulation. `is_open`: requests arrive whatever happens."""
    times = {
        row["metric"]: {key.removesuffix("_seconds"): value for key, value in row.items() if key != "metric"}
        for row in document["times"]
    }
    engine, counts, waits = document["engine"], document["load"], times["queue"]
    is_behind = is_open and not document["results"]["keeps_up"]
    return Simulated(
        times, counts["requests"], counts["refused_requests"], engine["max_running_requests"],
        document["results"]["requests_per_second"], document["results"]["tokens_per_second"],
        waits["max"] if is_behind else None,
        tuple(Note(**row) for row in document["warnings"] if row["code"] == "not-shared"),
    )  # fmt: skip


def planned_trace(
    path: str, format: str | None = None, scale_rate: float = 1.0, num_requests: int | None = None
) -> PlannedLoad:
    """The requests of the trace at `path` (`traces.read_trace`), or its first `num_requests`. Raises what it raises."""
    from kvcalc.traces import read_trace

    recording = record(read_trace(path, format), path, scale_rate, num_requests)
    return PlannedLoad(recording.lengths, seed=None, num_requests=len(recording.requests), recording=recording)


def _recorded(recording: Recording, are_alone: bool) -> Load:
    requests, scale = recording.requests, recording.scale_rate
    if are_alone:
        requests = [request._replace(arrival_seconds=place * _APART_SECONDS) for place, request in enumerate(requests)]
        scale = 1.0
    return Load(trace=requests, trace_name=recording.name, scale_rate=scale)


def _drawn_together(pairs: Sequence[tuple[int, int]], lengths: Lengths) -> tuple[Distribution, Distribution]:
    """The prompts and the answers of `pairs`. A load draws a prompt and then its answer."""
    answer = 0

    def draw_prompt(random: Random) -> int:
        nonlocal answer
        prompt, answer = random.choice(pairs)
        return prompt

    name, (prompts, answers) = lengths.file or "", zip(*pairs)
    return (
        Distribution(name, lengths.input_tokens, max(prompts), draw_prompt),
        Distribution(name, lengths.output_tokens, max(answers), lambda _: answer),
    )
