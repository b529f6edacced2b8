"""Serving: time to first token, time per output token, and tokens per second under a constant load.

There are always `concurrency` requests with `input_tokens` and `output_tokens` tokens each. When one ends, the next
arrives (a closed loop). A running request first waits for its first token and then decodes. So of R running requests

    n = R x decode / (TTFT + decode),   decode = output_tokens x TPOT

decode at the same time. While a request decodes, each of the others that decode with it is replaced once, and its
prefill runs in the same steps (chunked prefill) or stops them (prefill first). Both add the same time:

    TPOT = step(n) / tokens per step + n / output_tokens x prefill work

A step gives a sequence one token, or more if tokens are drafted. Attention replicas run in lock step, so a prompt stops
all of them while the one that has it computes it, unless others have prompts too (`busiest_share`).

The time to first token is the engine's host time, the steps that a request waits for, its own prefill, and those of the
requests that arrive with it:

    TTFT = host + (steps + prompt steps x input_tokens / 8192) x wait + prefill + wave x (R - 1) x (work + host')
    wait = TPOT x tokens per step

A step computes a limited number of prompt tokens (8,192: max_num_batched_tokens, chunked_prefill_size, max_num_tokens),
which the prompts share, so a long prompt waits for more steps. host' is the host time for each request. If only one
request runs, no other prompt stops it, and it does not wait for the `scheduled_steps` of others.
`wave` is small: requests arrive together when a load starts, and then spread. Requests that do not fit into the cache
wait. If R of N requests run, a request waits (N - R) / R times as long as it takes to run.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.throughput.constants import Constants
from kvcalc.throughput.expert_parallel import busiest_share
from kvcalc.throughput.roofline import SpeedModel

# The loop for the number of decoding requests ends when a round changes TPOT by less than this share.
_SETTLED = 0.005
_MOST_ROUNDS = 8
# The prompt tokens of one step by default in vLLM 0.33 and SGLang 0.5.23 on large devices, and in TensorRT-LLM 1.3.
STEP_TOKENS = 8192


class Serving(NamedTuple):
    """The latencies in seconds, and the rates of one replica. `decoding` is the mean number of decoding requests."""

    tpot_seconds: float
    ttft_seconds: float
    tokens_per_second: float
    requests_per_second: float
    prefill_share: float
    decoding: float


def first_token(c: Constants, prefill: float, work: float, tpot: float, input_tokens: float, running: float) -> float:
    """The seconds to the first token of a running request, whose prefill takes `prefill` seconds alone.

    `work` is what its prefill adds to steps that run anyway. Nothing branches on a value, so that everything may be an
    array.
    """
    steps = c.ttft_steps + c.ttft_prompt_steps * input_tokens / STEP_TOKENS
    return c.ttft_seconds + steps * tpot + prefill + c.ttft_wave * (running - 1) * (work + c.ttft_request_seconds)


def serve(
    model: SpeedModel,
    input_tokens: int,
    output_tokens: int,
    concurrency: int,
    running: int,
    cached_tokens: float = 0.0,
    scheduled_steps: float = 0.0,
    recomputed_tokens: float = 0.0,
) -> Serving:
    """Steady serving of `concurrency` requests, of which `running` are in the batch and the others wait.

    `cached_tokens` of each prompt are found in the prefix cache. They take memory, but no prefill. `scheduled_steps` of
    the fitted `ttft_steps` are those of other requests. `recomputed_tokens` tokens of a request are computed again
    after preemptions.
    """
    c, replicas = model.constants, model.layout.data_parallel_size
    work = stop = model.prefill_work(input_tokens, cached_tokens).seconds
    alone = model.prefill_work(input_tokens, cached_tokens, 1.0).seconds if replicas > 1 else work
    parts = max(1.0, (input_tokens - cached_tokens) / STEP_TOKENS)
    again = 1 + recomputed_tokens / (input_tokens - cached_tokens)
    idle_steps = min(scheduled_steps, c.ttft_steps) if running == 1 else 0.0
    prefill = model.prefill(input_tokens, 1, cached_tokens).seconds
    decoding, tpot, stall = float(running), 0.0, 0.0
    for _ in range(_MOST_ROUNDS):
        before = tpot
        step = model.decode(decoding, input_tokens + output_tokens / 2).seconds
        if replicas > 1 and running > 1:
            # A prompt that is longer than a step has tokens for is computed in several parts.
            rate = parts * decoding / (output_tokens * (tpot or step / model.tokens_per_step))
            share = busiest_share(rate, step, alone / parts, replicas)
            stop = model.prefill_work(input_tokens, cached_tokens, share).seconds
        stall = decoding * stop * again / output_tokens if running > 1 else 0.0
        tpot = step / model.tokens_per_step + stall
        # A request waits for whole steps, and computes the tokens of its prompt that are not cached.
        wait = tpot * model.tokens_per_step
        ttft = first_token(c, prefill, work, wait, input_tokens - cached_tokens, running) - idle_steps * wait
        decoding = max(1.0, running * output_tokens * tpot / (ttft + output_tokens * tpot))
        if abs(tpot - before) <= _SETTLED * tpot:
            break
    stay = ttft + output_tokens * tpot
    if concurrency > running:
        # A preempted request waits again. It has its first token, so this is no part of the time to it.
        first_stay = stay - decoding * stop * (again - 1)
        ttft += (concurrency - running) / running * first_stay
    requests_per_second = running / stay
    return Serving(tpot, ttft, requests_per_second * output_tokens, requests_per_second, stall / tpot, decoding)
