"""Plan a server: for each kind of device, the smallest layout that fits the model and meets the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import SERVERS, command_key, engine_class, start_command
from kvcalc.engines.command import Checkpoint, ServerArguments
from kvcalc.engines.default_engine import engine_on
from kvcalc.engines.options import AUTO_ENGINE, check_settings, settings_of
from kvcalc.errors import DoesNotFitError, KvcalcError, SettingError, UsageError
from kvcalc.memory.workload import BEYOND_MODEL
from kvcalc.model.describe import describe_model
from kvcalc.model.layout import LayoutAsked
from kvcalc.notes import Note, describe_notes
from kvcalc.parallel import each
from kvcalc.planning.plan.binding import memory_notes, range_notes
from kvcalc.planning.plan.finalists import find_replicas
from kvcalc.planning.plan.judge import Judge
from kvcalc.planning.plan.pareto import best_of, close_price, commands, front, given_up, ranked_by
from kvcalc.planning.plan.planned import PlannedLoad
from kvcalc.planning.plan.replicas import ENDS, OnePool
from kvcalc.planning.plan.targets import METRICS, MOST_BUSY, Targets, check_arrivals, check_percentiles
from kvcalc.planning.plan.traffic import (
    Platform,
    Traffic,
    Trouble,
    about_speed,
    describe_cost,
    grouped_notes,
)
from kvcalc.question.fields import AT_RANDOM
from kvcalc.question.question import Question, SpeedQuestion, setting_texts
from kvcalc.question.request_lengths import Lengths
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.admission import check_serves
from kvcalc.server.checkpoint import checkpoint_of, drafting_of
from kvcalc.server.drafting import describe_asked
from kvcalc.throughput.hardware import Devices, Gpu, find_gpu
from kvcalc.throughput.power import kwh_per_million
from kvcalc.writing.shell import join

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.planning.plan.targets import Simulated, Simulates

__all__ = ["COMMON_GPUS", "Targets", "parse_price", "plan", "refuse_empty"]

# The default: devices that are easy to rent.
COMMON_GPUS = ("l40s", "a100", "h100", "h200", "b200", "mi300x")
DEFAULT_MAX_DEVICES = 1024


def plan(
    question: Question,
    gpus: Sequence[Gpu | Devices],
    lengths: Lengths,
    targets: Targets,
    *,
    engines: Sequence[str] = (AUTO_ENGINE,),
    prices: Mapping[str, float] | None = None,
    max_devices: int = DEFAULT_MAX_DEVICES,
    allow_beyond_limit: bool = False,
    with_front: bool = False,
    strict: bool = False,
    disaggregate: bool = False,
    transfer: int | str | None = None,
    all_layouts: bool = False,
    simulation: Simulates | None = None,
    num_simulated: int | None = None,
    headroom: float = 0.0,
    spare_replicas: int = 0,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> documents.Plan:
    """The plan document: for each device and engine, the smallest layout or the reason why there is none.

    `gpus` are kinds of device. A `Devices` limits the number of its kind, up to `max_devices`. `prices` are per device
    and hour, by device name; those of other devices are ignored. The question has no lengths, devices or layout, which
    plan chooses. Its settings may be those of several engines; each engine takes its own. Of its `speed`, the
    calibration and the hit rate are used. Requests longer than the model's limit do not fit unless `allow_beyond_limit`
    is set. `strict` leaves out layouts whose fit is tight. `with_front` adds the Pareto front. `disaggregate` adds rows
    with prefill and decode on separate instances, joined by the link `transfer`: bytes per second of one device, or a
    name, and with several kinds of device one row for each engine with the pools on two of them. `all_layouts` tries
    every way to split the model. The `simulation` judges the layouts, by default one of requests that arrive at random
    or of clients, and `num_simulated` is the most layouts of a kind to simulate. The rate of a trace in `targets` is
    that of its busiest part. The load is larger by the share `headroom`, and each layout has `spare_replicas` more than
    it needs. `jobs` processes search, each for other kinds of device, and `progress` is called with how many are done.

    Raises UsageError (exit 2) for an invalid question. If every row is refused, the first refusal is raised: ModelError
    (exit 3) if the weights or the speed are not known. If nothing fits, the document is returned as usual, and
    `refuse_empty` raises the error.
    """
    named = {(gpu.gpu if isinstance(gpu, Devices) else gpu).name for gpu in gpus}
    prices = {name if name in named else find_gpu(name).name: price for name, price in (prices or {}).items()}
    dtypes = [None] if question.dtype is None else [name.strip() for name in question.dtype.split(",")]
    kinds = [
        _kind(kind, max_devices, engine_on(engine, question.model, kind, dtype), prices)._replace(dtype=dtype)
        for kind in gpus for engine in engines for dtype in dtypes
    ]  # fmt: skip
    check_percentiles(targets)
    for kind in kinds:
        engine_class(kind.engine)  # UsageError for an unknown one
    settings = setting_texts(question.engine_settings or {})
    check_settings([kind.engine for kind in kinds], settings, has_device=True)
    _check_split(kinds, settings)
    for kind in kinds:
        check_serves(kind.engine, settings_of(kind.engine, settings))
        option = engine_class(kind.engine).reuse().draft_option
        if option in settings and question.speculative is None:
            raise UsageError(
                f"--{option}: a server drafts no tokens without a method", "name it, for example --speculative mtp:3"
            )
    speed = question.speed_asked
    question = question._replace(engine_settings=settings, speed=None if speed == SpeedQuestion() else speed)
    if disaggregate or transfer is not None:
        from kvcalc.planning.plan.disaggregated.rows import SplitPlan, check_disaggregated, with_link, with_splits
        from kvcalc.planning.plan.disaggregated.search import Instances

        check_disaggregated(question, [kind.engine for kind in kinds], disaggregate, transfer)
    if len(dtypes) > 1 and (with_front or disaggregate):
        option = "--pareto" if with_front else "--disaggregate"
        raise UsageError(f"{option}: plans for one type of weights at a time", f"--dtype {dtypes[0]}")
    if targets.deadline_seconds is not None and disaggregate:
        raise UsageError("--deadline: separate instances serve no job", "leave --disaggregate out")
    if spare_replicas and disaggregate:
        raise UsageError("--spare-replicas: separate instances have none", "--headroom 20% plans for a larger load")
    if headroom and simulation is not None and simulation.trace is not None:
        raise UsageError("--headroom: --trace has its own rate", f"--scale-rate {1 + headroom:g}")
    stated_targets, targets = targets, targets.larger(headroom)
    simulation = simulation or PlannedLoad(lengths)
    check_arrivals(targets)
    if targets.sessions is not None:
        lengths = lengths.of_turns(targets.sessions)
    lengths = lengths.within(question.model.longest_context)
    traffic = Traffic(
        question, lengths, targets, allow_beyond_limit, strict, all_layouts, spare_replicas, headroom
    )  # fmt: skip
    planned = each(partial(_planned, traffic, simulation, num_simulated), kinds, jobs, progress)
    refusals = [kind.refusal for kind in planned if kind.refusal is not None]
    if len(refusals) == len(planned):
        raise refusals[0]
    rows = [kind.row for kind in planned]
    split_notes, finalists = list[Note](), [row for kind in planned for row in kind.finalists]
    split = None
    if transfer is not None:
        split = SplitPlan(
            Instances(with_link(traffic, transfer)), transfer, max_devices,
            checkpoint_of(question.model, question.dtype), simulation, num_simulated,
        )  # fmt: skip
        rows, split_notes, simulated = with_splits(split, kinds, rows)
        finalists += simulated
    key = ranked_by(rows, bool(targets.limits))
    best = best_of(rows, key)
    kind_of_best = next((kind for kind, row in zip(kinds, rows) if row is best), kinds[0])
    checkpoint = checkpoint_of(question.model, kind_of_best.dtype)
    notes = [
        *_notes(traffic, kinds, [kind.speed_notes for kind in planned], checkpoint if best else None),
        *simulation.notes, *grouped_notes(kinds, [kind.notes for kind in planned]), *_full_notes(kinds, rows),
    ]  # fmt: skip
    close = close_price(rows, best, key)
    notes += [] if close is None else [close]
    printed = commands(rows, best, key, simulation.router)
    text = f"the figures assume a {simulation.router} router in front of the replicas, and {{}} has none"
    notes += [
        Note("plans", "router", text.format(row["engine"]))
        for row in printed if row["replicas"] > 1 and row["router"] is None
    ]  # fmt: skip
    if targets.sessions is not None and simulation.router == AT_RANDOM and best is not None and best["replicas"] != 1:
        text = "a random router sends the turns of a session to any replica, whose cache has not seen them"
        notes.append(Note("plans", "spread", f"{text}: --router prefix-aware keeps them together"))
    reuse, trace = question.reuse, simulation.trace
    document: documents.Plan = {
        "schema_version": SCHEMA_VERSION,
        "model": describe_model(question.model),
        "checkpoint": checkpoint.name,
        "lengths": lengths.describe(),
        "targets": stated_targets.describe(speed.confidence),
        "headroom": headroom,
        "spare_replicas": spare_replicas,
        "router": cast(Any, simulation.router),
        "trace": trace,
        "engines": list(dict.fromkeys(kind.engine for kind in kinds)),
        "dtype": question.dtype,
        "kv_dtype": question.kv_dtype,
        "prefix_hit_rate": speed.prefix_hit_rate or None,
        "speculative": None if question.speculative is None else describe_asked(question.speculative),
        "ranked_by": cast(Any, key),
        "best": best,
        "gives_up": given_up(rows, best, key),
        "commands": printed,
        "plans": rows,
        "finalists": finalists,
        "pareto": front(traffic, kinds) if with_front else None,
        "warnings": describe_notes([*notes, *(note for note in split_notes if note not in notes)]),
    }
    if reuse is not None:
        document["prefix_tokens"] = reuse.prefix_tokens
    return document


def _check_split(kinds: Sequence[Platform], settings: Mapping[str, Any]) -> None:
    """Raise UsageError (exit 2) for a number of devices that an engine's options name, because plan chooses it."""
    if any(
        engine_class(kind.engine).split_layers(settings, None, LayoutAsked())[1].sizes.num_devices > 1 for kind in kinds
    ):
        raise UsageError(
            f"--tensor-split {settings['tensor-split']}: plan chooses the number of devices",
            "kvcalc fit takes it, and shows what each device holds",
        )


