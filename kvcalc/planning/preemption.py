"""What happens in a full cache, in a steady load: preempted requests, and the room that SGLang keeps free.

vLLM 0.33 starts a request as soon as its prompt fits. When the answers find no room, the last requests are preempted,
and wait at the head of the queue (Scheduler.schedule, v1/core/sched/scheduler.py).

SGLang 0.5.23 starts a request if its prompt and its answer are free beside a share of the answers still to come
(PrefillAdder, srt/managers/schedule_policy.py). The share falls to 0.7 x 0.14 in 600 steps (srt/environ.py). If that
was too little, the requests with the shortest answers so far are retracted, and wait at the end of the queue
(update_running_batch, srt/managers/scheduler.py).

The numbers below are those of simulated servers in which requests wait, with answers of 1/16 to 10 times the prompt,
10 to 400 running requests, and lengths that vary by 30 %. With equal lengths, requests that start together keep in
step, and more are preempted.
"""

from __future__ import annotations

from math import exp, inf

from kvcalc.planning.budget import Budget
from kvcalc.planning.case import Case
from kvcalc.records import NamedTuple

# SGLANG_INIT_NEW_TOKEN_RATIO, and SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR times that (srt/environ.py).
_FIRST_RATIO = 0.7
_LEAST_RATIO = _FIRST_RATIO * 0.14
# The shortest answer relative to their mean, if lengths vary by 30 %.
_SHORTEST = 0.7


class Preemption(NamedTuple):
    """What preemptions cost a request, in the mean.

    `recomputed_tokens` tokens are computed again. It waits for its next token for `paused` times as long as it holds
    its cache, and `requeued` times as long as for its first token.
    """

    recomputed_tokens: float = 0.0
    requeued: float = 0.0
    paused: float = 0.0


def sglang_running(found: Budget, input_tokens: int, output_tokens: int) -> float:
    """The mean number of requests that SGLang runs while others wait.

    Each has its prompt, half of its answer, and a share of the other half that is kept free. Besides, a request needs
    all of its prompt and answer to start. When it has started, less is free by its prompt and that share; so in the
    mean, half of this is missing.
    """
    expected = _LEAST_RATIO * output_tokens
    each = input_tokens + output_tokens / 2 + expected / 2
    free = input_tokens + output_tokens - (input_tokens + expected) / 2
    return (_sglang_pool(found) - free) / each * found.case.workload.data_parallel_size


def sglang_late_steps(found: Budget, input_tokens: int, output_tokens: int, requests: float) -> float:
    """For how many steps the first `requests`, which arrive together, wait in the mean because SGLang keeps room free.

    It starts those for which 0.7 of the answers are free. If one may not start, no other is tried until a request has
    ended, by which time the share is low: that is when the shortest answer ends, with lengths that vary by 30 %.
    """
    start = input_tokens + _FIRST_RATIO * output_tokens
    started = (_sglang_pool(found) - input_tokens - output_tokens) / start * found.case.workload.data_parallel_size
    return max(0.0, 1 - max(1.0, started) / requests) * _SHORTEST * output_tokens


def _sglang_pool(found: Budget) -> float:
    """The tokens in the pool. Without one, memory sets no limit."""
    case = found.case
    allocation, dtype, tokens = case.allocation, case.workload.kv_dtype, case.workload.context_tokens
    device = allocation.largest_stage(case.share, dtype, tokens, 1)
    pool: int | None = allocation.blocks(device, dtype, tokens, 1, found.offered_bytes)["kv_cache_tokens"]
    return inf if pool is None else pool


def preemption(case: Case, running: float, concurrency: int) -> Preemption:
    """The preemptions of `concurrency` requests, of which `running` hold their cache. None if they all do.

    If answers are long, little is free between the ends of two requests, and nearly a whole answer is preempted for the
    prompts that vLLM started. If they are short, a prompt rarely fits too early.
    """
    question = case.question.speed
    if running >= concurrency or question is None or not question.input_tokens or not question.output_tokens:
        return Preemption()
    prompt, answer = question.input_tokens, question.output_tokens
    ratio = answer / prompt
    if case.engine_name == "sglang":
        # Between the ends of two requests, the others take one answer in the mean, and that is free besides the share
        # of all answers. A pool runs full only if no request ends for longer: by the theory of ruin, with a chance that
        # falls with the room. Answers as long as prompts run it full in any case, because those that started together
        # outgrow it.
        ruin = exp(-_ruin(1 + 1 / ratio) * _LEAST_RATIO / 2 * running)
        times = 0.4 * ratio / (ratio + 4) * max(min(1.0, 1.6 * ruin), min(1.0, ratio**3))
        return Preemption(times * (prompt + 0.3 * answer), requeued=times)
    if case.engine_name == "vllm":
        paused = 0.4 * ratio**2 / (ratio**2 + 25) + 0.8 * ratio / running
        # No more can be paused than wait at all, and some of those are new.
        waiting = concurrency / running - 1
        paused = min(0.75 * waiting, paused * (1 - exp(-waiting / paused)))
        return Preemption(0.8 * answer * ratio / (ratio + 1 / 3), paused=paused)
    return Preemption()


def _ruin(jump: float) -> float:
    """The exponent of the chance that requests, which end at random, leave no room: y = 1 - exp(-jump y).

    A request that ends gives back `jump` answers.
    """
    found = 1.0
    for _ in range(6):
        found = 1 - exp(-jump * found)
    return found
