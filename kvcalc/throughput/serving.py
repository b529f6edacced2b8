"""Requests kept in flight: time to first token, time per output token, tokens a second.

`concurrency` requests of `input_tokens` and `output_tokens` are in flight; as one ends the next arrives, so while a
request writes its answer each of the others brings one prefill:
    TPOT = step + interference x running / output_tokens x prefill work
What does not fit into the cache waits: with room for n of N requests, (N - n) / n of a request's whole stay.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.throughput.roofline import SpeedModel

# What a device's total memory leaves once the driver is up, for what is neither weights nor cache (workspaces, graphs),
# and the share of the rest that goes to the cache: the defaults of TensorRT-LLM 1.0 and, near enough, of the others.
_USABLE, _WORKSPACE_BYTES, _CACHE_SHARE = 0.98, 1.5e9, 0.9
# Requests are at all stages of their answers, so those in flight hold less than all of it.
_OUTPUT_HELD = 0.75
# Weights which leave less than this of the memory for the cache: what fits is not told from what does not.
_LEAST_FREE_SHARE = 0.03


class Serving(NamedTuple):
    """Seconds, and tokens a second of the replica; `running` of the requests are in the batch, the others wait."""

    tpot_seconds: float
    ttft_seconds: float
    tokens_per_second: float
    requests_per_second: float
    running: float
    prefill_share: float


def room(model: SpeedModel, input_tokens: int, output_tokens: int, pool_bytes: float | None = None) -> float | None:
    """How many requests' caches the devices hold at once; None where the weights leave no telling, or no bound.

    `pool_bytes`: the memory for the cache on each device; None: what the weights leave of it, by the rule above.
    """
    counts, layout = model.counts, model.layout
    if pool_bytes is None:
        weights = counts.stored_bytes / layout.devices + counts.whole_bytes / layout.pipeline_parallel_size
        pool_bytes = (model.gpu.memory_bytes * _USABLE - weights - _WORKSPACE_BYTES) * _CACHE_SHARE
    tokens = max(1, int(input_tokens + _OUTPUT_HELD * output_tokens))
    held = counts.kv_stored_bytes(tokens) / layout.pipeline_parallel_size
    if pool_bytes < _LEAST_FREE_SHARE * model.gpu.memory_bytes or not held:
        return None
    return max(1.0, pool_bytes / held)


def serve(
    model: SpeedModel, input_tokens: int, output_tokens: int, concurrency: int | None, running_limit: float | None
) -> Serving:
    """Steady serving of `concurrency` requests; None: as many as fit, up to the engine's own limit.

    `running_limit`: how many can run at once (`room`, or an engine's blocks), None where nothing limits them.
    """
    c = model.constants
    limit = float(c.max_sequences if concurrency is None else concurrency)
    running = limit if running_limit is None else min(limit, max(1.0, running_limit))
    wanted = running if concurrency is None else float(concurrency)
    step = model.decode(running, input_tokens + output_tokens / 2).seconds
    work = model.prefill_work(input_tokens).seconds
    stall = running * work / output_tokens
    tpot = step + c.prefill_interference * stall
    lone = model.prefill(input_tokens).seconds
    ttft = c.ttft_seconds + lone + c.ttft_steps * tpot + c.ttft_queue * (running - 1) * work
    if wanted > running:
        ttft += (wanted - running) / running * (ttft + output_tokens * tpot)
    # The devices do the prefills whoever waits for them, so all of them count here.
    tokens_per_second = running / (step + stall)
    return Serving(tpot, ttft, tokens_per_second, tokens_per_second / output_tokens, running, stall / (step + stall))