def _kind(gpus: Gpu | Devices, max_devices: int, engine: str, prices: Mapping[str, float]) -> Platform:
    gpu, limit = (gpus.gpu, gpus.num_devices) if isinstance(gpus, Devices) else (gpus, max_devices + 1)
    return Platform(gpu, min(limit, max_devices), engine, limit <= max_devices, prices.get(gpu.name))


def refuse_empty(document: documents.Plan) -> None:
    """Raise DoesNotFitError (exit 4), with the reason of the first row, if no row of a plan fits."""
    if document["best"] is None:
        first, *others = document["plans"]
        if all(row["reason"] == first["reason"] for row in others):
            raise DoesNotFitError(f"no layout serves this load: {first['reason']}", first["hint"])
        more = f"; {len(others)} more without a layout"
        raise DoesNotFitError(f"no layout serves this load: {first['gpu']}: {first['reason']}{more}", first["hint"])


def parse_price(text: str) -> tuple[str, float]:
    """The device's name and its price per hour in `h100=2.5`. UsageError (exit 2), or GpuError (exit 3)."""
    name, _, number = text.partition("=")
    try:
        price = float(number)
    except ValueError:
        price = nan
    if not 0 <= price < 1e9:
        raise UsageError(f"--price {text[:40]!a}: not a price", "for example --price h100=2.5, for one device per hour")
    return find_gpu(name).name, price


