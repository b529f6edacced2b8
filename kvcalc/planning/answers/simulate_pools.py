"""Simulate prefill and decode on separate instances: prompts are computed, sent, and answered elsewhere.

The engine's scheduler runs on both, with its own blocks (`coupled`). The prefix cache is that of the prefill instances:
the whole cache of a prompt is sent, and a decode instance looks for nothing in its own. That goes for a common prefix
too. A drafter is on both, because
the prefill instance computes its cache too, and sends it (draft_token_to_kv_pool, disaggregation/prefill.py of SGLang
0.5.23; NixlConnector registers all layers of vLLM, base_worker.py). Only decode steps draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import disaggregation_of
from kvcalc.engines.command import DECODE, PREFILL
from kvcalc.engines.scheduler import Disaggregation
from kvcalc.errors import LayoutError, UsageError
from kvcalc.model.layout import LayoutAsked
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.answers.simulate import Instances, ask_about, describe_outcome
from kvcalc.planning.plan.disaggregated.instances import (
    buffer_bytes,
    handover_seconds,
    in_role,
    sender_of,
    transfer_bytes,
    without_hits,
)
from kvcalc.planning.plan.disaggregated.platforms import check_joined
from kvcalc.question.fields import IN_TURN
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.server.admission import accept_prompts
from kvcalc.server.case import Case
from kvcalc.server.speed import Speed
from kvcalc.server.transfer import link_bytes_per_second
from kvcalc.simulation.common_prefix import CommonPrefix, case_of, check_reuse
from kvcalc.simulation.coupled import Coupled, Link
from kvcalc.simulation.fleet import Progress, run_load
from kvcalc.simulation.loads.load import Load
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.loads.supply import Supply
from kvcalc.simulation.play import known_speed, named_in, shared_tokens_of
from kvcalc.simulation.replicas.rules import Lag
from kvcalc.simulation.replicas.times import ModelTimes
from kvcalc.simulation.results import Limits, Outcome
from kvcalc.simulation.scheduler import Scheduler, scheduler_of
from kvcalc.throughput.hardware import Devices, Gpu

if TYPE_CHECKING:
    import kvcalc.documents as documents


class Prefills(NamedTuple):
    """The prefill instances of a simulation, and the link to the decode instances: bytes per second, or a name.

    What is None is as in the decode instances, also in the `layout` of one instance, but for its stages, of which the
    default is one. `engine_settings` are those that only prefill instances have, and `gpu` is another kind of device.
    """

    replicas: int
    transfer: int | str
    layout: LayoutAsked = LayoutAsked()
    engine_settings: Mapping[str, str] = {}
    gpu: Gpu | None = None

    def of(self, question: Question, tensor_parallel_size: int) -> Question:
        """The question about one prefill instance. `question` is about one decode instance."""
        layout = self.layout.over(LayoutAsked(tensor_parallel_size, 1))
        return question.with_layout(layout)._replace(
            engine_settings={**(question.engine_settings or {}), **self.engine_settings},
            devices=question.devices if self.gpu is None else Devices(self.gpu, 1),
            # What is found of a prefix while tokens are drafted depends on it (`engines.prefixes.Matching`).
            reuse=None if question.reuse is None else question.reuse._replace(transfer=self.transfer),
        )

    def bytes_per_second(self, decode: Gpu) -> int:
        """The rate of the link between these and decode instances on a kind of device: that of the slower one."""
        if isinstance(self.transfer, int):
            return self.transfer
        return min(link_bytes_per_second(self.transfer, gpu) for gpu in (self.gpu or decode, decode))


class _Pool(NamedTuple):
    case: Case
    speed: Speed
    scheduler: Scheduler
    prefix: CommonPrefix | None


def simulate_pools(
    question: Question, load: Load, prefills: Prefills, limits: Limits = Limits(), *, replicas: int | None = None,
    step_factor: float = 1.0, progress: Progress | None = None, is_detailed: bool = True,
) -> documents.Simulate:  # fmt: skip
    """The document of `kvcalc simulate` with `prefills`. `replicas` are the decode instances, 1 if None.

    The question and `is_detailed` are those of `simulate`; the layout is that of a decode instance. Raises what
    `simulate` raises, and UsageError (exit 2) for an unknown link, or for what separate instances cannot do.
    """
    if load.router != IN_TURN:
        raise UsageError(f"--router {load.router}: separate instances get requests in turn", "leave it out")
    question, devices, requests, notes = ask_about(question, load)
    needs, replicas, most = disaggregation_of(question.engine), replicas or 1, question.context_tokens or 1
    longest = most, min(most, requests.longest_prompt)
    _check_stages(needs, question, prefills)
    check_reuse(question)
    alone = question._replace(devices=Devices(devices.gpu, 1))
    # The prefix is found on the prefill instance alone.
    decode = _decode_pool(without_hits(alone), needs, longest, notes)
    prefill_question = prefills.of(alone, decode.case.layout.tensor_parallel_size)
    prefill = _prefill_pool(prefill_question, needs, longest)
    check_joined(prefill.case, decode.case)
    needed = prefills.replicas * prefill.case.layout.num_devices + replicas * decode.case.layout.num_devices
    if devices.num_devices not in (1, needed):
        raise UsageError(
            f"both pools need {needed} devices, and there are {devices.num_devices}", "leave the number out"
        )
    supply = Supply(
        requests, most,
        lambda request: decode.scheduler.fits(request) and prefill.scheduler.fits(_prompt_of(request)),
    )  # fmt: skip
    shared_tokens = shared_tokens_of(prefill.case, prefill.scheduler, requests.block_tokens, notes)
    if question.reuse is not None and prefill.prefix is not None:
        notes += [note for note in prefill.case.notes if note not in notes]
    named = named_in(prefill_question, prefill.scheduler, requests, load, prefills.replicas, prefill.prefix, notes)
    if named is not None:
        supply.name, shared_tokens = named
    rate = prefills.bytes_per_second(devices.gpu)
    make_prefill = partial(prefill.scheduler.server, _times(prefill, step_factor), shared_tokens=shared_tokens)
    pools = Coupled(
        supply,
        (prefills.replicas, make_prefill),
        (replicas, partial(decode.scheduler.server, _times(decode, step_factor))),
        Link(rate, _bytes_of(prefill.case, decode.case)),
        load.clients,
    )  # fmt: skip
    for server in pools.prefills:
        server.first_seconds = step_factor * load.first_seconds(prefill.speed.model.constants)
    if not is_detailed:
        for server in (*pools.prefills, *pools.decodes):
            server.keep_sums()
    outcome = run_load(pools, load, supply, notes, progress)
    instances = Instances(decode.case, decode.speed, decode.scheduler, replicas, needed)
    document = describe_outcome(outcome, instances, load, limits, step_factor, notes)
    seconds = document["results"]["duration_seconds"]
    described = _describe_prefill(prefills, prefill.case, pools, rate, seconds, outcome)
    return cast("documents.Simulate", {**document, "prefill": described, "warnings": describe_notes(notes)})


def _check_stages(needs: Disaggregation, question: Question, prefills: Prefills) -> None:
    """LayoutError (exit 2) for pipeline stages that the engine's instances cannot have."""
    for stages, may_have, role in (
        (question.pipeline_parallel_size, needs.staged_decode, "decode"),
        (prefills.layout.pipeline_parallel_size or 1, needs.staged_prefill, "prefill"),
    ):
        if stages > 1 and not may_have:
            name = question.engine.partition("@")[0]
            raise LayoutError(f"--pp {stages}: {role} instances of {name} have one pipeline stage", "leave --pp out")


