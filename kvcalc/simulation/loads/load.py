"""The load of a simulation: which requests arrive, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from kvcalc.errors import UsageError
from kvcalc.notes import BAD_ROWS, Note
from kvcalc.question.lengths import Distribution, drawn
from kvcalc.question.sessions import Sessions
from kvcalc.records import NamedTuple
from kvcalc.simulation.loads.arrivals import poisson_times
from kvcalc.simulation.loads.requests import Request
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.serving import MOST_REQUESTS, default_requests

if TYPE_CHECKING:
    from kvcalc.traces import TraceRequest

# InferenceX sends 10 requests per client to a server that has just started.
_FEW_PER_CLIENT = 10
# The requests before the first look at the times of a load: at a rate, and of clients in all and each.
_FIRST, _FIRST_OF_CLIENTS, _FIRST_PER_CLIENT = 1000, 400, 6
# The most clients that are followed: a million of their requests.
_MOST_CLIENTS = 100_000
# The most requests of a load whose times do not become known: in all, and of each client.
_MOST, _MOST_PER_CLIENT = 16_000, 30
_BRIEF, _BRIEF_PER_CLIENT = 2000, 15

Statistic = tuple[str, "int | None"]
"""A time, `ttft`, `tpot` or `e2e`, and its percentile, or None for the mean."""
MEANS: tuple[Statistic, ...] = (("ttft", None), ("tpot", None))
MEANS_AND_P99: tuple[Statistic, ...] = tuple((metric, at) for metric in ("ttft", "tpot", "e2e") for at in (None, 99))


class Requests(NamedTuple):
    """The requests of a load, in the order of their arrival. There is no end of them if `number` is None.

    `longest_tokens` is the length of the longest request, `longest_prompt` and `shortest_prompt` are lengths of
    prompts, and `block_tokens` is the size of the blocks that a trace names. `varies_around` is the mean length of
    requests if nothing else was given, else None.
    """

    requests: Iterator[Request]
    longest_tokens: int
    longest_prompt: int
    shortest_prompt: int
    number: int | None = None
    block_tokens: int | None = None
    varies_around: int | None = None


class Load(NamedTuple):
    """The load, as it was asked for.

    One of `requests_per_second`, `concurrency` (requests in flight), `users` and `trace`, which `trace_name` names. A
    user thinks for `think_time` seconds on average after each answer, and then sends a request. With `sessions`,
    requests are the turns of sessions.

    `num_requests` is None for all of a trace, or for as many as make the times in `settling` known
    (`simulation.settled`), at least `fewest_requests`, and not many if it `is_brief`. With `is_benchmark`, clients send
    `requests_per_client` each, or just `num_requests`, and times count all requests. Otherwise, times leave out the
    warm-up.
    `cold` is whether the server has just started. None is the default: it has run before, unless the clients of a
    benchmark send only a few requests each, but the first step of all clients still takes longer. With False, no step
    does. `has_run` is whether this load has run before, too, so that no step is the first one of its kind. With
    `distinct_prompts`, request i has prompt i % N. None means that no prompt is sent twice. `router` says which replica
    gets a request (`simulation.routed`).
    """

    prompt: Distribution | None = None
    answer: Distribution | None = None
    requests_per_second: float | None = None
    concurrency: int | None = None
    burstiness: float = 1.0
    trace: Iterable[TraceRequest] | None = None
    trace_name: str | None = None
    scale_rate: float = 1.0
    num_requests: int | None = None
    seed: int = 0
    cold: bool | None = None
    has_run: bool = False
    distinct_prompts: int | None = None
    router: str = "round-robin"
    is_benchmark: bool = False
    fewest_requests: int | None = None
    settling: tuple[Statistic, ...] = MEANS_AND_P99
    is_brief: bool = False
    users: int | None = None
    think_time: float | None = None
    sessions: Sessions | None = None

    @property
    def clients(self) -> int | None:
        """The clients that send the next request after each answer. None if requests have times of their own."""
        return self.concurrency if self.users is None else self.users

    @property
    def think_seconds(self) -> float:
        """How long a client thinks on average before it sends the next request."""
        return self.think_time or (0.0 if self.sessions is None else self.sessions.think_seconds)

    @property
    def mean_lengths(self) -> tuple[float, float] | None:
        """The mean tokens of a prompt and of an answer. None if they are not those of any long run of requests."""
        if self.prompt is None or self.answer is None or self.sessions is not None or self.distinct_prompts is not None:
            return None
        return self.prompt.mean_tokens, self.answer.mean_tokens

    @property
    def counts_all(self) -> bool:
        """Whether times count all requests, and not those of the steady state alone."""
        return self.is_benchmark or self.has_run or self.is_cold or self.trace is not None

    @property
    def number(self) -> int | None:
        """The number of requests of a load without a trace. None for as many as make its times known."""
        return default_requests(self.clients) if self.is_benchmark and not self.num_requests else self.num_requests

    @property
    def first_number(self) -> int:
        """How many requests are simulated before the first look at their times."""
        by_default = _FIRST if self.clients is None else max(_FIRST_OF_CLIENTS, _FIRST_PER_CLIENT * self.clients)
        return self.fewest_requests or by_default

    @property
    def most_number(self) -> int:
        """After how many requests the simulation ends, although the times are not known."""
        most, of_each = (_BRIEF, _BRIEF_PER_CLIENT) if self.is_brief else (_MOST, _MOST_PER_CLIENT)
        return max(most, of_each * (self.clients or 0), self.first_number)

    @property
    def is_cold(self) -> bool:
        """Whether the first requests wait for a cold server."""
        if self.has_run:
            return False
        if self.cold is not None or self.concurrency is None or not self.is_benchmark:
            return bool(self.cold)
        return self.num_requests is not None and self.num_requests <= _FEW_PER_CLIENT * self.concurrency

    def first_seconds(self, c: Constants) -> float:
        """How much longer the first step with prompts takes.

        `cold_seconds` are fitted to the 99th percentile of benchmarks with few requests, and `first_seconds` to means.
        """
        if self.is_cold:
            return c.cold_seconds
        is_late = self.concurrency is None or self.has_run or self.cold is False
        return 0.0 if is_late else c.first_seconds

    def first_of(self, requests: Sequence[Request], servers: int) -> Sequence[Request]:
        """Those of `requests` that arrive together in a closed loop at one of `servers`."""
        return requests[: -(-(self.concurrency or 0) // servers)]

    @property
    def kind(self) -> str:
        """How requests arrive: trace, users, closed_loop, poisson or gamma."""
        if self.trace is not None:
            return "trace"
        if self.users is not None:
            return "users"
        if self.concurrency is not None:
            return "closed_loop"
        return "poisson" if self.burstiness == 1 else "gamma"


def check_load(load: Load) -> None:
    """Raise UsageError (exit 2) if a part of the load is missing or contradicts another one."""
    ways = {
        "--requests-per-second": load.requests_per_second, "--concurrency": load.concurrency, "--users": load.users,
        "--trace": load.trace,
    }  # fmt: skip
    given = [option for option, value in ways.items() if value is not None]
    if not given:
        raise UsageError(f"{' or '.join(ways)} is missing", "for example --requests-per-second 5")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be combined", "use one")
    if load.number is None and (load.clients or 0) > _MOST_CLIENTS:
        option = "--concurrency" if load.users is None else "--users"
        raise UsageError(f"{option} {load.clients:,}: too many to simulate", f"at most {_MOST_CLIENTS:,}")
    if load.users is not None and not load.think_seconds:
        raise UsageError("--users needs the time between messages", "for example --think-time 30s")
    if load.think_time and load.sessions is not None and load.sessions.think_seconds:
        raise UsageError("--think-time and the think of --sessions cannot be combined", "use one")
    if load.trace is not None and (load.prompt is not None or load.answer is not None):
        raise UsageError("--trace has the lengths of its requests", "leave out --input-tokens and --output-tokens")
    if load.trace is None and (load.prompt is None or load.answer is None):
        missing = "--input-tokens" if load.prompt is None else "--output-tokens"
        raise UsageError(f"{missing} is missing", "for example --input-tokens 1000 --output-tokens uniform:100..500")
    if load.trace is not None and load.seed:
        raise UsageError("--seed: nothing is drawn from a --trace", "leave it out")
    if load.trace is None and load.scale_rate != 1:
        raise UsageError("--scale-rate needs --trace", "another rate: --requests-per-second")
    if load.num_requests is not None and load.num_requests > MOST_REQUESTS:
        raise UsageError(f"--requests {load.num_requests:,}: too many to simulate", f"at most {MOST_REQUESTS:,}")
    if load.trace is not None and load.distinct_prompts is not None:
        raise UsageError("--distinct-prompts: --trace has the prompts", "leave it out")
    if load.burstiness != 1 and load.requests_per_second is None:
        raise UsageError("--burstiness needs --requests-per-second")


def requests_of(load: Load, prefix_hit_rate: float, notes: list[Note]) -> Requests:
    """The requests of a load, and notes about rows of a trace that are left out.

    UsageError (exit 2) if a trace has no requests, or if it says what is found in the prefix cache and a rate does too.
    """
    if load.trace is not None:
        return _traced(load, load.trace, prefix_hit_rate, notes)
    prompt, answer, number = load.prompt, load.answer, load.number
    if prompt is None or answer is None:
        raise ValueError("check_load was not called")
    longest, more = prompt.longest_tokens, 0
    if load.sessions is not None:
        more = (load.sessions.turns - 1) * load.sessions.growth_tokens
        requests = _of_sessions(load, load.sessions, prompt, answer)
    else:
        requests = _drawn(load, prompt, answer, prefix_hit_rate)
    longest += more
    is_plain = prompt.text.isdecimal() and load.sessions is None and load.distinct_prompts is None
    varies_around = round(prompt.mean_tokens + answer.mean_tokens) if is_plain else None
    return Requests(
        requests, longest + answer.longest_tokens, longest, prompt.shortest_tokens, number, None, varies_around
    )


def _traced(load: Load, trace: Iterable[TraceRequest], prefix_hit_rate: float, notes: list[Note]) -> Requests:
    requests: list[Request] = []
    sizes = set()
    for number, row in enumerate(answered(trace, load.trace_name, load.num_requests, notes)):
        names: tuple[int, ...] = ()
        if row.block_hashes and row.block_tokens:
            names = row.block_hashes[: row.prompt_tokens // row.block_tokens]
            sizes.add(row.block_tokens)
        seconds, prompt = row.arrival_seconds / load.scale_rate, row.prompt_tokens
        requests.append(Request(number, seconds, prompt, row.answer_tokens, _hit(prefix_hit_rate, prompt), names))
    size = sizes.pop() if len(sizes) == 1 else None
    if size is not None and prefix_hit_rate:
        raise UsageError("--prefix-hit-rate: the trace says which blocks prompts share", "leave it out")
    prompts = [request.prompt_tokens for request in requests]
    longest = max(request.total_tokens for request in requests)
    return Requests(iter(requests), longest, max(prompts), min(prompts), len(requests), size)


def _hit(rate: float, prompt_tokens: int) -> int:
    """The tokens of a prompt that the prefix cache has."""
    return min(int(rate * prompt_tokens), prompt_tokens - 1)


def answered(
    trace: Iterable[TraceRequest], name: str | None, num_requests: int | None, notes: list[Note]
) -> list[TraceRequest]:
    """The requests of a trace that have an answer, in the order of their arrival, and notes about its other rows.

    Rows without an answer are requests that failed, or whose answer is not known. UsageError (exit 2) if there are no
    others, or if the trace has no times.
    """
    from kvcalc.traces import Trace, rows_text

    rows: list[TraceRequest] = []
    without = 0
    for row in trace:
        if not row.answer_tokens:
            without += 1
            continue
        rows.append(row)
        if len(rows) == num_requests:
            break
    if not rows:
        raise UsageError(f"--trace {name}: no request has an answer")
    if without:
        notes.append(Note("load", "without-answer", f"{rows_text(without)} without an answer skipped"))
    if isinstance(trace, Trace):
        if not trace.has_arrivals:
            raise UsageError(f"--trace {name}: has no times of arrival", "use a trace with times, or --concurrency")
        if trace.num_bad_rows:
            notes.append(Note("load", BAD_ROWS, trace.bad_rows_text))
    rows.sort(key=lambda row: row.arrival_seconds)
    return rows


def _drawn(load: Load, prompt: Distribution, answer: Distribution, hit_rate: float) -> Iterator[Request]:
    """Requests without end."""
    prompts: list[int] = []
    for number, seconds, (tokens, answer_tokens) in zip(count(), _arrivals(load), drawn(prompt, answer, load.seed)):
        if load.distinct_prompts is not None:
            if number < load.distinct_prompts:
                prompts.append(tokens)
            tokens = prompts[number % load.distinct_prompts]
        yield Request(number, seconds, tokens, answer_tokens, _hit(hit_rate, tokens))


def _arrivals(load: Load) -> Iterator[float]:
    """When requests arrive, or how long their clients think before each of them."""
    # Times and lengths have generators of their own, so that another rate gets the same requests.
    random = Random(load.seed)  # noqa: S311 - not for secrets
    if load.requests_per_second is None:
        return _thinking(random, load.think_seconds)
    turns = 1 if load.sessions is None else load.sessions.turns
    return poisson_times(load.requests_per_second / turns, random, load.burstiness)


def _thinking(random: Random, mean_seconds: float) -> Iterator[float]:
    """Times to think, which are exponential: a client's next request does not depend on when it had the answer."""
    while True:
        yield random.expovariate(1 / mean_seconds) if mean_seconds else 0.0