def _notes(
    traffic: Traffic, kinds: Sequence[Platform], of_speeds: Sequence[Sequence[Note]], checkpoint: Checkpoint | None
) -> list[Note]:  # fmt: skip
    notes = [Note("model", "remark", text) for text in traffic.question.model.remarks]
    if traffic.limit is not None and traffic.allow_beyond_limit:
        notes.append(Note("lengths", BEYOND_MODEL, traffic.beyond_limit))
    if checkpoint is not None and checkpoint.note is not None:
        notes.append(Note("plans", "checkpoint", checkpoint.note))
    return notes + grouped_notes(kinds, of_speeds)


def _full_notes(kinds: Sequence[Platform], rows: Sequence[documents.PlanRow]) -> list[Note]:
    """A note about layouts that a little more load makes too slow."""
    text = f"the load is more than {MOST_BUSY:.0%} of what the layout serves: --headroom 20% leaves room for more"
    is_full = ((row["utilization"] or 0.0) > MOST_BUSY for row in rows)
    return grouped_notes(kinds, ([Note("plans", "nearly-full", text)] * full for full in is_full))


class _Planned(NamedTuple):
    """What was found for one kind of device. It is plain data: another process may have searched."""

    refusal: KvcalcError | None
    row: documents.PlanRow
    speed_notes: list[Note]
    notes: list[Note]
    finalists: list[documents.PlanFinalist]


def _planned(traffic: Traffic, simulation: Simulates, num_simulated: int | None, kind: Platform) -> _Planned:
    judge = Judge(traffic.targets, simulation)
    layout = _search_or_refuse(traffic, kind, judge, num_simulated)
    row = _row(traffic, kind, layout, judge, checkpoint_of(traffic.question.model, kind.dtype))
    speed = layout.probe.speed if isinstance(layout, OnePool) else None
    refusal = layout if isinstance(layout, KvcalcError) else None
    notes = judge.notes()
    if isinstance(layout, OnePool):
        notes += memory_notes(layout) + range_notes(judge, layout)
    return _Planned(refusal, row, [] if speed is None else about_speed(speed), notes, judge.describe())


