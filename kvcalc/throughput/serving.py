"""Serving: time to first token, time per output token, and tokens per second under a constant load.

There are always `concurrency` requests with `input_tokens` and `output_tokens` tokens each. When one ends, the next
arrives. So while a request generates its output, every other request causes one prefill:
    TPOT = step / tokens per step + interference x running / output_tokens x prefill work
Requests that do not fit into the cache wait. If n of N requests run, a request waits (N - n) / n times as long as it
takes to run.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.throughput.roofline import SpeedModel


class Serving(NamedTuple):
    """The latencies in seconds, and the rates of one replica."""

    tpot_seconds: float
    ttft_seconds: float
    tokens_per_second: float
    requests_per_second: float
    prefill_share: float


def serve(
    model: SpeedModel,
    input_tokens: int,
    output_tokens: int,
    concurrency: int,
    running: int,
    cached_tokens: float = 0.0,
) -> Serving:
    """Steady serving of `concurrency` requests, of which `running` are in the batch and the others wait.

    `cached_tokens` of each prompt are found in the prefix cache. They take memory, but no prefill.
    """
    c = model.constants
    step = model.decode(running, input_tokens + output_tokens / 2).seconds / model.tokens_per_step
    work = model.prefill_work(input_tokens, cached_tokens).seconds
    stall = running * work / output_tokens
    tpot = step + c.prefill_interference * stall
    lone = model.prefill(input_tokens, 1, cached_tokens).seconds
    # Before its first token, a request waits for whole steps, however many tokens they give.
    ttft = c.ttft_seconds + lone + c.ttft_steps * tpot * model.tokens_per_step + c.ttft_queue * (running - 1) * work
    if concurrency > running:
        ttft += (concurrency - running) / running * (ttft + output_tokens * tpot)
    # The devices run all prefills, whichever request waits for them, so all of them count here.
    tokens_per_second = running / (step + stall)
    return Serving(tpot, ttft, tokens_per_second, tokens_per_second / output_tokens, stall / (step + stall))
