"""The load of a simulation: which requests arrive, and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from random import Random

from kvcalc.errors import UsageError
from kvcalc.notes import BAD_ROWS, Note
from kvcalc.question.lengths import Distribution, drawn
from kvcalc.records import NamedTuple
from kvcalc.simulation.loads.arrivals import poisson_times
from kvcalc.simulation.loads.requests import Request
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.serving import MOST_REQUESTS, default_requests
from kvcalc.traces import Trace, TraceRequest, rows_text

# InferenceX sends 10 requests per client to a server that has just started.
_FEW_PER_CLIENT = 10

Statistic = tuple[str, "int | None"]
"""A time, `ttft`, `tpot` or `e2e`, and its percentile, or None for the mean."""
MEANS_AND_P99: tuple[Statistic, ...] = tuple((metric, at) for metric in ("ttft", "tpot", "e2e") for at in (None, 99))

Row = tuple[float, int, int, tuple[int, ...]]
"""The arrival of a request in seconds, the tokens of its prompt and its answer, and the names of its whole blocks."""


class Requests(NamedTuple):
    """The requests of a load, in the order of their arrival, and the tokens of their named blocks, or None."""

    requests: list[Request]
    block_tokens: int | None


class Load(NamedTuple):
    """The load, as it was asked for.

    One of `requests_per_second`, `concurrency` and `trace`, which `trace_name` names. `num_requests` is None for all of
    a trace, or for as many as settle the times in `settling` (`simulation.settled`), at least `fewest_requests`: by
    default 1,000, or `requests_per_client` for each client. With `is_benchmark`, clients send just these, and times
    count all requests. Otherwise they leave out the first request of each client, since all clients start together.
    `cold` is whether the server has just started. None is the default: it has run before, unless clients send only a
    few requests each, as in a benchmark, but the first step of all clients still takes longer. With False, no step
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

    @property
    def leaves_out_first(self) -> bool:
        """Whether the first request of each client does not count."""
        return self.concurrency is not None and not self.is_benchmark and not self.has_run

    @property
    def first_number(self) -> int:
        """The number of requests to simulate first if there is no trace."""
        return self.num_requests or self.fewest_requests or default_requests(self.concurrency)

    @property
    def is_cold(self) -> bool:
        """Whether the first requests wait for a cold server."""
        if self.has_run:
            return False
        if self.cold is not None or self.concurrency is None:
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
        """How requests arrive: trace, closed_loop, poisson or gamma."""
        if self.trace is not None:
            return "trace"
        if self.concurrency is not None:
            return "closed_loop"
        return "poisson" if self.burstiness == 1 else "gamma"


def check_load(load: Load) -> None:
    """Raise UsageError (exit 2) if a part of the load is missing or contradicts another one."""
    ways = {
        "--requests-per-second": load.requests_per_second, "--concurrency": load.concurrency, "--trace": load.trace
    }  # fmt: skip
    given = [option for option, value in ways.items() if value is not None]
    if not given:
        raise UsageError(f"{' or '.join(ways)} is missing", "for example --requests-per-second 5")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be combined", "use one")
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
    rows, size = (_drawn(load), None) if load.trace is None else _traced(load, load.trace, notes)
    if size is not None and prefix_hit_rate:
        raise UsageError("--prefix-hit-rate: the trace says which blocks prompts share", "leave it out")
    return Requests(
        [
            Request(number, seconds, prompt, answer, min(int(prefix_hit_rate * prompt), prompt - 1), names)
            for number, (seconds, prompt, answer, names) in enumerate(rows)
        ],
        size,
    )


def _traced(load: Load, trace: Iterable[TraceRequest], notes: list[Note]) -> tuple[list[Row], int | None]:
    """The rows of a trace, and the tokens of their named blocks."""
    rows: list[Row] = []
    sizes = set()
    for row in answered(trace, load.trace_name, load.num_requests, notes):
        names: tuple[int, ...] = ()
        if row.block_hashes and row.block_tokens:
            names = row.block_hashes[: row.prompt_tokens // row.block_tokens]
            sizes.add(row.block_tokens)
        rows.append((row.arrival_seconds / load.scale_rate, row.prompt_tokens, row.answer_tokens, names))
    return rows, sizes.pop() if len(sizes) == 1 else None


def answered(
    trace: Iterable[TraceRequest], name: str | None, num_requests: int | None, notes: list[Note]
) -> list[TraceRequest]:
    """The requests of a trace that have an answer, in the order of their arrival, and notes about its other rows.

    Rows without an answer are requests that failed, or whose answer is not known. UsageError (exit 2) if there are no
    others, or if the trace has no times.
    """
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


def _drawn(load: Load) -> list[Row]:
    if load.prompt is None or load.answer is None:
        raise ValueError("check_load was not called")
    # Times and lengths have generators of their own, so that another rate gets the same requests.
    times, lengths = Random(load.seed), drawn(load.prompt, load.answer, load.seed)  # noqa: S311 - not for secrets
    number = load.first_number
    arrivals: Iterable[float] = [0.0] * number
    if load.requests_per_second is not None:
        arrivals = islice(poisson_times(load.requests_per_second, times, load.burstiness), number)
    rows: list[Row] = []
    for seconds, (prompt, answer) in zip(arrivals, lengths):
        if load.distinct_prompts is not None and len(rows) >= load.distinct_prompts:
            prompt = rows[-load.distinct_prompts][1]
        rows.append((seconds, prompt, answer, ()))
    return rows


def split_concurrency(concurrency: int | None, replicas: int) -> list[int | None]:
    """The clients of each replica."""
    if concurrency is None:
        return [None] * replicas
    each, more = divmod(concurrency, replicas)
    return [each + (number < more) for number in range(replicas)]
