"""The requests that a case serves: how many run, what they wait for, and how fast they are.

In a full cache, some requests are preempted and computed again. What that costs follows from simulated servers in which
requests wait, with answers of 1/16 to 10 times the prompt, 10 to 400 running requests, and lengths that vary by 30 %.
With equal lengths, requests that start together keep in step, and more are preempted.
"""

from __future__ import annotations

from math import exp, expm1, tanh
from typing import Any

from kvcalc.engines.scheduler import NewTokenRatio, Schedule
from kvcalc.notes import Note
from kvcalc.planning.closed_form.running import pool_tokens, running_requests, step_rules
from kvcalc.question.lengths import known_lengths
from kvcalc.records import NamedTuple
from kvcalc.server.admission import accept_prompts, most_at_once, wanted_requests
from kvcalc.server.budget import Budget, budget
from kvcalc.server.case import Case
from kvcalc.simulation.served import Served
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.serving import serve

# The shortest answer relative to their mean, if lengths vary by 30 %.
_SHORTEST = 0.7
# A request that is retracted waits for the whole queue. With fewer running requests than this, one in a hundred more or
# less decides the mean: half of 26 random loads of SGLang were more than 10 % from a simulation, and 6 of 82 others.
_FEW = 12


def served(case: Case, model: SpeedModel, notes: list[Note]) -> Served | None:
    """The requests of a case at its load. None if it serves none. Adds notes about what only a simulation follows.

    `running` requests have memory. `ttft_seconds` is the mean of a benchmark, which counts the first request of each
    client; of the others, one is the mean without them, and one that of requests that arrive at random.
    """
    question = case.question.speed_asked
    prompt, answer = question.prompt_tokens, question.answer_tokens
    if prompt is None or answer is None:
        return None
    accept_prompts(case, prompt, notes)
    found_budget, schedule = budget(case), case.engine.schedule()
    most = most_at_once(case, found_budget)
    wanted = wanted_requests(case, most)
    running, may_preempt, growth = running_requests(case, wanted)
    concurrency = question.concurrency or int(running)
    running = min(running, concurrency)
    cached = question.prefix_hit_rate * prompt
    waits: dict[str, Any] = {}
    if schedule is not None:
        waits["parts"] = schedule.prompt_parts(prompt, int(cached))
        if running < concurrency and may_preempt:
            waits |= preemption(schedule, prompt, answer, growth, running, min(wanted, concurrency))._asdict()
        if schedule.new_tokens is not None and case.workload.batch_size < wanted and isinstance(found_budget, Budget):
            waits["late_steps"] = _late_steps(schedule.new_tokens, found_budget, prompt, answer, running)
    found = serve(model, prompt, answer, concurrency, running, cached, step_rules(case, most), **waits)
    if may_preempt:
        text = "not all requests fit at their full length, so some are preempted and computed again"
        if running < min(_FEW, concurrency) and schedule is not None and schedule.new_tokens is not None:
            text += ", and with so few running, the mean time per output token is uncertain"
        notes.append(Note("throughput", "preemptions", f"{text}: kvcalc simulate follows each of them"))
    if case.layout.data_parallel_size > 1:
        text = "a prompt stops all DP ranks, so the speed depends on when requests arrive"
        notes.append(Note("throughput", "lock-step", f"{text}: kvcalc simulate follows each of them"))
    if schedule is None or not schedule.has_slots:
        # Requests wait for steps in slots. Without slots, they do not run before their prompts are computed.
        running = min(running, max(1.0, concurrency - found.queued))
    others = {"steady_ttft_seconds": found.steady_ttft_seconds, "random_ttft_seconds": found.random_ttft_seconds}
    return Served(
        known_lengths(prompt), known_lengths(answer), concurrency, running, found.tpot_seconds, found.ttft_seconds,
        found.tokens_per_second, found.requests_per_second, found.prefill_share, others,
    )  # fmt: skip


class Preemption(NamedTuple):
    """What preemptions cost a request, on average.

    `recomputed_tokens` tokens are computed again. It waits for its next token for `paused` times as long as it holds
    its cache, and `requeued` times as long as for its first token.
    """

    recomputed_tokens: float = 0.0
    requeued: float = 0.0
    paused: float = 0.0


def preemption(
    schedule: Schedule, prompt: int, answer: int, ratio: float, running: float, concurrency: int
) -> Preemption:
    """The preemptions of `concurrency` requests, of which `running` hold their cache, and which start too early.

    Requests that wait for a place, and not for memory, are not counted. `ratio` is the memory that an answer takes,
    relative to that of its prompt.

    With a ratio of new tokens, those with the shortest answers so far are retracted, and wait at the end of the queue.
    Between the ends of two requests, the others take one answer on average, and that is free besides the share of all
    answers. A pool runs full only if no request ends for longer: by the theory of ruin, with a chance that falls with
    the room. Answers as long as prompts run it full in any case, because those that started together outgrow it.

    Without it, the last requests are preempted, and wait at the head of the queue. If answers are long, little is free
    between the ends of two requests, and nearly a whole answer is preempted for the prompts that started. If they are
    short, a prompt rarely fits too early.
    """
    if schedule.new_tokens is not None:
        ruin = exp(-_ruin(1 + 1 / ratio) * schedule.new_tokens.least / 2 * running)
        times = 0.4 * ratio / (ratio + 4) * max(min(1.0, 1.6 * ruin), min(1.0, ratio**3))
        return Preemption(times * (prompt + 0.3 * answer), requeued=times)
    # With more waiting requests, a smaller share of them is paused. The others are new.
    waiting, power = concurrency / running - 1, ratio**1.5
    most, share = 0.7 * power / (power + 24) + ratio / running, 0.65 * ratio / (ratio + 3) + 10 / (running + 13)
    paused = most * tanh(min(1.0, share) * waiting / most)
    again = 0.8 * answer * ratio / (ratio + 1 / 3)
    return Preemption(again * -expm1(-28 * waiting / ratio**0.7), paused=paused)


def _ruin(jump: float) -> float:
    """The exponent of the chance that requests, which end at random, leave no room: y = 1 - exp(-jump y).

    A request that ends gives back `jump` answers.
    """
    found = 1.0
    for _ in range(6):
        found = 1 - exp(-jump * found)
    return found


def _late_steps(ratio: NewTokenRatio, found: Budget, prompt: int, answer: int, requests: float) -> float:
    """For how many steps the first `requests`, which arrive together, wait on average because room is kept free.

    Those start for which the first ratio of the answers is free. If one may not start, no other is tried until a
    request has ended, by which time the ratio is low: that is when the shortest answer ends, with lengths that vary by
    30 %.
    """
    start = prompt + ratio.first * answer
    started = (pool_tokens(found) - prompt - answer) / start * found.case.layout.data_parallel_size
    return max(0.0, 1 - max(1.0, started) / requests) * _SHORTEST * answer