def _prompt_of(request: Request) -> Request:
    """A request whose answer ends with its first token."""
    return Request(request.number, request.arrival, request.prompt_tokens, 1, request.cached_tokens)


def _prefill_pool(question: Question, needs: Disaggregation, longest: tuple[int, int]) -> _Pool:
    try:
        pool = _scheduled(in_role(question, needs, PREFILL), needs, longest, [], lowers_limit=True)
    except LayoutError as error:
        raise LayoutError(f"prefill instances: {error.message}", error.hint) from None
    rules = pool.scheduler.rules
    lag = None if rules.lag is None else rules.lag._replace(steps=0.0)
    return pool._replace(scheduler=pool.scheduler._replace(rules=rules._replace(lag=lag, sends=True), finds_own=False))


def _decode_pool(question: Question, needs: Disaggregation, longest: tuple[int, int], notes: list[Note]) -> _Pool:
    pool = _scheduled(in_role(question, needs, DECODE), needs, longest, notes, lowers_limit=False)
    constants, scheduler = pool.speed.model.constants, pool.scheduler
    lag = Lag(handover_seconds(needs, constants), constants.ttft_steps)
    # No engine stops decoding for a cache that is received: the request joins the next step.
    schedule = scheduler.rules.schedule
    if schedule.new_tokens is not None:
        schedule = schedule._replace(name="running first", mixes=True, new_tokens=None)
    rules = scheduler.rules._replace(schedule=schedule, lag=lag, keeps=needs.preempted_keep)
    return pool._replace(scheduler=scheduler._replace(rules=rules))


