"""One prefill or decode instance in a layout: its times, the requests whose cache fits, and the bytes it sends."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from kvcalc.engines import disaggregation_of, engine_class
from kvcalc.engines.command import DECODE, PREFILL
from kvcalc.engines.rounding import round_up
from kvcalc.engines.scheduler import Disaggregation
from kvcalc.errors import LayoutError, ModelError
from kvcalc.model.layout import Layout
from kvcalc.planning.answers.estimate import Answer, answer_case
from kvcalc.planning.answers.throughput import gaps_of
from kvcalc.planning.plan.disaggregated.rates import Decode, Prefill, between_counts
from kvcalc.planning.plan.traffic import Platform, Traffic, Trouble
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.search import largest_where
from kvcalc.server.admission import most_at_once
from kvcalc.server.budget import Budget, budget
from kvcalc.server.capacity import fitting_batch, largest_batch, least, max_running_requests
from kvcalc.server.case import Case, make_case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.hardware import Devices
from kvcalc.throughput.serving import host_wait
from kvcalc.throughput.speed import judged_factor, range_factors
from kvcalc.units import format_size

# Instances agree on the place of a cache, and poll until it is sent. 55 runs of InferenceX (DeepSeek-R1, SGLang and
# TensorRT-LLM) say how long: the median error of their median time to first token is smallest with this.
HANDOVER_SECONDS = 0.08
# More prompts in a step save no time: the step is bound by operations long before. So no more run at once either.
MOST_PROMPTS = 256


class Sent(NamedTuple):
    """The bytes of a prompt's cache: on the device that holds the most, and on all devices that hold the request."""

    busiest_bytes: int
    total_bytes: int


class Started(NamedTuple):
    """An instance with a limit of running requests: its budget, and the bytes for the cache beside transfer buffers."""

    case: Case
    room: Budget
    pool_bytes: int
    buffer_bytes: int
    held_tokens: int

    @property
    def fitting(self) -> int | None:
        """The requests whose cache fits. None without a limit."""
        return fitting_batch(self.room.case, self.pool_bytes, self.held_tokens, self.room.pool_shrinkage)

    @property
    def slots(self) -> int | None:
        """The requests whose cache fits and that run at once. None without a limit."""
        return self.largest(self.held_tokens)

    def takes_as_much_as(self, other: Started) -> bool:
        """Whether another limit of running requests takes the same memory."""
        needed = {instance.room.case.needed_bytes(instance.held_tokens, 1) for instance in (self, other)}
        return self.pool_bytes == other.pool_bytes and len(needed) == 1

    def largest(self, tokens: int) -> int | None:
        """The requests of `tokens` tokens that run at once. None without a limit."""
        return largest_batch(self.room.case, self.pool_bytes, tokens, self.room.pool_shrinkage)


