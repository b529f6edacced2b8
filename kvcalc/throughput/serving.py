"""Serving: time to first token, time per output token, and tokens per second under a constant load.

There are always `concurrency` requests with `input_tokens` and `output_tokens` tokens each. When one ends, the next
arrives (a closed loop). A request first waits for its first token and then decodes. So by Little's law, of N requests

    n = N x decode / (TTFT + decode),   decode = output_tokens x TPOT

decode at the same time. While a request decodes, each of the others that decode with it is replaced once, and its
prefill runs in the same steps (chunked prefill) or stops them (prefill first). Both add the same time:

    TPOT = step(n) / tokens per step + n / output_tokens x prefill work

A step gives a sequence one token, or more if tokens are drafted. DP ranks run in lock step, so a prompt stops
all of them while the one that has it computes it, unless others have prompts too (`busiest_share`).

In a steady load, the time to first token is the host's time, steps in the server's pipeline, the waits for the engine's
scheduler (`kvcalc.throughput.scheduling`), and its own prefill:

    TTFT = host + host' x input tokens + steps x step + waits + prefill

The prefill takes at least as long as the host takes to launch its kernels. host' is the host time for a prompt's token,
and `steps` are those of the server's pipeline besides the scheduler's. If only one request runs, it does not wait for
the steps of others.

A benchmark sends some requests per client, and the first ones of all clients together. So its mean TTFT is longer than
that of a steady load, by the share of the first requests times their extra wait: for each other's prompts
(`burst_wait`), for the host's time of all of them (`first_host_wait`), and for the first step. kvcalc predicts
benchmarks of 15 requests per client on a server that has run before.

If the cache has room for R < N requests only, the others wait. A request takes memory from the step that computes its
prompt on, and not while it waits for that step or for its client. So R requests end in every (prefill + decode), and
the rest of the N requests' time, again by Little's law, is spent before the first token.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcalc.records import NamedTuple
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.costs import smaller
from kvcalc.throughput.prompts import Prompts
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.scheduling import StepRules

# The loop for the number of decoding requests ends when a round changes TPOT by less than this share.
_SETTLED = 0.005
_MOST_ROUNDS = 8

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
    """The latencies in seconds, and the rates of one replica. `decoding` is the mean number of decoding requests.

    `ttft_seconds` is the mean of a benchmark with REQUESTS_PER_CLIENT requests per client, and `steady_ttft_seconds`
    the mean after the load has run for a long time. `random_ttft_seconds` is the mean of requests that arrive at random
    instead, at the same rate. `queued` is the mean number of requests that wait because their
    prompts do not fit into a step.
    """

    tpot_seconds: float
    ttft_seconds: float
    steady_ttft_seconds: float
    random_ttft_seconds: float
    tokens_per_second: float
    requests_per_second: float
    prefill_share: float
    decoding: float
    queued: float = 0.0


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
    are computed (`Prompts.hidden`). May be arrays.
    """
    each = c.ttft_seconds + c.ttft_token_seconds * input_tokens
    return (each - smaller(each, hidden)) * others


def replaced(decoding: float, running: float, steps: float, away: float) -> float:
    """How many other requests are replaced while one of `decoding` requests decodes for `steps` steps.

    Its own prompt is not computed in this time. `running` requests run. When one has ended, it takes `away` steps until
    the one that follows decodes.
    """
    return min(decoding, (running - 1) * steps / (steps + away))


def burst_wait(each: float, together: float, requests: float) -> float:
    """How many seconds longer the first requests of a benchmark wait on average, because all clients start together.

    The first `requests` prompts are computed one step after the other, with `together` of them in a step. Each takes up
    `each` seconds of the steps, and waits until its step ends: (requests + together) / 2 x `each` on average, which is
    what one adds to the steps. May be arrays, as in `host_wait`.
    """
    return each * ((requests + smaller(requests, together)) / 2 - 1)


def _closer(guess: float, found: float, last: tuple[float, float] | None) -> float:
    """A better guess of a value for which `found` is equal to it, by the secant through the `last` guess."""
    if last is not None and guess != last[0]:
        slope = min(max((found - last[1]) / (guess - last[0]), -2.0), 0.9)
        found = guess + (found - guess) / (1 - slope)
    return max(1.0, found)