def _scheduled(
    question: Question, needs: Disaggregation, longest: tuple[int, int], notes: list[Note], *, lowers_limit: bool
) -> _Pool:
    """An instance for requests of up to `longest` tokens: in all, and in the prompt. See `scheduler_of`."""
    case, prefix = case_of(question)
    accept_prompts(case, longest[1], notes)
    speed = known_speed(case, notes)
    notes += case.notes
    buffers = buffer_bytes(needs, case, longest[1])
    scheduler = scheduler_of(case, speed.model, longest[0], buffers, lowers_limit=lowers_limit)
    return _Pool(case, speed, scheduler, prefix)


def _times(pool: _Pool, factor: float) -> ModelTimes:
    return ModelTimes(pool.speed.model, factor)


def _bytes_of(prefill: Case, decode: Case) -> Any:
    """A function from a prompt's tokens to the bytes that the busiest device sends or receives."""
    sent, received = sender_of(prefill), sender_of(decode)
    return lru_cache(maxsize=65_536)(lambda tokens: transfer_bytes(sent(tokens), received(tokens)))


def _describe_prefill(
    prefills: Prefills, case: Case, pools: Coupled, rate: int, seconds: float, outcome: Outcome
) -> documents.SimulatePrefill:
    sent = [each for each in pools.sent if each.request.finish is not None]
    # The parts of TTFT are those of the requests whose TTFT counts, without the warm-up.
    numbers = {request.number for request in outcome.requests[outcome.first : outcome.last]}
    counted = [each for each in sent if each.request.number in numbers]
    number = len(counted)
    ranks: Sequence[Any] = [rank for server in pools.prefills for rank in server.ranks]
    return {
        "gpu": case.devices.gpu.name,
        "replicas": prefills.replicas,
        **case.layout.describe(),
        "link": prefills.transfer if isinstance(prefills.transfer, str) else None,
        "bandwidth_bytes_per_second": rate,
        "sent_bytes": sum(sending.num_bytes for sending in sent),
        "busy_share": sum(rank.timeline.busy_seconds for rank in ranks) / (seconds * len(ranks)),
        "mean_queue_seconds": sum((sending.request.started or 0.0) - sending.request.arrival for sending in counted)
        / number,
        "mean_prefill_seconds": sum(
            (sending.request.finish or 0.0) - (sending.request.started or 0.0) for sending in counted
        )
        / number,
        "mean_transfer_seconds": sum(sending.end - (sending.request.finish or 0.0) for sending in counted) / number,
    }
