"""One prefill or decode instance in a layout: its times, the requests whose cache fits, and the bytes it sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.engines import disaggregation_of
from kvcalc.engines.rounding import round_up
from kvcalc.engines.scheduler import Disaggregation
from kvcalc.errors import LayoutError, ModelError
from kvcalc.planning.answers.estimate import Answer, answer_case
from kvcalc.planning.cases.case import Case, make_case
from kvcalc.planning.device.budget import budget
from kvcalc.planning.device.capacity import largest_batch
from kvcalc.planning.plan.disaggregated.rates import Decode, Prefill, between_counts
from kvcalc.planning.plan.shapes import Shape
from kvcalc.planning.plan.traffic import Platform, Traffic, Trouble, seconds_text
from kvcalc.planning.serving.admission import most_at_once
from kvcalc.planning.serving.throughput import Speed, speed_of, unfitted_of
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.search import largest_where
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.hardware import Devices
from kvcalc.throughput.serving import host_wait
from kvcalc.throughput.speed import range_factors
from kvcalc.units import format_size

# Instances agree on the place of a cache, and poll until it is sent. 55 runs of InferenceX (DeepSeek-R1, SGLang and
# TensorRT-LLM) say how long: the median error of their median time to first token is smallest with this.
HANDOVER_SECONDS = 0.05
# More prompts in a step save no time: the step is bound by operations long before.
_MOST_PROMPTS = 256


class Sent(NamedTuple):
    """The bytes of a prompt's cache: on the device that holds the most, and on all devices that hold the request."""

    busiest_bytes: int
    total_bytes: int


class Instance(NamedTuple):
    """One instance. `rates` are its times: `Prefill` or `Decode`. `held_tokens` are those of a request in its cache."""

    shape: Shape
    case: Case
    speed: Speed
    slots: int | None
    held_tokens: int
    sent: Sent
    buffer_bytes: int
    rates: Any

    def ttft_factors(self, prompts: int) -> tuple[float, float]:
        """The factors on the time of a prefill for its low and high end."""
        return self._factors(self.speed.regime.ttft_ranges, prompts)

    def tpot_factors(self, decoding: float) -> tuple[float, float]:
        """The factors on the time of a decode step for its low and high end."""
        return self._factors(self.speed.regime.ranges, max(1, round(decoding)))

    def tpot(self, seconds: float, decoding: float) -> tuple[float, float, float]:
        """The estimate of the time of a decode step, with the low and high end of its range."""
        low, high = self.tpot_factors(decoding)
        return seconds, seconds * low, seconds * high

    def _factors(self, ranges: Any, batch: int) -> tuple[float, float]:
        is_outside = bool(unfitted_of(self.case, self.speed, batch))
        return range_factors(self.speed.model, ranges, self.speed.weight_dtype, batch, is_outside)

    def answer(self, requests: int) -> Answer:
        """The estimate with a number of requests in the cache. It does not count the buffers for the transfer."""
        return answer_case(self.case.at(self.held_tokens, requests))

    def free_bytes(self, answer: Answer) -> tuple[int, int]:
        """The free memory of a device after the buffers for the transfer, and at its least."""
        free, low = answer.fit["free_bytes"], answer.fit["free_low_bytes"]
        return free - self.buffer_bytes, (free if low is None else low) - self.buffer_bytes


