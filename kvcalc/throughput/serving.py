"""Serving: time to first token, time per output token, and tokens per second under a constant load.

There are always `concurrency` requests with `input_tokens` and `output_tokens` tokens each. When one ends, the next
arrives (a closed loop). A request first waits for its first token and then decodes. So by Little's law, of N requests

    n = N x decode / (TTFT + decode),   decode = output_tokens x TPOT

decode at the same time. While a request decodes, each of the others that decode with it is replaced once, and its
prefill runs in the same steps (chunked prefill) or stops them (prefill first). Both add the same time:

    TPOT = step(n) / tokens per step + n / output_tokens x prefill work

A step gives a sequence one token, or more if tokens are drafted. Attention replicas run in lock step, so a prompt stops
all of them while the one that has it computes it, unless others have prompts too (`busiest_share`).

In a steady load, the time to first token is the engine's host time, the steps that a request waits for, and its own
prefill:

    TTFT = host + host' x (R - 1) + (steps + prompt steps x input_tokens / 8192) x wait + prefill
    wait = TPOT x tokens per step

A step computes a limited number of prompt tokens (8,192: max_num_batched_tokens, chunked_prefill_size, max_num_tokens),
which the prompts share, so a long prompt waits for more steps. host' is the host time for each other running request.
If only one request runs, no other prompt stops it, and it does not wait for the `scheduled_steps` of others.

A benchmark sends some requests per client, and the first ones of all clients together. So its mean TTFT is longer than
that of a steady load by the share of the first requests times what they wait for each other (`burst_wait`). kvcalc
predicts benchmarks of 15 requests per client.

If the cache has room for R < N requests only, the others wait. A request takes memory from the step that computes its
prompt on, and not while it waits for that step or for its client. So R requests end in every (prefill + decode), and
the rest of the N requests' time, again by Little's law, is spent before the first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcalc.throughput.constants import Constants
from kvcalc.throughput.expert_parallel import busiest_share
from kvcalc.throughput.roofline import SpeedModel

# The loop for the number of decoding requests ends when a round changes TPOT by less than this share.
_SETTLED = 0.005
_MOST_ROUNDS = 8
# The prompt tokens of one step by default in vLLM 0.33 and SGLang 0.5.23 on large devices, and in TensorRT-LLM 1.3.
STEP_TOKENS = 8192

# The requests per client of a benchmark. InferenceX's scripts send 10 x concurrency prompts, but many published runs do
# not say how many. 14 to 16 explain their times to the first token best: with 10 or 30, the loss of the fit is 2 %
# higher.
REQUESTS_PER_CLIENT = 15


class Serving(NamedTuple):
    """The latencies in seconds, and the rates of one replica. `decoding` is the mean number of decoding requests.

    `ttft_seconds` is the mean of a benchmark with REQUESTS_PER_CLIENT requests per client, and `steady_ttft_seconds`
    that of a load that has run for long.
    """

    tpot_seconds: float
    ttft_seconds: float
    steady_ttft_seconds: float
    tokens_per_second: float
    requests_per_second: float
    prefill_share: float
    decoding: float


def first_token(c: Constants, prefill: float, tpot: float, input_tokens: float, running: float) -> float:
    """The seconds to the first token of one of `running` requests in a steady load, without a queue for memory.

    Its prefill takes `prefill` seconds alone. Nothing branches on a value, so that everything may be an array.
    """
    steps = c.ttft_steps + c.ttft_prompt_steps * input_tokens / STEP_TOKENS
    return c.ttft_seconds + c.ttft_request_seconds * (running - 1) + steps * tpot + prefill


def burst_wait(work: float, input_tokens: float, requests: float) -> float:
    """How many seconds longer the mean time to first token of a benchmark is, because all clients start together.

    The first `requests` prompts are computed one step of STEP_TOKENS after the other, and a prompt waits until its step
    ends: with m prompts in a step, (requests + m) / 2 x `work` in the mean, which is what one adds to the steps. May be
    an array like `first_token`.
    """
    together = _smaller(requests, _larger(STEP_TOKENS / input_tokens, 1.0))
    return work * ((requests + together) / 2 - 1) / REQUESTS_PER_CLIENT


def _smaller(a: float, b: float) -> float:
    """The smaller value, also of arrays."""
    return (a + b - abs(a - b)) / 2


def _larger(a: float, b: float) -> float:
    """The larger value, also of arrays."""
    return (a + b + abs(a - b)) / 2


def serve(
    model: SpeedModel,
    input_tokens: int,
    output_tokens: int,
    concurrency: int,
    running: float,
    cached_tokens: float = 0.0,
    scheduled_steps: float = 0.0,
    recomputed_tokens: float = 0.0,
    requeued: float = 0.0,
    paused: float = 0.0,
    parts: Sequence[tuple[int, int]] = (),
) -> Serving:
    """Steady serving of `concurrency` requests, of which at most `running` hold their cache at the same time.

    `cached_tokens` of each prompt are found in the prefix cache. They take memory, but no prefill. `scheduled_steps` of
    the fitted `ttft_steps` are those of other requests. `recomputed_tokens` tokens of a request are computed again
    after preemptions. A preempted request waits `requeued` times as long as for its first token, and `paused` times as
    long as it holds its cache. `parts` are those of a prompt that is always computed in several steps: the first token
    of each and the one after its last.
    """
    c, replicas = model.constants, model.layout.data_parallel_size
    missed = input_tokens - cached_tokens
    work = stop = model.prefill_work(input_tokens, cached_tokens).seconds
    alone = model.prefill_work(input_tokens, cached_tokens, 1.0).seconds if replicas > 1 else work
    steps = max(1.0, missed / STEP_TOKENS)
    again = 1 + recomputed_tokens / missed
    idle_steps = min(scheduled_steps, c.ttft_steps) if running == 1 else 0.0
    prefill = model.prefill(input_tokens, 1, cached_tokens).seconds
    if len(parts) > 1:
        prefill = sum(model.prefill_chunks([part]).seconds for part in parts)
    burst = 0.0 if concurrency > running else burst_wait(work, missed, running)
    decoding, tpot, stall, steady, held = float(running), 0.0, 0.0, 0.0, 0.0
    for _ in range(_MOST_ROUNDS):
        before = tpot
        step = model.decode(decoding, input_tokens + output_tokens / 2).seconds
        if replicas > 1 and running > 1:
            # A prompt that is longer than a step has tokens for is computed in several parts.
            rate = steps * decoding / (output_tokens * (tpot or step / model.tokens_per_step))
            share = busiest_share(rate, step, alone / steps, replicas)
            stop = model.prefill_work(input_tokens, cached_tokens, share).seconds
        stall = decoding * stop * again / output_tokens if running > 1 else 0.0
        tpot = step / model.tokens_per_step + stall
        # A request waits for whole steps, and computes the tokens of its prompt that are not cached.
        wait, decode = tpot * model.tokens_per_step, output_tokens * tpot
        steady = first_token(c, prefill, wait, missed, running) - idle_steps * wait
        requests_per_second = concurrency / (steady + burst + decode)
        if concurrency > running:
            held = again * prefill + decode
            requests_per_second = min(requests_per_second, running / held)
        decoding = max(1.0, requests_per_second * decode)
        if abs(tpot - before) <= _SETTLED * tpot:
            break
    prefill_share = stall / tpot
    if concurrency > running:
        # A request waits in the queue before its first token, and again when it was preempted.
        queue = max(0.0, concurrency / requests_per_second - decode - steady - paused * held) / (1 + requeued)
        steady += queue
        tpot += (requeued * queue + paused * held) / output_tokens
    tokens_per_second = requests_per_second * output_tokens
    return Serving(tpot, steady + burst, steady, tokens_per_second, requests_per_second, prefill_share, decoding)
