"""The traffic to serve, and one replica that serves a part of it, with the figures of `kvcalc estimate`.

A search looks at thousands of cases, and only asks whether each fits and how fast it serves. So it takes a part of the
estimate (`brief_answer`), whose figures are those of `planning.answers.estimate`, by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import RELEASE, engine_class
from kvcalc.engines.options import settings_of
from kvcalc.errors import ModelError
from kvcalc.model.layout import Layout
from kvcalc.notes import Note
from kvcalc.planning.answers.estimate import Answer, answer_case
from kvcalc.planning.answers.grouped_notes import RowNote, group_notes
from kvcalc.planning.answers.throughput import describe_serving
from kvcalc.planning.plan.shapes import CONTEXT_PARALLEL, copies_asked
from kvcalc.planning.plan.targets import MOST_BUSY, Targets
from kvcalc.question.question import Question
from kvcalc.question.request_lengths import Lengths
from kvcalc.records import NamedTuple
from kvcalc.server.budget import Budget, budget, free_range
from kvcalc.server.capacity import holds
from kvcalc.server.case import Case, make_case
from kvcalc.server.layout import context_for
from kvcalc.server.speed import speed_of
from kvcalc.server.weights import TOWER_NOT_COUNTED
from kvcalc.throughput.hardware import Devices, Gpu
from kvcalc.throughput.speed import hide_wide_ranges
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents

MOST_RUNNING = 1024
"""The most running requests worth trying: vLLM's default maximum on a large device (get_batch_defaults, arg_utils.py
of 0.33.0). Numbers in between lie between the points of their neighbours."""


class Platform(NamedTuple):
    """One row of a plan: at most `max_devices` of one kind of device, under one engine, with weights of one type.

    `is_named_limit` is true if the limit is the number in the device's name, as in h100x8. `price` is that of one
    device per hour.
    """

    gpu: Gpu
    max_devices: int
    engine: str
    is_named_limit: bool = False
    price: float | None = None
    dtype: str | None = None


def describe_cost(
    hourly: float | None, lengths: Lengths, tokens_per_second: float, trace: documents.PlanTrace | None
) -> dict[str, float]:
    """The costs of a row of a plan whose devices cost `hourly` per hour. Empty if that is not known.

    What is paid for are the output tokens of the mean rate of a `trace`, not those of its busiest part.
    """
    if hourly is None:
        return {}
    paid = tokens_per_second if trace is None else trace["requests_per_second"] * lengths.output_tokens
    each = hourly / (paid * 3600 / 1e6)
    share = lengths.output_tokens / (lengths.input_tokens + lengths.output_tokens)
    return {
        "cost_per_hour": hourly, "cost_per_million_output_tokens": each, "cost_per_million_tokens": each * share
    }  # fmt: skip


def grouped_notes(kinds: Sequence[Platform], notes: Iterable[Iterable[Note]]) -> list[Note]:
    """The notes of the rows of some kinds, each remark once (`group_notes`)."""
    rows = [(kind.engine, kind.gpu.name) for kind in kinds]
    found = [RowNote(row, note, kind.gpu) for kind, row, own in zip(kinds, rows, notes) for note in own]
    return group_notes(found, rows)


def about_speed(answer: Answer) -> list[Note]:
    """The notes of an answer that say something about its times, or about memory that is not counted."""
    codes = (RELEASE, TOWER_NOT_COUNTED)
    return [note for note in answer.notes if note.part in ("throughput", "calibration") or note.code in codes]


class Trouble(NamedTuple):
    """Why a layout does not serve the traffic, and what to try next, or None."""

    reason: str
    hint: str | None = None


class Refused(Trouble):
    """The model cannot be split this way, or its engine refuses to start so."""

    __slots__ = ()


class Probe(NamedTuple):
    """One replica with `running` requests: the memory they take, their speed, and why it does not serve, or None."""

    running: int
    memory: Answer
    speed: Answer | None
    trouble: Trouble | None

    @property
    def is_tight(self) -> bool:
        """Whether the estimated parts may leave too little memory for this number of requests."""
        low = self.memory.fit["free_low_bytes"]
        return low is not None and low < 0

    def most_running(self, clients: int | None) -> int:
        """The limit of running requests for the engine's command. `clients` are those of all replicas, if known.

        `running` is only the mean: at a rate, requests come in groups, and a router sends some replicas more clients
        than others. They would queue for a limit like that while there is memory for them, so the limit is what fits.
        """
        most = max(self.running, self.memory.fit["max_batch_size"] or 0)
        return most if clients is None else max(self.running, min(most, clients))

    @property
    def step_factor(self) -> float:
        """The judged time of a step as a multiple of the estimate."""
        return self.serving["tpot_judged_seconds"] / self.serving["tpot_seconds"]

    @property
    def judged_rate(self) -> float:
        """The requests per second that it serves if its steps are as long as they are judged."""
        return self.serving["requests_per_second"] / self.step_factor

    @property
    def serving(self) -> documents.Serving:
        """The `serving` part of the document, by the short form. Only for probes without `trouble`."""
        serving = self._throughput and self._throughput["serving"]
        if not serving:
            raise ValueError("no requests are served")
        return serving

    @property
    def energy(self) -> documents.Energy | None:
        """The `energy` part of the document, or None if it is not known. Only for probes without `trouble`."""
        return self._throughput and self._throughput["energy"]

    @property
    def _throughput(self) -> documents.Throughput | None:
        return None if self.speed is None else self.speed.document["throughput"]


class Traffic(NamedTuple):
    """The question for every kind of device. `question` has the model, the types and the engines' settings.

    `strict` leaves out layouts whose fit is tight. With `all_layouts`, every combination of the ways to split a model
    is tried. `spare_replicas` are replicas of each layout that the load does not need. The load of the `targets` is
    larger than the one that is paid for by the share `headroom`. No layout is busier than `most_busy`.
    """

    question: Question
    lengths: Lengths
    targets: Targets
    allow_beyond_limit: bool
    strict: bool = False
    all_layouts: bool = False
    spare_replicas: int = 0
    headroom: float = 0.0
    most_busy: float = MOST_BUSY

    def settings_with(self, layout: Layout) -> Mapping[str, Any]:
        """The engines' settings, with the ranks of a layout that divide the tokens of the cache."""
        settings = self.question.engine_settings or {}
        return settings if layout.token_ranks == 1 else {**settings, CONTEXT_PARALLEL: str(layout.token_ranks)}

    def divides_experts(self, engine: str) -> bool:
        """Whether DP ranks and the ways to divide experts are tried: nobody asked for ranks of either kind."""
        copies = copies_asked(self.question, engine)
        return copies.attention_copies == 1 and copies.divides_experts

    def has_many_layouts(self, engine: str) -> bool:
        """Whether those that cannot be among the best are left out by the short form."""
        return self.all_layouts or self.divides_experts(engine)

    def without_limits(self) -> Traffic:
        """The same load without limits on its times."""
        return self._replace(targets=self.targets.without_limits())

    @property
    def limit(self) -> int | None:
        """The model's limit in tokens if some requests exceed it, else None."""
        limit = self.question.model.longest_context
        return limit if limit is not None and self.lengths.reached_tokens > limit else None

    def context_for(self, engine: str) -> int:
        """The context of a server for the longest request, beyond which the engine keeps tokens free.

        It is not more than the model's limit, unless the request is.
        """
        question = self.question._replace(
            engine=engine, engine_settings=settings_of(engine, self.question.engine_settings or {})
        )
        longest = self.lengths.longest_tokens
        return context_for(question, self.lengths.longest_prompt, longest, longest)

    @property
    def beyond_limit(self) -> str:
        """The message for requests beyond the limit."""
        tokens, model = self.lengths.reached_tokens, self.question.model
        return f"requests of {tokens:,} tokens exceed the limit of {model.name}, {self.limit:,} tokens"

    def settings_for(self, engine: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of the settings that the engine has, and those that it needs for the longest prompt."""
        return engine_class(engine).prompt_settings(settings_of(engine, settings), self.lengths.longest_prompt)

    @property
    def refusal(self) -> Trouble | None:
        """Why requests beyond the limit are not planned. None if they are, or if there are none."""
        if self.limit is None or self.allow_beyond_limit:
            return None
        return Trouble(self.beyond_limit, "to plan them anyway, add --allow-beyond-limit")


def replica_of(traffic: Traffic, kind: Platform, shape: Layout, replicas: int = 1) -> Question:
    """The question about `replicas` replicas of a shape on devices of a kind."""
    return traffic.question.with_layout(shape.asked)._replace(
        dtype=kind.dtype, engine=kind.engine,
        engine_settings=traffic.settings_for(kind.engine, traffic.settings_with(shape)),
        devices=Devices(kind.gpu, replicas * shape.num_devices),
    )  # fmt: skip


def serving_question(traffic: Traffic, kind: Platform, shape: Layout, running: int) -> Question:
    """The question about one replica of a shape with `running` clients, by the short form."""
    replica, lengths, sessions = replica_of(traffic, kind, shape), traffic.lengths, traffic.targets.sessions
    speed = replica.speed_asked._replace(
        input_tokens=lengths.input_tokens, output_tokens=lengths.output_tokens, concurrency=running, short_form=True
    )
    if sessions is not None:
        # As if the cache kept all of them. The simulation has its room.
        speed = speed._replace(repeated_share=sessions.repeated_share(lengths.input_tokens))
    return replica._replace(speed=speed)


def kept_tokens(case: Case, held_tokens: int, context_tokens: int) -> int:
    """The tokens for which a running request has memory: those that it holds, or the whole context of a slot."""
    schedule = case.engine.schedule()
    return context_tokens if schedule is not None and schedule.has_slots else held_tokens


def probe(traffic: Traffic, kind: Platform, shape: Layout, running: int, is_brief: bool = False) -> Probe:
    """One replica of a shape with `running` requests. LayoutError if the model cannot be split this way.

    One that `is_brief` has only what a search needs of the answers (`brief_answer`).
    """
    lengths = traffic.lengths
    total = lengths.input_tokens + lengths.output_tokens

    def answer_of(case: Case, needs_speed: bool) -> Answer:
        return (brief_answer(case, needs_speed) if is_brief else None) or answer_case(case)

    case = make_case(serving_question(traffic, kind, shape, running))
    if case.engine.placement is not None:
        from kvcalc.server.offload import place_layers

        case = place_layers(case)
    held = kept_tokens(case, lengths.held_tokens, traffic.context_for(kind.engine))
    memory = answer_of(case.at(held, running), total == held)
    if not memory.fit["fits"]:
        return Probe(running, memory, None, Trouble(_why_not(kind, running, held, memory.fit)))
    if traffic.strict and Probe(running, memory, None, None).is_tight:
        more = format_size(-(memory.fit["free_low_bytes"] or 0))
        reason = f"{running:,} {'request' if running == 1 else 'requests'} of {held:,} tokens may need "
        return Probe(running, memory, None, Trouble(f"{reason}{more} more per device", "--strict leaves this out"))
    longest = lengths.longest_tokens
    if longest > held and not answer_of(case.at(longest, 1), False).fit["fits"]:
        return Probe(running, memory, None, Trouble(f"the longest request, {longest:,} tokens, does not fit"))
    # All these requests run: the memory was checked above with the tokens that running requests hold.
    speed = memory
    if total != held:
        speed = answer_of(case.at(total, running), True)
        if not speed.fit["fits"]:
            # These requests run, though not all of them have this length. Their speed is in the whole answer.
            speed = answer_case(case.at(total, running))
    throughput = speed.document["throughput"]
    if throughput is None and speed.fit["max_batch_size"] == 0:
        return Probe(running, memory, None, Trouble(f"a request of {total:,} tokens does not fit"))
    if throughput is None:
        unknown = "; ".join(note.text for note in speed.notes if note.part == "throughput")
        raise ModelError(f"{traffic.question.model.name} cannot be planned for {kind.gpu.name}: {unknown}")
    probe = Probe(running, memory, speed, None)
    return probe._replace(trouble=too_slow(traffic.targets, lengths, probe.serving))


def _why_not(kind: Platform, running: int, tokens: int, fit: documents.Fit) -> str:
    """Why `running` requests of `tokens` tokens do not run together."""
    if fit["free_bytes"] < 0:
        short = format_size(-fit["free_bytes"])
        return f"a request of {tokens:,} tokens does not fit: {short} more is needed per device"
    requests = "a request" if running == 1 else f"{running:,} requests"
    return f"{kind.engine} does not run {requests} of {tokens:,} tokens at once in this memory"


def too_slow(targets: Targets, lengths: Lengths, serving: documents.Serving) -> Trouble | None:
    """The first target that the judged times miss.

    A target for a percentile is compared with the mean, which only tells where a simulation should begin.
    """
    for limit in targets.limits:
        point, judged = times_of(limit.metric, lengths, serving)
        if judged > limit.seconds:
            time = seconds_text(point) if judged == point else f"{seconds_text(point)}, up to {seconds_text(judged)},"
            hint = "--confidence 50 uses the point estimate" if point <= limit.seconds else None
            text = f"{limit.metric.upper()} of one request is {time} and the limit is {seconds_text(limit.seconds)}"
            return Trouble(text, hint)
    return None


def times_of(metric: str, lengths: Lengths, serving: documents.Serving) -> tuple[float, float]:
    """The point estimate of a time, and the one that is judged."""
    ttft, tpot = (
        (serving["ttft_seconds"], serving["ttft_judged_seconds"]),
        (serving["tpot_seconds"], serving["tpot_judged_seconds"]),
    )
    if metric != "e2e":
        return ttft if metric == "ttft" else tpot
    steps = lengths.output_tokens - 1
    return ttft[0] + steps * tpot[0], ttft[1] + steps * tpot[1]


def seconds_text(seconds: float) -> str:
    """A time for a message: milliseconds below one second, and whole seconds from 1,000 on."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def brief_answer(case: Case, needs_speed: bool) -> Answer | None:
    """The estimate of a case with requests to serve, whose batch is final. None if only the whole estimate knows.

    Its document may have only `fits`, `free_bytes` and `free_low_bytes` of `fit`, `serving` of `throughput`.
    `throughput` is null without `needs_speed`, and if it does not fit.
    """
    room = budget(case)
    if not isinstance(room, Budget):
        return None
    # If every device has layers of its own, those of the fullest one.
    workload, allocation = room.case.workload, room.case.allocation
    held = allocation.batch_bytes(room.case.share, workload.kv_dtype, workload.context_tokens, workload.attention_batch)
    fits = holds(room.case, room.pool_bytes) and (room.host is None or room.host.shortage() is None)
    free = room.pool_bytes - held
    low, _ = free_range(room, free)
    throughput = None
    if needs_speed and fits:
        if case.layout.has_whole_copies:
            return None
        speed = speed_of(case, [])
        if isinstance(speed, str) or speed.calibration is not None:
            return None
        throughput = cast("documents.Throughput", {"serving": describe_serving(case, speed, [])})
        hide_wide_ranges(throughput)
    document: Any = {
        "fit": {"fits": fits, "free_bytes": free, "free_low_bytes": low},
        "throughput": throughput,
    }
    return Answer(document, ())