def _of_sessions(load: Load, sessions: Sessions, prompt: Distribution, answer: Distribution) -> Iterator[Request]:
    """The first turns of sessions without end, each with the turns that follow. Clients then begin another session."""
    numbers, first = count(), count()
    lengths, random = drawn(prompt, answer, load.seed), Random(load.seed + 3)  # noqa: S311 - not for secrets
    starts, thinking = _arrivals(load), _thinking(random, load.think_seconds)

    def turns(seconds: float) -> Iterator[Request]:
        session = next(first)
        for turn in range(sessions.turns):
            tokens, answer_tokens = next(lengths)
            if not turn:
                context = tokens
            request = Request(
                next(numbers), seconds, context + turn * sessions.growth_tokens, answer_tokens, names=(session,)
            )
            yield request
            seconds = next(thinking)

    def client(seconds: float) -> Iterator[Request]:
        yield from turns(seconds)
        while load.clients is not None:
            yield from turns(next(thinking))

    for seconds in starts:
        later = client(seconds)
        request = next(later)
        request.session = later
        yield request


def split_concurrency(concurrency: int | None, replicas: int) -> list[int | None]:
    """The clients of each replica."""
    if concurrency is None:
        return [None] * replicas
    each, more = divmod(concurrency, replicas)
    return [each + (number < more) for number in range(replicas)]
