"""Simulate prefill and decode on separate instances: prompts are computed, sent, and answered elsewhere.

The engine's scheduler runs on both. On a prefill instance, a request ends with its first token. Then its cache is sent:
the link of every instance carries one cache at a time, at its rate, in the order in which the prompts are completed. On
the decode instance the request starts with the cache of all tokens but the last one, so the first step gives a token.
Requests go to the instances of a pool in turn. Nothing that happens on a decode instance holds up a prefill instance,
so the pools can run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from kvcalc.errors import ModelError, UsageError
from kvcalc.model.describe import describe_model
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.budget import describe_hardware
from kvcalc.planning.cache_tiers import move_seconds
from kvcalc.planning.case import Case, make_case
from kvcalc.planning.disaggregated.engines import SplitRules, rules_of
from kvcalc.planning.disaggregated.instances import sent_of, transfer_bytes
from kvcalc.planning.layout import SpeedQuestion
from kvcalc.planning.question import Question
from kvcalc.planning.throughput import Speed, speed_of
from kvcalc.planning.transfer import link_bytes_per_second
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.simulation.engines import Scheduler, scheduler_of
from kvcalc.simulation.load import Load, check_load, requests_of, split_requests
from kvcalc.simulation.pool import PoolError
from kvcalc.simulation.replica import Replica
from kvcalc.simulation.requests import Request
from kvcalc.simulation.results import Limits, describe_results, describe_timeline, describe_times
from kvcalc.simulation.rules import Lag
from kvcalc.simulation.simulate import check_fitting, describe_engine, describe_load, describe_range
from kvcalc.simulation.times import ModelTimes
from kvcalc.throughput.hardware import Devices


class Prefills(NamedTuple):
    """The prefill instances of a simulation, and the link to the decode instances: bytes per second, or a name."""

    replicas: int
    tensor_parallel_size: int | None
    transfer: int | str


class Sending(NamedTuple):
    """The cache of a request on its way: its bytes on the busiest device, and when it starts and arrives."""

    request: Request
    num_bytes: int
    start: float
    end: float


class _Pool(NamedTuple):
    case: Case
    speed: Speed
    scheduler: Scheduler

    def run(self, requests: Sequence[Request], replicas: int, step_factor: float) -> list[Replica]:
        """Run the requests, in turn, on a number of instances. At most as many instances as requests are used."""
        times = ModelTimes(self.speed.model, step_factor)
        running = [self.scheduler.replica(times, part, None) for part in split_requests(requests, replicas) if part]
        for replica in running:
            replica.run()
        return [rank for one in running for rank in one.ranks]


def simulate_pools(
    model: ModelSpec, load: Load, prefills: Prefills, limits: Limits = Limits(), *, replicas: int | None = None,
    step_factor: float = 1.0, **asked: Any,
) -> dict[str, Any]:  # fmt: skip
    """The document of `kvcalc simulate` with `prefills`. `replicas` are the decode instances, 1 if None.

    `asked` is that of `simulate`; its layout is that of a decode instance. Raises what `simulate` raises, and
    UsageError (exit 2) for clients that wait for their answers, for an unknown link, or if the engine has no separate
    instances.
    """
    check_load(load)
    rules, replicas = rules_of(asked.get("engine", "vllm")), replicas or 1
    for is_asked, option in (
        (asked.get("data_parallel_size", 1) > 1, "--dp"), (asked.get("speculative") is not None, "--speculative"),
        (asked.get("reuse") is not None, "--prefix-tokens"),
    ):  # fmt: skip
        if is_asked:
            raise UsageError(f"--prefill-replicas cannot be combined with {option}", "leave one of them out")
    if load.concurrency is not None:
        raise UsageError("--prefill-replicas: --concurrency is not simulated", "use --requests-per-second or --trace")
    if asked.get("devices") is None:
        raise UsageError("simulate needs a device", "for example --gpu h100")
    given = asked.pop("speed", None) or SpeedQuestion()
    notes: list[Note] = []
    requests, named_tokens = requests_of(load, given.prefix_hit_rate, notes)
    longest = max(request.total_tokens for request in requests)
    question = Question(model, **{**asked, "context_tokens": longest, "batch_size": 1}, speed=given)
    devices = asked["devices"]
    decode = _decode_pool(question._replace(devices=Devices(devices.gpu, 1)), rules, longest)
    size = decode.case.workload.tensor_parallel_size
    prefill = _prefill_pool(
        question._replace(
            devices=Devices(devices.gpu, 1), tensor_parallel_size=prefills.tensor_parallel_size or size,
            pipeline_parallel_size=1,
        ),
        longest,
    )  # fmt: skip
    needed = prefills.replicas * prefill.case.workload.num_devices + replicas * decode.case.workload.num_devices
    if devices.num_devices not in (1, needed):
        raise UsageError(
            f"both pools need {needed} devices, and there are {devices.num_devices}", "leave the number out"
        )
    notes += [*decode.case.notes]
    if named_tokens is not None:
        text = "the prefixes that requests of the trace share are not found: prefill instances are simulated without"
        notes.append(Note("load", "not-shared", text))
    fitting = [one for one in requests if decode.scheduler.fits(one) and prefill.scheduler.fits(_prompt_of(one))]
    check_fitting(requests, fitting, notes)
    prompts = [_prompt_of(request) for request in fitting]
    prefilling = prefill.run(prompts, prefills.replicas, step_factor)
    rate = _rate(prefills.transfer, devices)
    sent = send(prompts, (prefills.replicas, replicas), _bytes_of(prefill.case, decode.case), rate)
    answers = [_answer_of(one, fitting[one.request.number]) for one in sent]
    decoding = decode.run(answers, replicas, step_factor)
    check_conservation(fitting, sent, answers)
    for one, answer in zip(sent, answers):
        _join(one.request, answer)
    results = describe_results(answers, decoding, limits)
    return {
        "schema_version": SCHEMA_VERSION,
        "model": describe_model(decode.case.spec),
        "hardware": {**describe_hardware(decode.case), "num_devices": needed, "replicas": replicas},
        "engine": describe_engine(decode.case, decode.scheduler),
        "load": describe_load(load, requests, len(requests) - len(fitting)),
        "limits": limits._asdict(),
        "results": results,
        "times": describe_times(answers, decoding),
        "timeline": describe_timeline(decoding),
        "step_factor": step_factor,
        "step_range": describe_range(decode.case, decode.speed, results["mean_running_requests"] / replicas),
        "prefill": _describe_prefill(prefills, prefill.case, prefilling, sent, rate, results["duration_seconds"]),
        "warnings": describe_notes(notes),
    }


def send(prompts: Sequence[Request], instances: tuple[int, int], bytes_of: Any, rate: int) -> list[Sending]:
    """Send the cache of each prompt in the order in which they were completed, and number them in this order.

    `instances` are those that send and receive. The request of number n was computed by instance n modulo their number.
    """
    senders, receivers = ([0.0] * number for number in instances)
    found = []
    for place, request in enumerate(sorted(prompts, key=lambda one: (one.finish or 0.0, one.number))):
        sender, receiver = request.number % instances[0], place % instances[1]
        num_bytes = bytes_of(request.prompt_tokens)
        start = max(request.finish or 0.0, senders[sender], receivers[receiver])
        senders[sender] = receivers[receiver] = end = start + move_seconds(num_bytes, rate)
        found.append(Sending(request, num_bytes, start, end))
    return found


def check_conservation(requests: Sequence[Request], sent: Sequence[Sending], answers: Sequence[Request]) -> None:
    """Every request is computed, sent and answered once, in this order. PoolError if it is not."""
    numbers = [request.number for request in requests]
    if sorted(one.request.number for one in sent) != numbers:
        raise PoolError(f"{len(requests)} requests arrived, but {len(sent)} were sent")
    for one, answer in zip(sent, answers):
        times = one.request.arrival, one.request.finish, one.start, one.end, answer.first_token, answer.finish
        known = [seconds for seconds in times if seconds is not None]
        if len(known) < len(times) or known != sorted(known):
            raise PoolError(f"request {one.request.number} was not computed, sent and answered in this order")


def _prompt_of(request: Request) -> Request:
    """A request whose answer ends with its first token."""
    return Request(request.number, request.arrival, request.prompt_tokens, 1, request.cached_tokens)


def _answer_of(one: Sending, request: Request) -> Request:
    """The request on its decode instance: the cache of its prompt is there, and the last token is computed again."""
    return Request(request.number, one.end, request.prompt_tokens, request.answer_tokens, request.prompt_tokens - 1)


def _join(prompt: Request, answer: Request) -> None:
    """Add what happened on the prefill instance to a request that was answered."""
    answer.arrival, answer.started, answer.found_tokens = prompt.arrival, prompt.started, prompt.found_tokens
    answer.lag += prompt.lag
    answer.preemptions += prompt.preemptions


def _prefill_pool(question: Question, longest: int) -> _Pool:
    case, speed, scheduler = _scheduled(question, longest)
    lag = Lag(speed.model.constants.ttft_seconds, 0.0, 0.0, 0.0)
    return _Pool(case, speed, scheduler._replace(rules=scheduler.rules._replace(lag=lag), finds_own=False))


def _decode_pool(question: Question, rules: SplitRules, longest: int) -> _Pool:
    settings = {**(question.engine_settings or {}), **dict.fromkeys(rules.decode_settings, True)}
    case, speed, scheduler = _scheduled(question._replace(engine_settings=settings), longest)
    host = (rules.host_passes - 1) * speed.model.constants.ttft_seconds
    lag = (scheduler.rules.lag or Lag(0.0, 0.0, 0.0, 0.0))._replace(seconds=host, prompt_steps=0.0, request_seconds=0.0)
    # No engine stops decoding for a cache that is received: the request joins the next step.
    name = "running first" if scheduler.name == "prefill first" else scheduler.name
    return _Pool(case, speed, scheduler._replace(name=name, rules=scheduler.rules._replace(lag=lag), finds_own=False))


def _scheduled(question: Question, longest: int) -> _Pool:
    case = make_case(question)
    speed = speed_of(case, [])
    if isinstance(speed, str):
        raise ModelError(f"{case.model.name} cannot be simulated: {speed}")
    return _Pool(case, speed, scheduler_of(case, speed.model, longest))


def _rate(transfer: int | str, devices: Devices) -> int:
    return transfer if isinstance(transfer, int) else link_bytes_per_second(transfer, devices.gpu)


def _bytes_of(prefill: Case, decode: Case) -> Any:
    """A function from a prompt's tokens to the bytes that the busiest device sends or receives."""
    return lru_cache(maxsize=65_536)(lambda tokens: transfer_bytes(sent_of(prefill, tokens), sent_of(decode, tokens)))


def _describe_prefill(
    prefills: Prefills, case: Case, replicas: Sequence[Replica], sent: Sequence[Sending], rate: int, seconds: float
) -> dict[str, Any]:
    number, busy = len(sent), sum(replica.timeline.busy_seconds for replica in replicas)
    return {
        "replicas": prefills.replicas,
        "tensor_parallel_size": case.workload.tensor_parallel_size,
        "link": prefills.transfer if isinstance(prefills.transfer, str) else None,
        "bandwidth_bytes_per_second": rate,
        "sent_bytes": sum(one.num_bytes for one in sent),
        "busy_share": busy / (seconds * prefills.replicas),
        "mean_queue_seconds": sum((one.request.started or 0.0) - one.request.arrival for one in sent) / number,
        "mean_prefill_seconds": sum((one.request.finish or 0.0) - (one.request.started or 0.0) for one in sent)
        / number,
        "mean_transfer_seconds": sum(one.end - (one.request.finish or 0.0) for one in sent) / number,
    }