def prefill_instance(traffic: Traffic, kind: Platform, shape: Shape) -> Instance | Trouble:
    """A prefill instance, or why it cannot run. LayoutError if the model cannot be split this way."""
    needs, lengths = disaggregation_of(kind.engine), traffic.lengths
    if shape.stages > 1 and not needs.staged_prefill:
        raise LayoutError("no pipeline stages in prefill instances")
    # A prefill instance gives the first token only.
    found = _instance(traffic, kind, shape, needs, {}, lengths.input_tokens + 1)
    if isinstance(found, Trouble):
        return found
    asked = found.case.question.speed_asked
    model, cached = found.speed.model, asked.prefix_hit_rate * lengths.input_tokens
    schedule, missed = found.case.engine.schedule(), max(1, round(lengths.input_tokens - cached))
    each = 1 if schedule is None else max(1, schedule.step_tokens // missed)
    rates = Prefill(
        shape.devices,
        between_counts(lambda prompts: model.prefill(lengths.input_tokens, prompts, cached).seconds),
        min(each, _MOST_PROMPTS) * shape.dp_ranks,
        shape.stages,
        found.slots,
        host_wait(model.constants, 0.0, lengths.input_tokens)
        + model.launch_wait(model.prefill(lengths.input_tokens, 1, cached).seconds),
    )
    return found._replace(rates=rates)


def decode_instance(traffic: Traffic, kind: Platform, shape: Shape) -> Instance | Trouble:
    """A decode instance, or why it cannot run. LayoutError if the model cannot be split this way."""
    needs, lengths = disaggregation_of(kind.engine), traffic.lengths
    if shape.stages > 1 and not needs.staged_decode:
        raise LayoutError("no pipeline stages in decode instances")
    held = lengths.held_tokens
    if needs.reserved_tokens:
        # When a request is admitted, the others have half of their answers on average, and each has these tokens more.
        held = max(held, lengths.input_tokens + -(-lengths.output_tokens // 2) + needs.reserved_tokens)
    # A decode instance receives the whole cache of a prompt, including the prefix that the prefill instance found.
    traffic = traffic._replace(question=without_hits(traffic.question))
    found = _instance(traffic, kind, shape, needs, dict.fromkeys(needs.decode_settings, True), held)
    if isinstance(found, Trouble):
        return found
    model = found.speed.model
    context = lengths.input_tokens + lengths.output_tokens / 2
    tpot = between_counts(lambda requests: model.decode(requests, context).seconds / model.tokens_per_step)
    most = most_at_once(found.case, budget(found.case))
    most = most if found.slots is None else min(most, found.slots)
    longest = traffic.targets.max_tpot_seconds

    def judged_tpot(requests: int) -> float:
        return traffic.targets.judged("tpot", *found.tpot(tpot(requests), requests))

    def is_fast(requests: int) -> bool:
        return longest is None or judged_tpot(requests) <= longest

    if longest is not None and not is_fast(1):
        alone, longest_alone = seconds_text(tpot(1)), seconds_text(judged_tpot(1))
        alone = alone if alone == longest_alone else f"{alone}, up to {longest_alone},"
        return Trouble(f"{shape}: TPOT of one request is {alone} and the limit is {seconds_text(longest)}")
    schedule, constants = found.case.engine.schedule(), model.constants
    # Its own step, half of the one that runs, and the next one if it is scheduled already.
    steps = 1.5 + (schedule is not None and schedule.overlaps) + constants.ttft_steps
    host = handover_seconds(needs, constants)
    rates = Decode(
        shape.devices, tpot, largest_where(is_fast, 1, most), lengths.output_tokens, found.slots, steps, host,
        model.tokens_per_step,
    )  # fmt: skip
    return found._replace(rates=rates)


def handover_seconds(needs: Disaggregation, constants: Constants) -> float:
    """The seconds from a prompt's last step to its first decode step, besides the transfer and waiting for steps."""
    return HANDOVER_SECONDS + (needs.host_passes - 1) * constants.ttft_seconds


def without_hits(question: Question) -> Question:
    """The question of an instance that finds no prefixes."""
    speed = question.speed and question.speed._replace(prefix_hit_rate=0.0)
    return question._replace(reuse=None, speed=speed)


def _instance(
    traffic: Traffic, kind: Platform, shape: Shape, needs: Disaggregation, settings: Mapping[str, Any], held_tokens: int
) -> Instance | Trouble:
    """The memory and the speed of an instance whose requests hold `held_tokens` tokens."""
    lengths, asked = traffic.lengths, shape.of(traffic.question)
    own = traffic.settings_for(kind.engine, {**(asked.engine_settings or {}), **settings})
    speed = asked.speed_asked._replace(input_tokens=lengths.input_tokens, output_tokens=lengths.output_tokens)
    case = make_case(
        asked._replace(
            dtype=kind.dtype,
            engine=kind.engine,
            engine_settings=own,
            tensor_parallel_size=shape.tensor,
            pipeline_parallel_size=shape.stages,
            devices=Devices(kind.gpu, shape.devices),
            speed=speed,
        )
    )
    found = speed_of(case, [])
    if isinstance(found, str):
        raise ModelError(f"{case.model.name} cannot be planned for {kind.gpu.name}: {found}")
    room = budget(case.at(held_tokens, 1))
    if isinstance(room, str):
        raise ModelError(f"{case.model.name} cannot be planned for {kind.gpu.name}: {room}")
    sent, buffers = sent_of(case, lengths.input_tokens), buffer_bytes(needs, case, buffer_tokens(traffic, case))
    pool = room.pool_bytes - buffers
    instance = Instance(shape, case, found, None, held_tokens, sent, buffers, None)
    if traffic.strict:
        free, low = instance.free_bytes(instance.answer(1))
        pool -= free - low
    slots = largest_batch(room.case, pool, held_tokens, room.pool_shrinkage)
    for tokens in {held_tokens, lengths.longest_tokens}:
        if largest_batch(room.case, pool, tokens, room.pool_shrinkage) == 0:
            missing = -instance.free_bytes(answer_case(case.at(tokens, 1)))[bool(traffic.strict)]
            more = f": {format_size(missing)} more is needed per device" if missing > 0 else ""
            return Trouble(f"{shape}: a request of {tokens:,} tokens does not fit{more}")
    return instance._replace(slots=slots)


def sent_of(case: Case, prompt_tokens: int) -> Sent:
    """The cache of a prompt by the engine's own account, as `planning.serving.transfer` counts it.

    One tensor-parallel rank has the same layers in all its stages together.
    """
    workload = case.workload
    whole = case.allocation.prefixes(case.share, workload.kv_dtype).sent_bytes(prompt_tokens)
    return Sent(case.prefixes().sent_bytes(prompt_tokens), whole * workload.tensor_parallel_size)


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
