"""The rows of a plan with prefill and decode on separate instances, beside those with both on the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import disaggregation_of, start_command
from kvcalc.engines.command import DECODE, PREFILL, ROLES, Checkpoint, Pools, ServerArguments
from kvcalc.errors import KvcalcError, UsageError
from kvcalc.notes import Note
from kvcalc.planning.answers.estimate import Answer
from kvcalc.planning.answers.grouped_notes import RowNote, group_notes
from kvcalc.planning.plan.binding import range_notes
from kvcalc.planning.plan.disaggregated.instances import MOST_PROMPTS, Instance, buffer_tokens
from kvcalc.planning.plan.disaggregated.platforms import joined_kinds, same_kind
from kvcalc.planning.plan.disaggregated.search import Instances
from kvcalc.planning.plan.disaggregated.split import (
    Busy,
    TwoPools,
    describe_energy,
    describe_pools,
    describe_transfer,
    describe_ttft,
)
from kvcalc.planning.plan.finalists import find_pools
from kvcalc.planning.plan.judge import Judge
from kvcalc.planning.plan.replicas import as_many_devices, more_devices
from kvcalc.planning.plan.targets import Targets
from kvcalc.planning.plan.traffic import (
    Platform,
    Traffic,
    Trouble,
    about_speed,
    describe_cost,
    grouped_notes,
    seconds_text,
)
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.server.checkpoint import drafting_of
from kvcalc.server.dp_attention import most_experts
from kvcalc.server.transfer import check_link
from kvcalc.writing.shell import join

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.planning.plan.targets import Simulated, Simulates


# Names of the two kinds of row, in sentences.
_AGGREGATED, _SPLIT = "aggregated", "disaggregated"


class SplitRows(NamedTuple):
    """All rows of a plan, those for the same device and engine side by side, and the notes of the added ones.

    `finalists` are the pools that were simulated.
    """

    rows: list[documents.PlanRow]
    notes: list[Note]
    finalists: list[documents.PlanFinalist]


def check_disaggregated(
    question: Question, engines: Sequence[str], is_asked: bool, transfer: int | str | None
) -> None:  # fmt: skip
    """Raise UsageError (exit 2) for a question whose requests cannot be split between instances, or without a link."""
    if not is_asked:
        raise UsageError("--transfer-bandwidth needs --disaggregate", "leave it out, or add --disaggregate")
    if transfer is None:
        hint = "--transfer-bandwidth infiniband-400g, nvlink, or a rate such as 50GB/s"
        raise UsageError("--disaggregate needs the link between the instances", hint)
    if isinstance(transfer, str):
        check_link(transfer)
    for engine in engines:
        disaggregation_of(engine)
    if question.data_parallel_size > 1 and not most_experts(question.model):
        raise UsageError("--dp: copies of a model without experts are instances of their own", "leave --dp out")


def with_link(traffic: Traffic, transfer: int | str) -> Traffic:
    """The traffic of instances that send caches: drafts then find other prefixes (`engines.prefixes.Matching`)."""
    question = traffic.question
    if question.reuse is None:
        return traffic
    return traffic._replace(question=question._replace(reuse=question.reuse._replace(transfer=transfer)))


class SplitPlan(NamedTuple):
    """What all rows have in common: the instances of the traffic, the link between them, and the simulation.

    All kinds together have at most `most` devices. At most `num_simulated` pairs of layouts are simulated for a row,
    None for the default.
    """

    known: Instances
    transfer: int | str
    most: int
    checkpoint: Checkpoint
    simulation: Simulates
    num_simulated: int | None = None

    def judge(self) -> Judge:
        """A judge for a row."""
        return Judge(self.known.traffic.targets, self.simulation)


def with_splits(plan: SplitPlan, kinds: Sequence[Platform], rows: Sequence[documents.PlanRow]) -> SplitRows:
    """The rows of a plan and, for each, one with separate instances: the better one first, and why the other lost.

    For each engine, there is also a row with the best pools on two kinds of device, if there are any.
    """
    all_rows: list[documents.PlanRow] = []
    notes, finalists = list[list[Note]](), list["documents.PlanFinalist"]()
    for kind, row in zip(kinds, rows):
        judge = plan.judge()
        try:
            pools: TwoPools | Trouble | KvcalcError = find_pools(
                plan.known, [same_kind(kind, plan.transfer)], judge, plan.num_simulated
            )  # fmt: skip
        except KvcalcError as error:
            pools = error
        split, row_notes = describe_split(plan, row, pools, judge)
        row = {**row, "disaggregated": None, "next_mode": None}
        all_rows += _in_order(kind, row, split, plan.known.traffic.targets)
        notes.append(row_notes)
        finalists += judge.describe()
    return _with_mixed(plan, kinds, SplitRows(all_rows, grouped_notes(kinds, notes), finalists))


def _with_mixed(plan: SplitPlan, kinds: Sequence[Platform], rows: SplitRows) -> SplitRows:
    added, finalists = list["documents.PlanRow"](), list["documents.PlanFinalist"]()
    about_rows: list[RowNote] = []
    for engine in dict.fromkeys(kind.engine for kind in kinds):
        judge = plan.judge()
        joined = joined_kinds([kind for kind in kinds if kind.engine == engine], plan.transfer, plan.most)
        try:
            pools = find_pools(plan.known, joined, judge, plan.num_simulated)
        except KvcalcError:  # the rows of one kind say why
            continue
        finally:
            finalists += judge.describe()
        if not isinstance(pools, TwoPools):
            continue
        name = pools.kinds.text
        beside = next(row for row in rows.rows if row["engine"] == engine)
        row, notes = describe_split(plan, {**beside, "gpu": name, "price_per_hour": None}, pools, judge)
        added.append(row)
        # What is said about rows of one kind need not be said again. Notes are those of the decode instances' kind.
        new = [note for note in notes if not any(note.text in other.text for other in rows.notes)]
        about_rows += [RowNote((engine, name), note, pools.kinds.decode.gpu) for note in new]
    names = dict.fromkeys((row["engine"], row["gpu"]) for row in [*rows.rows, *added])
    notes = [*rows.notes, *group_notes(about_rows, list(names))]
    return SplitRows([*rows.rows, *added], notes, [*rows.finalists, *finalists])


def _in_order(
    kind: Platform, row: documents.PlanRow, split: documents.PlanRow, targets: Targets
) -> list[documents.PlanRow]:
    """The better row first. Its `next_mode` says why the other one lost.

    With as many devices, it is the one with more tokens per second, or with a shorter TPOT if both serve a given rate.
    """
    is_rate = targets.requests_per_second is not None

    def rank(named_row: tuple[documents.PlanRow, str]) -> tuple[bool, int, float]:
        speed = named_row[0]["tpot_seconds"] if is_rate else named_row[0]["tokens_per_second"]
        return not named_row[0]["fits"], named_row[0]["num_devices"] or 0, (speed or 0.0) * (1 if is_rate else -1)

    (first, _), (second, name) = sorted(((row, _AGGREGATED), (split, _SPLIT)), key=rank)
    if first["fits"]:
        first["next_mode"] = f"{name}: {_why_lost(kind, first, second, is_rate)}"
    return [first, second]


def _why_lost(kind: Platform, first: documents.PlanRow, second: documents.PlanRow, is_rate: bool) -> str:
    if not second["fits"]:
        return str(second["reason"])
    more, fewer = (row["num_devices"] or 0 for row in (second, first))
    if more > fewer:
        return more_devices(kind, more, fewer)
    if is_rate:
        slower, faster = (seconds_text(row["tpot_seconds"] or 0.0) for row in (second, first))
        return f"same number of devices, TPOT {slower}, not {faster}"
    return as_many_devices(second["tokens_per_second"] or 0.0, first["tokens_per_second"] or 0.0)


def describe_split(
    plan: SplitPlan, beside: documents.PlanRow, layout: TwoPools | Trouble | KvcalcError, judge: Judge
) -> tuple[documents.PlanRow, list[Note]]:
    """The row of two pools, and its notes. `beside` has the keys of a row, and its model, device, engine and price."""
    row: Any = dict.fromkeys((*beside, "disaggregated", "next_mode"))
    row.update({name: beside[name] for name in ("model", "gpu", "engine", "price_per_hour")})
    if not isinstance(layout, TwoPools):
        trouble = Trouble(layout.message, layout.hint) if isinstance(layout, KvcalcError) else layout
        row.update(fits=False, verdict="does_not_fit", **trouble._asdict())
        return row, []
    traffic, targets = plan.known.traffic, judge.targets
    layout = _limited(layout)
    layout = judge.timed(layout)
    simulated = cast("Simulated", layout.simulated)
    busy = Busy.of(layout, simulated, targets)
    answers = layout.prefill.answer(busy.held[0]), layout.decode.answer(busy.held[1])
    pools = describe_pools(layout, busy, answers)
    tokens_per_second = simulated.tokens_per_second
    commands = start_command(layout.kinds.decode.engine).pool_words(_pools_of(traffic, layout, plan.checkpoint))
    is_tight = any(
        instance.free_bytes(answer)[1] < 0 for instance, answer in zip((layout.prefill, layout.decode), answers)
    )
    row.update(
        fits=True,
        verdict="tight" if is_tight else "fits",
        next_layout=layout.next_layout,
        num_devices=layout.num_devices,
        kv_dtype=answers[1].document["kv_cache"]["dtype"],
        weights_dtype=answers[1].document["weights"]["dtype"],
        free_bytes=min(pool["free_bytes"] for pool in pools.values()),
        **simulated.describe(layout.factors(targets)),
        tokens_per_second_per_device=tokens_per_second / layout.num_devices,
        disaggregated={
            **pools,
            "transfer": describe_transfer(traffic, layout),
            "ttft_parts": describe_ttft(layout, simulated),
            "commands": {role: join(commands[role]) for role in ROLES},
        },
    )  # fmt: skip
    row.update(judge.describe_limits(layout))
    trace = plan.simulation.trace
    paid = tokens_per_second / (1 + traffic.headroom)
    row.update(describe_cost(layout.cost_per_hour, traffic.lengths, paid, trace))
    row.update(describe_energy(layout, busy, traffic.lengths, tokens_per_second))
    return row, [*_notes(layout.kinds.decode, answers), *judge.notes(), *range_notes(judge, layout)]


def _limited(layout: TwoPools) -> TwoPools:
    """The pools with the limits of running requests that their commands have."""
    rates, transfer = layout.decode.rates, layout.pair.transfer
    running = rates.largest(transfer)
    if disaggregation_of(layout.kinds.decode.engine).limits_held:
        running = max(running, rates.held(running, transfer))
    return layout._replace(decode=layout.decode.limited(running))


def _pools_of(traffic: Traffic, layout: TwoPools, checkpoint: Checkpoint) -> Pools:
    prompts = layout.prefill.limit or min(layout.prefill.slots or MOST_PROMPTS, MOST_PROMPTS)
    running = layout.decode.limit or layout.decode.rates.largest(layout.pair.transfer)
    arguments = {
        PREFILL: _arguments(traffic, layout.prefill, prompts),
        DECODE: _arguments(traffic, layout.decode, running),
    }
    instances = {PREFILL: layout.numbers[0], DECODE: layout.numbers[1]}
    return Pools(checkpoint, arguments, instances, buffer_tokens(traffic, layout.prefill.case))


def _arguments(traffic: Traffic, instance: Instance, running: int) -> ServerArguments:
    question = instance.case.question
    return ServerArguments(
        instance.shape, traffic.context_for(question.engine), running, instance.case.workload.kv_dtype.name,
        question.engine_settings or {}, traffic.limit is not None, drafting_of(traffic.question.speculative),
        engine=question.engine,
    )  # fmt: skip


def _notes(kind: Platform, answers: tuple[Answer, Answer]) -> list[Note]:
    notes = [note for answer in answers for note in about_speed(answer)]
    uncounted = disaggregation_of(kind.engine).uncounted
    unmeasured = "disaggregated: no measurement of separate prefill and decode instances is in the fit"
    return [
        *notes,
        Note("plans", "disaggregated-not-fitted", unmeasured),
        Note("plans", "disaggregated-not-counted", f"disaggregated: not counted: {uncounted}"),
    ]