def _row(
    traffic: Traffic,
    kind: Platform,
    layout: OnePool | Trouble | KvcalcError,
    judge: Judge,
    checkpoint: Checkpoint,
) -> documents.PlanRow:
    row: Any = dict.fromkeys(ROW)
    row.update(model=traffic.question.model.name, gpu=kind.gpu.name, engine=kind.engine, price_per_hour=kind.price)
    if not isinstance(layout, OnePool):
        trouble = Trouble(layout.message, layout.hint) if isinstance(layout, KvcalcError) else layout
        row.update(fits=False, verdict="does_not_fit", **trouble._asdict())
        return cast("documents.PlanRow", row)
    settings, memory = traffic.settings_with(layout.shape), layout.probe.memory
    row.update(
        **layout.shape.describe_all(),
        replicas=layout.replicas + traffic.spare_replicas,
        fits=True,
        verdict="tight" if layout.probe.is_tight else "fits",
        num_devices=layout.num_devices,
        next_layout=layout.next_layout,
        requests_per_replica=layout.probe.running,
        utilization=layout.utilization,
        kv_dtype=memory.document["kv_cache"]["dtype"],
        weights_dtype=memory.document["weights"]["dtype"],
        weights_bytes=memory.document["weights"]["bytes"],
        free_bytes=memory.fit["free_bytes"],
        max_batch_size=memory.fit["max_batch_size"],
        **(simulated := cast("Simulated", layout.simulated)).describe(layout.factors(traffic.targets)),
        tokens_per_second_per_device=simulated.tokens_per_second / layout.num_devices,
    )
    if traffic.targets.deadline_seconds is not None:  # how long the requests of a job wait says nothing
        row.update(dict.fromkeys(f"ttft_{end}seconds" for end in ENDS))
    row.update(judge.describe_limits(layout))
    energy = layout.probe.energy
    if energy is not None:
        watts = layout.replicas * energy["watts"]
        row.update(watts=watts, kwh_per_million_output_tokens=kwh_per_million(watts / row["tokens_per_second"]))
    trace = judge.simulation.trace
    paid = row["tokens_per_second"] / (1 + traffic.headroom)
    row.update(describe_cost(layout.cost_per_hour, traffic.lengths, paid, trace))
    arguments = ServerArguments(
        layout.shape, traffic.context_for(kind.engine), _limit_of(layout),
        memory.document["kv_cache"]["dtype"], traffic.settings_for(kind.engine, settings), traffic.limit is not None,
        drafting_of(traffic.question.speculative), engine=kind.engine,
        prompt_division=engine_class(kind.engine).prompt_division(traffic.question.model, settings),
    )  # fmt: skip
    # Another engine may refuse this layout, or need other limits, so there is only the command of the engine planned.
    if kind.engine.partition("@")[0] in SERVERS:
        words = start_command(kind.engine).on_machines(checkpoint, arguments, kind.gpu.machine_devices)
        row[command_key(kind.engine)] = None if words is None else join(words)
    return cast("documents.PlanRow", row)


def _limit_of(layout: OnePool) -> int:
    """The limit of running requests on all DP ranks: that of the simulation, and no more than there are clients.

    A router, or the ranks' own, may send one of them all clients.
    """
    clients, ranks, each = layout.traffic.targets.clients, layout.shape.data_parallel_size, layout.most_running
    if each is None:
        return layout.probe.most_running(clients)
    limit = ranks * (each if clients is None else min(each, clients))
    engine, settings = engine_class(layout.kind.engine), layout.traffic.question.engine_settings or {}
    if clients is None or not engine.counts_all_ranks or engine.running_option in settings:
        return limit
    return min(limit, clients)


ROW = (
    "model", "gpu", "engine", "fits", "verdict", "reason", "hint", "next_layout", "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size", "expert_parallel_size", "decode_context_parallel_size", "replicas",
    "num_devices", "requests_per_replica", "utilization", "kv_dtype", "weights_dtype", "weights_bytes", "free_bytes",
    "max_batch_size",
    *(f"{metric}_{end}seconds" for metric in ("ttft", "tpot") for end in ENDS),
    *(f"simulated_{metric}_seconds" for metric in METRICS), "simulated_requests",
    "tokens_per_second", "tokens_per_second_low", "tokens_per_second_high", "requests_per_second",
    "tokens_per_second_per_device", "price_per_hour", "cost_per_hour",
    "cost_per_million_output_tokens", "cost_per_million_tokens", "watts", "kwh_per_million_output_tokens",
    *map(command_key, SERVERS),
)  # fmt: skip


def _search_or_refuse(
    traffic: Traffic, kind: Platform, judge: Judge, num_simulated: int | None
) -> OnePool | Trouble | KvcalcError:  # fmt: skip
    try:
        traffic.settings_for(kind.engine, traffic.question.engine_settings or {})  # raises if it refuses the prompts
        layout = find_replicas(traffic, kind, judge, num_simulated)
        return layout if isinstance(layout, Trouble) else judge.timed(layout)
    except SettingError:
        raise
    except KvcalcError as error:
        return error
