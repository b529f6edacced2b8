"""The short form of a load: about how fast a replica serves, without a simulation.

Searches order their candidates by it, and constants are fitted through it. What is printed is simulated
(`kvcalc.simulation.served`). Both are a few percent apart in tokens per second, and further in time to first token.

There are always N requests of equal lengths; when one ends, the next arrives. By Little's law, of these

    n = N x decode / (TTFT + decode),   decode = output tokens x TPOT

decode at the same time. While one decodes, each of the others is replaced once, and their prompts are computed in its
steps or stop them:

    TPOT = step(n) / tokens per step + replaced / output tokens x work of a prompt

A request waits for the host, for the step that runs, for its own prompt, and for the prompts before it. As many answers
end with a long step as with a short one, so the load u of this queue is the prompts that come in a step, divided by
the K that it has room for. With K = 1, it is that of constant times (M/D/1):

    TTFT = host + step / 2 + prompt + queue,   queue = u^(sqrt(2 (K + 1)) - 1) / 2 (1 - u) x full step / K

If memory or a limit has places for R < N requests, R of them end in every (prompt + decode), and by Little's law the
others' time is spent before their first token.
"""

from __future__ import annotations

from math import ceil, sqrt

from kvcalc.records import NamedTuple
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.costs import smaller
from kvcalc.throughput.roofline import Part, SpeedModel
from kvcalc.throughput.scheduling import StepRules

# The halvings by which the number of decoding requests is found.
_HALVINGS = 12
# The highest load, at which requests wait for ever.
_FULL = 1 - 1e-6

# The requests per client of a benchmark. InferenceX's scripts send 10 x concurrency prompts, but many published runs do
# not say how many. 14 to 16 explain their times to the first token best: with 10 or 30, the loss of the fit is 2 %
# higher.
REQUESTS_PER_CLIENT = 15
# The fewest requests of a benchmark. With one client, 15 are too few.
FEWEST_REQUESTS = 60
# The requests of other loads, and the most that are simulated.
DEFAULT_REQUESTS, MOST_REQUESTS = 1000, 1_000_000


def requests_per_client(clients: float) -> float:
    """The requests that each of `clients` clients sends in a benchmark."""
    return max(REQUESTS_PER_CLIENT, FEWEST_REQUESTS / clients)


def default_requests(concurrency: int | None) -> int:
    """The requests that are simulated by default: those of a benchmark with that many clients, or of another load."""
    if concurrency is None:
        return DEFAULT_REQUESTS
    return min(round(requests_per_client(concurrency) * concurrency), MOST_REQUESTS)


class Serving(NamedTuple):
    """The mean latencies in seconds, and the rates of one replica. `decoding` is the mean number that decode."""

    tpot_seconds: float
    ttft_seconds: float
    tokens_per_second: float
    requests_per_second: float
    prefill_share: float
    decoding: float


def host_wait(c: Constants, step: float, input_tokens: float) -> float:
    """The seconds to the first token that are neither the scheduler's nor the prefill's.

    They are the host's time, and steps of `step` seconds in the server's pipeline. May be arrays.
    """
    return c.ttft_seconds + c.ttft_token_seconds * input_tokens + c.ttft_steps * step


def first_host_wait(c: Constants, input_tokens: float, others: float, hidden: float = 0.0) -> float:
    """How many seconds longer each first request of a benchmark waits for the host, with `others` that come with it.

    An HTTP server handles requests that come together side by side in one event loop: none is far ahead of the others.
    So each waits for the host's time of all. Measured servers agree: with half of it, as if they were handled one
    after the other, the loss of the fit is 3 % higher. `hidden` seconds of each request's host time pass while prompts
    are computed (`full_step_seconds`). May be arrays.
    """
    each = c.ttft_seconds + c.ttft_token_seconds * input_tokens
    return (each - smaller(each, hidden)) * others