class Start(NamedTuple):
    """How an instance is started: the question about it, its server's context, and what its requests need.

    `prompt_tokens` are those of the longest prompt. With `is_strict`, the memory is that of the low end of its range.
    """

    question: Question
    needs: Disaggregation
    context_tokens: int
    held_tokens: int
    prompt_tokens: int
    is_strict: bool

    def at(self, each: int | None) -> Started:
        """The start with a limit of running requests on each DP rank. None: with the one that was given, or none."""
        question, engine = self.question, engine_class(self.question.engine)
        if each is not None and engine.running_option is not None:
            requests = each * question.data_parallel_size if engine.counts_all_ranks else each
            settings = {**(question.engine_settings or {}), engine.running_option: str(requests)}
            question = question._replace(engine_settings=settings)
        case = make_case(question)
        here = case.at(self.context_tokens, 1)
        room = budget(here)
        if isinstance(room, str):
            raise ModelError(f"{case.model.name} cannot be planned for {case.devices.gpu.name}: {room}")
        buffers = buffer_bytes(self.needs, case, self.prompt_tokens)
        pool = room.pool_bytes - buffers
        if self.is_strict:
            fit = answer_case(here).fit
            pool -= fit["free_bytes"] - (fit["free_bytes"] if fit["free_low_bytes"] is None else fit["free_low_bytes"])
        return Started(case, room, pool, buffers, self.held_tokens)

    def largest(self, at_most: int | None) -> tuple[Started, int | None]:
        """The start with the largest limit of running requests that fit, and that limit on each DP rank.

        A server reserves memory for the requests that may run: with a larger limit it may hold fewer of them. The limit
        is None if the memory does not depend on it. All DP ranks have no more than `at_most`, or than the limit given.
        """
        ranks, at = self.question.data_parallel_size, cache(self.at)
        default_start = at(None)
        slots, most = default_start.slots, max_running_requests(default_start.case, None)
        if slots is None or engine_class(self.question.engine).running_option is None:
            return default_start, None
        most = least(most, None if at_most is None else -(-at_most // ranks) * ranks)
        each = max(1, min(slots, most or slots) // ranks)
        if all(at(limit).takes_as_much_as(default_start) for limit in (each, 1)):
            return default_start, None
        while each > 1 and (at(each).slots or 0) < each * ranks:
            each = max(1, (at(each).slots or 0) // ranks)
        high = least(at(each).fitting, most) or 0
        each = largest_where(lambda each: (at(each).slots or 0) >= each * ranks, each, max(each, high // ranks))
        return at(each), each


class Instance(NamedTuple):
    """One instance. `rates` are its times: `Prefill` or `Decode`. `held_tokens` are those of a request in its cache.

    `start` starts it with another limit of running requests, and `each` is that of a DP rank, None if its memory does
    not depend on it.
    """

    shape: Layout
    case: Case
    speed: Speed
    slots: int | None
    held_tokens: int
    sent: Sent
    buffer_bytes: int
    start: Start
    each: int | None
    rates: Any

    def ttft_factors(self, prompts: int) -> tuple[float, float, float]:
        """The factors on the time of a prefill for its low and high end, and for the time that is judged."""
        return self._factors(self.speed.regime.ttft_ranges, prompts)

    def step_factors(self, batch: float) -> tuple[float, float, float]:
        """The same factors on the time of a step."""
        return self._factors(self.speed.regime.ranges, max(1, round(batch)))

    def most_within(self, tpot_seconds: float | None) -> int:
        """The most requests in the batch of a decode instance whose judged TPOT is within a limit. 0 for none."""
        if tpot_seconds is None:
            return int(self.rates.most)
        return largest_where(
            lambda batch: self.rates.tpot(batch) * self.step_factors(batch)[2] <= tpot_seconds, 0, self.rates.most
        )

    def _factors(self, ranges: Any, batch: int) -> tuple[float, float, float]:
        gaps = gaps_of(self.case, self.speed, batch)
        low, high = range_factors(self.speed.model, ranges, self.speed.weight_dtype, batch, gaps)
        return low, high, judged_factor(high, self.case.question.speed_asked.confidence)

    def answer(self, requests: int) -> Answer:
        """The estimate with a number of requests in the cache. It does not count the buffers for the transfer."""
        return answer_case(self.case.at(min(self.held_tokens, self.start.context_tokens), requests))

    def limited(self, requests: int) -> Instance:
        """The instance with the limit of running requests with which so many run, as its command has it.

        Every DP rank has the same. The limit stays what it is if the smaller one takes more memory.
        """
        ranks = self.shape.data_parallel_size
        if self.each is None or requests >= self.each * ranks:
            return self
        each = -(-requests // ranks)
        start = self.start.at(each)
        if (start.slots or 0) < each * ranks:
            return self
        return self._replace(case=start.case, each=each, slots=least(self.slots, start.fitting))

    @property
    def limit(self) -> int | None:
        """The limit of running requests on all DP ranks. None if the memory does not depend on it."""
        return None if self.each is None else self.each * self.shape.data_parallel_size

    def free_bytes(self, answer: Answer) -> tuple[int, int]:
        """The free memory of a device after the buffers for the transfer, and at its least."""
        free, low = answer.fit["free_bytes"], answer.fit["free_low_bytes"]
        return free - self.buffer_bytes, (free if low is None else low) - self.buffer_bytes


def prefill_instance(traffic: Traffic, kind: Platform, shape: Layout) -> Instance | Trouble:
    """A prefill instance, or why it cannot run. LayoutError if the model cannot be split this way."""
    needs, lengths = disaggregation_of(kind.engine), traffic.lengths
    if shape.pipeline_parallel_size > 1 and not needs.staged_prefill:
        raise LayoutError("no pipeline stages in prefill instances")
    # A prefill instance gives the first token only.
    instance = _instance(traffic, kind, shape, PREFILL, lengths.input_tokens + 1, MOST_PROMPTS)
    if isinstance(instance, Trouble):
        return instance
    speed = instance.case.question.speed_asked
    model, cached = instance.speed.model, speed.prefix_hit_rate * lengths.input_tokens
    schedule, missed = instance.case.engine.schedule(), max(1, round(lengths.input_tokens - cached))
    each = 1 if schedule is None else max(1, schedule.step_tokens // missed)
    rates = Prefill(
        shape.num_devices,
        between_counts(lambda prompts: model.prefill(lengths.input_tokens, prompts, cached).seconds),
        min(each, MOST_PROMPTS) * shape.data_parallel_size,
        shape.pipeline_parallel_size,
        instance.slots,
        host_wait(model.constants, 0.0, lengths.input_tokens)
        + model.launch_wait(model.prefill(lengths.input_tokens, 1, cached).seconds),
    )
    return instance._replace(rates=rates)


def decode_instance(traffic: Traffic, kind: Platform, shape: Layout) -> Instance | Trouble:
    """A decode instance, or why it cannot run. LayoutError if the model cannot be split this way."""
    needs, lengths = disaggregation_of(kind.engine), traffic.lengths
    if shape.pipeline_parallel_size > 1 and not needs.staged_decode:
        raise LayoutError("no pipeline stages in decode instances")
    held = lengths.held_tokens
    if needs.reserved_tokens:
        # When a request is admitted, the others have half of their answers on average, and each has these tokens more.
        held = max(held, lengths.input_tokens + -(-lengths.output_tokens // 2) + needs.reserved_tokens)
    # A decode instance receives the whole cache of a prompt, including the prefix that the prefill instance found.
    traffic = traffic._replace(question=without_hits(traffic.question))
    instance = _instance(traffic, kind, shape, DECODE, held)
    if isinstance(instance, Trouble):
        return instance
    model = instance.speed.model
    context = lengths.input_tokens + lengths.output_tokens / 2
    tpot = between_counts(lambda requests: model.decode(requests, context).seconds / model.tokens_per_step)
    most = most_at_once(instance.case, budget(instance.case))
    most = most if instance.slots is None else min(most, instance.slots)
    schedule, constants = instance.case.engine.schedule(), model.constants
    # Its own step, half of the one that runs, and the next one if it is scheduled already.
    steps = 1.5 + (schedule is not None and schedule.overlaps) + constants.ttft_steps
    host = handover_seconds(needs, constants)
    rates = Decode(
        shape.num_devices, tpot, most, lengths.output_tokens, instance.slots, steps, host,
        model.tokens_per_step,
    )  # fmt: skip
    return instance._replace(rates=rates)


def handover_seconds(needs: Disaggregation, constants: Constants) -> float:
    """The seconds from a prompt's last step to its first decode step, besides the transfer and waiting for steps."""
    return HANDOVER_SECONDS + (needs.host_passes - 1) * constants.ttft_seconds


def without_hits(question: Question) -> Question:
    """The question of an instance that finds no prefixes."""
    speed = question.speed and question.speed._replace(prefix_hit_rate=0.0)
    return question._replace(reuse=None, speed=speed)


def in_role(question: Question, needs: Disaggregation, role: str) -> Question:
    """The question about an instance of a role, with the options that it has in any case."""
    return question._replace(engine_settings={**(question.engine_settings or {}), **needs.settings.get(role, {})})


def _instance(
    traffic: Traffic, kind: Platform, shape: Layout, role: str, held_tokens: int, most: int | None = None
) -> Instance | Trouble:
    """The memory and the speed of an instance whose requests hold `held_tokens` tokens. At most `most` of them run."""
    lengths, needs = traffic.lengths, disaggregation_of(kind.engine)
    question_asked = traffic.question.with_layout(shape.asked)
    context, option = traffic.context_for(kind.engine), engine_class(kind.engine).context_option or ""
    settings = {option.removeprefix("--"): str(context), **traffic.settings_with(shape)}
    speed = question_asked.speed_asked._replace(input_tokens=lengths.input_tokens, output_tokens=lengths.output_tokens)
    question = question_asked._replace(
        dtype=kind.dtype,
        engine=kind.engine,
        engine_settings=traffic.settings_for(kind.engine, settings),
        devices=Devices(kind.gpu, shape.num_devices),
        speed=speed,
    )
    start = Start(
        in_role(question, needs, role), needs, context, held_tokens, lengths.longest_prompt, traffic.strict
    )  # fmt: skip
    started, each = start.largest(most)
    case = started.case
    speed_model = speed_of(case, [])
    if isinstance(speed_model, str):
        raise ModelError(f"{case.model.name} cannot be planned for {kind.gpu.name}: {speed_model}")
    slots = started.slots if needs.limits_held or each is None else started.fitting
    sent = sender_of(case)(lengths.input_tokens)
    instance = Instance(shape, case, speed_model, slots, held_tokens, sent, started.buffer_bytes, start, each, None)
    for tokens in sorted({held_tokens, lengths.longest_tokens}):
        if not started.largest(tokens) and slots is not None:
            held = case.at(min(tokens, context), 1)
            missing = -instance.free_bytes(answer_case(held))[bool(traffic.strict)]
            more = f": {format_size(missing)} more is needed per device" if missing > 0 else ""
            return Trouble(f"{shape}: a request of {tokens:,} tokens does not fit{more}")
    return instance


def sender_of(case: Case) -> Callable[[int], Sent]:
    """The cache that a prompt's tokens fill, by the engine's own account, as `server.transfer` counts it.

    One tensor-parallel rank has the same layers in all its stages together.
    """
    workload, of_stage = case.workload, case.prefixes()
    of_rank = case.allocation.prefixes(case.share, workload.kv_dtype)
    ranks = workload.layout.tensor_parallel_size
    return lambda tokens: Sent(of_stage.sent_bytes(tokens), of_rank.sent_bytes(tokens) * ranks)


def buffer_tokens(traffic: Traffic, case: Case) -> int:
    """The tokens of a transfer buffer: whole blocks for the prompt, or for the longest request of several."""
    return round_up(traffic.lengths.longest_prompt, case.prefixes().block_tokens)


def buffer_bytes(needs: Disaggregation, case: Case, prompt_tokens: int) -> int:
    """The bytes of a device's transfer buffers, of which each holds a prompt in whole blocks and one more block."""
    if not needs.transfer_buffers:
        return 0
    prefixes = case.prefixes()
    tokens = round_up(prompt_tokens, prefixes.block_tokens) + prefixes.block_tokens
    return needs.transfer_buffers * prefixes.sent_bytes(tokens)


def transfer_bytes(prefill: Sent, decode: Sent) -> int:
    """The bytes that the busiest device sends or receives.

    A device of the decode instance receives its whole share. What all of them receive is spread over the devices of the
    prefill instance as the cache is. If a cache is on all devices of both, each sends what its counterpart receives.
    """
    return max(decode.busiest_bytes, -(-decode.total_bytes * prefill.busiest_bytes // prefill.total_bytes))