def serve(
    model: SpeedModel,
    input_tokens: int,
    output_tokens: int,
    concurrency: int,
    running: float,
    cached_tokens: float = 0.0,
    rules: StepRules | None = None,
    recomputed_tokens: float = 0.0,
    requeued: float = 0.0,
    paused: float = 0.0,
    parts: Sequence[tuple[int, int]] = (),
    late_steps: float = 0.0,
) -> Serving:
    """Steady serving of `concurrency` requests, of which at most `running` hold their cache at the same time.

    `cached_tokens` of each prompt are found in the prefix cache. They take memory, but no prefill. `rules` are None if
    the engine has none: then prompts run in the steps of others, and none queues for them. `recomputed_tokens` tokens
    of a request are computed again after preemptions. A preempted request waits `requeued` times as long as for its
    first token, and `paused` times as long as it holds its cache. `parts` are the token ranges of a prompt that is
    always computed in several steps: the first token of each part, and the token after its last. The first requests
    arrive together and wait `late_steps` more steps on average.
    """
    is_queueing = rules is not None
    c, rules = model.constants, rules or StepRules()
    prompts = Prompts(model, input_tokens, cached_tokens, rules, parts)
    again, is_full = 1 + recomputed_tokens / prompts.missed, concurrency > running
    # A request meets the others, not itself.
    others, per_step = (concurrency - 1) / concurrency, model.tokens_per_step
    replicas = model.layout.attention_copies
    last: tuple[float, float] | None = None
    decoding, tpot, stall, steady, held, burst, rate, queued = float(running), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    mean_step, grouped, per_client = 0.0, 0.0, requests_per_client(concurrency)
    for _ in range(_MOST_ROUNDS):
        before = tpot
        step = model.decode(decoding, input_tokens + output_tokens / 2).seconds
        lag = host_wait(c, step, input_tokens) + prompts.launching
        # The prompts that are computed per second, also again, are those of the requests that decode now.
        prompts_per_second = decoding * again / (output_tokens * (tpot or step / per_step))
        if running > 1:
            ending = others * decoding * per_step / output_tokens
            stop = prompts.stop(step, mean_step or step, prompts_per_second, ending, decoding, lag)
            away = prompts.steps(decoding) + (0.0 if is_full else lag / (mean_step or step))
            stall = replaced(decoding, running, output_tokens / per_step, away) * stop * again / output_tokens
        tpot = step / per_step + stall
        # A step on average, with the prompts that run in it or stop it.
        mean_step, decode = tpot * per_step, output_tokens * tpot
        if concurrency == 1:
            steady = lag + prompts.lone
            burst = c.first_seconds / per_client
            rate = 1 / (steady + burst + decode)
        else:
            met = others * prompts_per_second
            waits = prompts.waits(step, mean_step, decoding, met, lag)
            grouped = waits.first - waits.random
            steady = waits.first + lag
            # The clients of each DP rank queue for its own steps.
            burst = burst_wait(waits.burst, max(waits.most, 1.0), running / replicas)
            burst += first_host_wait(c, input_tokens, max(0.0, running / replicas - 1), prompts.hidden)
            burst = (burst + c.first_seconds + late_steps * tpot) / per_client
            if is_queueing:
                of_one, queued = waits.rate(concurrency / replicas, steady + burst + decode, rate / replicas)
                rate, queued = of_one * replicas, queued * replicas
                steady += queued / rate
            else:
                rate = concurrency / (steady + burst + decode)
        if is_full:
            held = again * prompts.lone + decode + (mean_step if rules.overlaps else 0.0)
            rate = min(rate, running / held)
        found = rate * decode
        if abs(tpot - before) <= _SETTLED * tpot or abs(found - decoding) <= _SETTLED * decoding:
            decoding = max(1.0, found)
            break
        decoding, last = _closer(decoding, found, last), (decoding, found)
    if replicas > 1 and not rules.mixes and queued:
        # Prompts go first: a request that has memory has its prompt too, and stands still instead of waiting for steps.
        still = max(0.0, min(queued, running - rate * (again * prompts.lone + decode + mean_step)))
        steady, decode, queued = steady - still / rate, decode + still / rate, queued - still
        tpot, stall = tpot + still / rate / output_tokens, stall + still / rate / output_tokens
    prefill_share = stall / tpot
    if is_full:
        # A request waits in the queue before its first token, and again when it was preempted.
        queue = max(0.0, concurrency / running * held - decode - steady - paused * held) / (1 + requeued)
        steady += queue
        tpot += (requeued * queue + paused * held) / output_tokens
    return Serving(
        tpot, steady + burst, steady, steady - grouped, rate * output_tokens, rate, prefill_share, decoding, queued
    )
