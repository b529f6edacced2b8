"""The scheduler and the pool of one case: what its engine's schedule allows, and how many blocks it has."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from kvcalc.engines import engines_that
from kvcalc.engines.account import RunningPool
from kvcalc.engines.engine import Engine
from kvcalc.engines.scheduler import Schedule
from kvcalc.errors import DoesNotFitError, ModelError, UsageError
from kvcalc.notes import Note
from kvcalc.records import NamedTuple
from kvcalc.server.admission import most_at_once
from kvcalc.server.budget import budget
from kvcalc.server.capacity import too_many_to_start
from kvcalc.server.case import Case
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.load import Load
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.lock_step import LockStep, OfRank
from kvcalc.simulation.replicas.mixed import MixedReplica, SlotsReplica
from kvcalc.simulation.replicas.pool import BlockPool
from kvcalc.simulation.replicas.prefill_first import PrefillFirstReplica
from kvcalc.simulation.replicas.prefix_cache import PrefixCache
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.replicas.routing import ROUTERS
from kvcalc.simulation.replicas.rules import Lag, Rules
from kvcalc.simulation.replicas.server import Server
from kvcalc.simulation.replicas.times import ModelTimes
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.serving import first_host_wait, full_step_seconds


class Scheduler(NamedTuple):
    """The scheduler for one case, and the blocks that each of its DP ranks has.

    `finds_own` is whether a preempted request finds its own blocks again, as far as they are still in the cache.
    """

    rules: Rules
    pool: RunningPool
    finds_own: bool
    dp_ranks: int

    def fits(self, request: Request) -> bool:
        """Whether a request can ever run to its end."""
        capacity, size, table, prompt_table = self.pool
        if capacity is None:
            return True
        tokens = request.total_tokens + self.rules.lookahead_tokens
        if self.rules.schedule.new_tokens is not None:
            return tokens + size < capacity
        place, table = -(-tokens // size), prompt_table or table
        return place < len(table) and table[place] <= capacity

    def cannot_share(self, tokens: int) -> str | None:
        """Why named blocks of `tokens` tokens are not shared between requests. None if they are."""
        if self.pool.capacity is None:
            return "slots keep their requests apart"
        if tokens % self.pool.block_tokens:
            return f"blocks of {self.pool.block_tokens} tokens do not make up those of {tokens} tokens in the trace"
        return None if isinstance(self.pool.table, range) else "layers with windows or states share other blocks"

    def first_wait(self, load: Load, model: SpeedModel, requests: Sequence[Request], replicas: int) -> float:
        """How many seconds later the first step with prompts ends on each DP rank of so many replicas.

        The first of `requests` arrive together in a closed loop, and each waits for the host's time of the others.
        """
        c, (schedule, running) = model.constants, (self.rules.schedule, self.rules.max_running)
        together = load.first_of(requests, replicas * self.dp_ranks)[:running]
        if not together:
            return load.first_seconds(c)
        tokens, cached = (
            sum(each) / len(together)
            for each in zip(*((request.prompt_tokens, request.given_tokens) for request in together))
        )
        hidden = 0.0
        if schedule.reads_beside:
            hidden = full_step_seconds(model, tokens, cached, schedule.steps(running, round(tokens)))
        return load.first_seconds(c) + first_host_wait(c, tokens, len(together) - 1, hidden)

    def server(self, times: ModelTimes, arrivals: Arrivals, shared_tokens: int | None = None) -> Server:
        """A replica for the requests of `arrivals`. They share named blocks of `shared_tokens` tokens, or none."""
        if self.dp_ranks == 1:
            return self._rank(times, arrivals, shared_tokens)
        ranks = [self._rank(times, OfRank(arrivals), shared_tokens) for _ in range(self.dp_ranks)]
        return LockStep(ROUTERS[self.rules.schedule.routing](ranks), times, arrivals)

    def _rank(self, times: ModelTimes, arrivals: Arrivals, shared_tokens: int | None) -> Replica:
        pool, schedule, prefixes = BlockPool(*self.pool), self.rules.schedule, None
        if shared_tokens is not None or self.finds_own:
            tokens = shared_tokens or self.pool.block_tokens
            prefixes = PrefixCache(
                pool, tokens, pool.units(tokens), finds_own=self.finds_own, merges=schedule.merges_prefixes
            )
        kind: type[Replica] = MixedReplica if schedule.new_tokens is None else PrefillFirstReplica
        return (SlotsReplica if schedule.has_slots else kind)(self.rules, times, pool, arrivals, prefixes)


# An engine whose scheduler is not known runs requests beside each other, each with memory of its own.
ASSUMED = Schedule("slots", reserves_answer=True, has_slots=True)


def scheduler_of(
    case: Case, model: SpeedModel, longest_tokens: int, buffer_bytes: int = 0, *, lowers_limit: bool = False,
    assumes: bool = False,
) -> Scheduler:  # fmt: skip
    """The scheduler of the case's engine for requests of up to `longest_tokens` tokens.

    `buffer_bytes` of a device's memory are not for the cache, such as buffers for sending it. With `lowers_limit`, a
    limit of running requests with which the engine does not start is lowered: it was given for other instances. With
    `assumes`, an engine whose scheduler is not known has `ASSUMED`.
    Raises UsageError (exit 2) for an engine or a layout that is not simulated, ModelError (exit 3) if the memory for
    the cache is not known, and DoesNotFitError (exit 4) if there is none.
    """
    schedule, room = case.engine.schedule() or (ASSUMED if assumes else None), budget(case)
    if schedule is None:
        known = engines_that(lambda engine: engine.schedule is not Engine.schedule)
        raise UsageError(f"--engine {case.engine_name}: its scheduler is not simulated", f"one of {', '.join(known)}")
    if case.layout.has_whole_copies:
        raise UsageError(
            "--dp: copies of a model without experts are replicas", f"--replicas {case.layout.data_parallel_size}"
        )
    if isinstance(room, str):
        raise ModelError(f"{case.model.name} cannot be simulated: {room}")
    if buffer_bytes:
        left = room.pool_bytes - buffer_bytes, room.offered_bytes - buffer_bytes
        room = room._replace(pool_bytes=left[0], offered_bytes=left[1])
    if room.pool_bytes <= 0:
        raise DoesNotFitError(
            f"{case.model.name} leaves no memory for the cache on {case.devices.gpu.name}",
            "kvcalc fit says how many devices it needs",
        )
    too_many = too_many_to_start(case, room.pool_bytes)
    if too_many is not None and not (too_many.is_default or lowers_limit):
        raise DoesNotFitError(too_many.refusal(case.engine.title))
    replicas, drafted = case.layout.data_parallel_size, case.question.speculative
    running = max(1, most_at_once(case, room) // replicas)
    checked, lookahead, pool = 1 if drafted is None else 1 + drafted.num_tokens, 0, RunningPool(None)
    if schedule.has_slots:
        # Without slots that are known, a request holds its own length.
        held = case.question.speed_asked.request_tokens if assumes and schedule is ASSUMED else None
        slots = room.running_limit(held or longest_tokens)
        running = running if slots is None else max(1, min(running, slots))
    else:
        if drafted is not None:
            from kvcalc.server.drafting import slots_of

            lookahead = slots_of(drafted, case.engine, serves_requests=True)
            longest_tokens += 2 * checked + lookahead
        dtype = case.workload.kv_dtype
        device = case.allocation.largest_stage(case.share, dtype, longest_tokens, 1)
        # TensorRT-LLM's hybrids have states for the requests that fit at full length, unless another number is given.
        limit = room.running_limit(longest_tokens)
        batch = running if limit is None else min(running, case.layout.attention_batch(max(1, limit)))
        pool = case.allocation.running_pool(device, dtype, longest_tokens, batch, room.offered_bytes)
    steps = schedule.steps(running, longest_tokens, checked)
    # Prompts in steps of their own are computed in whole blocks.
    step_tokens = steps.step_tokens if steps.mixes else max(steps.step_tokens, pool.block_tokens)
    per_step = Fraction(model.tokens_per_step).limit_denominator(1000)
    c = model.constants
    launch_seconds = c.prompt_launch_seconds * model.counts.launches
    lag = Lag(c.ttft_seconds, c.ttft_steps, c.ttft_token_seconds, launch_seconds)
    rules = Rules(schedule, step_tokens, running, lag, per_step, checked, lookahead)
    return Scheduler(rules, pool, schedule.finds_preempted and isinstance(pool.table, range), replicas)


def start_notes(case: Case) -> list[Note]:
    """Notes if the engine does not start with its default limit of running requests, of which fewer are simulated, and
    if the memory lacks a tower whose size is not known."""
    room = budget(case)
    if isinstance(room, str):
        return []
    too_many = too_many_to_start(case, room.pool_bytes)
    notes = [] if too_many is None else [Note("engine", "start-limit", too_many.refusal(case.engine.title))]
    return notes if room.towers is None else [*notes, *room.towers.notes]
