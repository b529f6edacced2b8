"""How many requests an engine runs at once in a steady load, by its rule for admitting them."""

from __future__ import annotations

from math import exp, inf, sqrt

from kvcalc.engines.scheduler import NewTokenRatio
from kvcalc.model.spec import windows
from kvcalc.records import NamedTuple
from kvcalc.server.budget import Budget, budget
from kvcalc.server.case import Case
from kvcalc.throughput.scheduling import StepRules

# The variance of lengths that vary by 30 % around their mean, relative to its square.
_VARIANCE = 0.3**2 / 3


def step_rules(case: Case, most: int) -> StepRules | None:
    """How the engine puts prompts into steps. None if its scheduler is not known. `most` is `most_at_once`."""
    schedule = case.engine.schedule()
    if schedule is None:
        return None
    return schedule.steps(max(1, most // case.layout.data_parallel_size), case.workload.context_tokens)


class Running(NamedTuple):
    """The mean number of requests that run at once, and whether some are preempted: they start before all fit.

    `growth` is the memory that a request takes while it decodes, relative to that of its prompt.
    """

    requests: float
    may_preempt: bool = False
    growth: float = 1.0


def running_requests(case: Case, wanted: int) -> Running:
    """The requests that run at once, of `wanted_requests`. The others wait.

    `case` is at its load: its batch is the number of requests that fit at their full length. An engine that reserves
    the full length runs these. The others admit a request as long as its prompt fits, so in a steady load the cache
    is full of requests of all ages. If a request then finds no room, the engine stops another one and computes it again
    later (`served`), and some engines keep some room free for that. In layers with windows, a request
    may hold less than is reserved for it.
    """
    fitting, question = case.workload.batch_size, case.question.speed_asked
    prompt, answer = question.prompt_tokens, question.answer_tokens
    if prompt is None or answer is None:
        return Running(fitting)
    schedule = case.engine.schedule()
    if schedule is None or fitting >= wanted:
        return Running(min(fitting, wanted))
    # Without a number of clients, as many requests are served as run: none of them waits.
    waits = question.concurrency is not None
    if schedule.reserves_answer:
        # Long answers hold their places for longer, so their share is larger among the running requests.
        longer = answer * (1 + _VARIANCE) if waits and not schedule.has_slots else answer
        return Running(fitting * (prompt + answer) / (prompt + longer))
    found = budget(case)
    if not isinstance(found, Budget):
        return Running(fitting, may_preempt=True)
    full = _most_running(found, case.workload.context_tokens)
    may_preempt = full is None or full < wanted
    limit, growth = _mean_running(found, prompt, answer), _growth(case, prompt, answer)
    if limit is None:
        return Running(wanted, may_preempt, growth)
    if schedule.new_tokens is not None:
        limit = min(limit, max(fitting, _running_beside_answers(schedule.new_tokens, found, prompt, answer)))
    most: float = max(fitting, min(wanted, limit))
    # If requests wait for a place, one starts when one ends, and not several short ones for a long one.
    waits_for_places = wanted < (question.concurrency or 0) and wanted <= limit
    if may_preempt and waits and not waits_for_places:
        unsteady = _unsteady(wanted / limit, growth, most, keeps_free=schedule.new_tokens is not None)
        most = max(fitting, most / (1 + unsteady))
    return Running(most, may_preempt, growth)


def _unsteady(load: float, ratio: float, number: float, *, keeps_free: bool) -> float:
    """How many more requests wait, per running one, than if the cache were as full at any time as it is on average.

    `number` requests would run, `load` times as many as fit with answers of all ages, and `ratio` is the memory of an
    answer relative to that of its prompt. When a long request ends, several prompts start in its place. They grow
    together, and fill the cache together later: so some wait even if the mean of all ages fits, but fewer if the engine
    keeps a part of the answers free. The numbers are those of 308 simulated servers of each kind, with steps of one
    second, 20 to 400 requests, ratios of 1/4 to 16, loads of 0.75 to 1.8, and lengths that vary by 30 %.
    """
    if keeps_free:
        most = 0.006 + 0.11 * ratio * ratio / (ratio * ratio + 3)
        if load >= 1:
            return most * max(0.0, 1 - 6.5 * (load - 1))
        return most * exp(-4.3 * sqrt(number) * (1 - load))
    power: float = ratio**1.25
    most, few = 0.11 * power / (power + 3), 0.5 / number
    if load >= 1:
        return most * (0.2 + 0.8 * exp(-5 * (load - 1))) + few
    left = (1 - load) / (1 + 13 / number)
    return (most + few) * exp(-(4 + 28 / ratio) * left - 100 * left * left)


def _growth(case: Case, prompt: int, answer: int) -> float:
    """The memory that a request takes while it decodes, relative to that of its prompt."""
    share, dtype = case.share, case.workload.kv_dtype
    first, last = (case.allocation.batch_bytes(share, dtype, tokens, 1) for tokens in (prompt, prompt + answer))
    return float((last - first) / first) if last > first > 0 else answer / prompt


def _mean_running(found: Budget, prompt: int, answer: int) -> float | None:
    """The most requests of all ages that run. None if memory sets no limit.

    What a request holds grows with its answer: evenly if all layers keep all tokens, so that its mean is that of half
    an answer. If it fills a window on the way, it is the mean over the answer.
    """
    fills = any(prompt < window < prompt + answer for window in windows(found.case.spec))
    ages = (1 / 8, 3 / 8, 5 / 8, 7 / 8) if fills else (1 / 2,)
    share = 0.0
    for age in ages:
        tokens = prompt + int(answer * age)
        limit = _most_running(found, tokens)
        if limit is None:
            limit = found.running_limit(tokens)
        if limit is None:
            return None
        share += 1 / max(limit, 1)
    return len(ages) / share


def _most_running(found: Budget, tokens: int) -> int | None:
    """The most requests of `tokens` tokens that run. None if they hold what the engine reserves at the start."""
    case, speed = found.case, found.case.question.speed
    prompt = None if speed is None else speed.prompt_tokens
    if found.devices or prompt is None:
        return None
    share = case.allocation.largest_stage(case.share, case.workload.kv_dtype, tokens, 1)
    most = case.allocation.most_running(share, case.workload.kv_dtype, found.offered_bytes, prompt, tokens)
    return None if most is None else most * case.layout.data_parallel_size


def _running_beside_answers(ratio: NewTokenRatio, found: Budget, prompt: int, answer: int) -> float:
    """The mean number of requests that run while others wait, if a part of their answers is kept free.

    Each has its prompt, half of its answer, and a share of the other half that is kept free. Besides, a request needs
    all of its prompt and answer to start. When it has started, its prompt and that share are no longer free, so half of
    this is missing on average.
    """
    expected = ratio.least * answer
    each = prompt + answer / 2 + expected / 2
    free = prompt + answer - (prompt + expected) / 2
    return (pool_tokens(found) - free) / each * found.case.layout.data_parallel_size


def pool_tokens(found: Budget) -> float:
    """The tokens in the pool of one DP rank. Without a pool, memory sets no limit."""
    case = found.case
    allocation, dtype, tokens = case.allocation, case.workload.kv_dtype, case.workload.context_tokens
    device = allocation.largest_stage(case.share, dtype, tokens, 1)
    pool = allocation.blocks(device, dtype, tokens, 1, found.offered_bytes).pool
    return inf if pool is None or pool.kv_cache_tokens is None else pool.kv_cache_tokens