def full_step_seconds(model: SpeedModel, input_tokens: float, cached_tokens: float, rules: StepRules) -> float:
    """The seconds that each prompt takes if all DP ranks have full steps of prompts alone."""
    copies, most = model.layout.attention_copies, rules.prompts_of_step(input_tokens - cached_tokens)
    return model.alone([Part(cached_tokens, input_tokens, 1 / copies, most * copies)]).seconds / most


def serve(
    model: SpeedModel, input_tokens: int, output_tokens: int, clients: int, places: float, cached_tokens: float = 0.0,
    rules: StepRules = StepRules(), *, is_benchmark: bool = False,
) -> Serving:  # fmt: skip
    """The short form of `clients` requests, of which at most `places` hold their cache at the same time.

    `cached_tokens` of each prompt are found in the prefix cache: they take memory, but are not computed. With
    `is_benchmark`, the first requests of all clients, which come together, count.
    """
    c, ranks = model.constants, model.layout.attention_copies
    most = rules.prompts_of_step(input_tokens - cached_tokens)
    parts = max(1, ceil(1 / most))
    lone = parts * model.alone([Part(cached_tokens, input_tokens, model.share_of_prompts(1), 1 / parts)]).seconds
    launch_wait = model.launch_wait(lone)
    running, is_full, others = min(clients, places), clients > places, (clients - 1) / clients
    # A DP rank with prompts of its own does not decode in steps in which the others do.
    mixes, first = rules.mixes or ranks > 1, 0.0
    if is_benchmark:
        together, full = running / ranks, full_step_seconds(model, input_tokens, cached_tokens, rules)
        first = c.first_seconds + first_host_wait(c, input_tokens, max(0.0, together - 1), full * rules.reads_beside)
        first = (first + burst_wait(full, max(most, 1.0), together)) / requests_per_client(clients)

    def times(decoding: float) -> tuple[float, float, float]:
        """A decode step, TPOT and TTFT in seconds if `decoding` requests decode."""
        step = model.decode(decoding, input_tokens + output_tokens / 2).seconds
        # The prompts that come in a step on average, and what each of them adds to one that has some.
        coming = decoding * model.tokens_per_step / output_tokens
        number = min(max(1.0, coming), most * ranks)
        share = (1 + max(0.0, number - 1) / ranks) / max(1.0, number)
        part = Part(cached_tokens, input_tokens, share, number)
        added = (model.beside([part], decoding) if mixes else model.alone([part])).seconds / number
        if mixes and not rules.mixes:
            added += parts * step / ranks
        mean_step = step + others * coming * added
        lag = host_wait(c, step, input_tokens) + launch_wait
        if clients == 1:
            return step, mean_step / model.tokens_per_step, lag + lone + first
        computing = parts * step + added if mixes else added * max(1.0, number)
        load = min(others * coming / (most * ranks), _FULL) if rules.mixes else 0.0
        queue = load ** (sqrt(2 * (max(1.0, most) + 1)) - 1) / (2 * (1 - load)) * (step / most + added)
        waits = lag + (0.5 + rules.overlaps) * mean_step + computing + queue
        return step, mean_step / model.tokens_per_step, waits + first

    low, high = 0.0, float(running)
    for _ in range(_HALVINGS):
        decoding = (low + high) / 2
        step, tpot, ttft = times(decoding)
        decode = output_tokens * tpot
        if running * decode > decoding * (ttft + decode):
            low = decoding
        else:
            high = decoding
    rate = decoding / decode
    if is_full:
        ttft = clients / rate - decode
    share = max(0.0, 1 - step / model.tokens_per_step / tpot)
    return Serving(tpot, ttft, rate * output_tokens, rate, share, decoding)


def burst_wait(each: float, together: float, requests: float) -> float:
    """How many seconds longer the first requests of a benchmark wait on average, because all clients start together.

    The first `requests` prompts are computed one step after the other, with `together` of them in a step. Each takes up
    `each` seconds of the steps, and waits until its step ends: (requests + together) / 2 x `each` on average, which is
    what one adds to the steps. May be arrays, as in `host_wait`.
    """
    return each * ((requests + smaller(requests, together)) / 2 - 1)
