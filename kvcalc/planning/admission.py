"""How many requests an engine runs at once in a steady load, by its rule for admitting them."""

from __future__ import annotations

from kvcalc.memory.engines.options import Given
from kvcalc.planning.budget import Budget, budget
from kvcalc.planning.case import Case


def most_at_once(case: Case, max_sequences: int) -> int:
    """The most sequences that the engine's settings allow. `max_sequences` is its default."""
    option = case.rules.running_option
    given = None if option is None else Given(case.engine_name, case.settings).optional_count(option)
    return max_sequences if given is None else given


def running_requests(case: Case, max_sequences: int) -> int:
    """The mean number of requests that run at once. The others wait.

    `case` is at its load: its batch is the number of requests that fit at their full length. An engine that reserves
    the full length runs these. The others admit a request as long as its prompt fits, so in a steady load the cache
    is full of requests of all ages, which have half of their answer on average. If a request then finds no room, the
    engine stops another one and computes it again later; the time for this is not counted.
    """
    fitting, question = case.workload.batch_size, case.question.speed
    if question is None or question.input_tokens is None or question.output_tokens is None:
        return fitting
    most = most_at_once(case, max_sequences)
    wanted = most if question.concurrency is None else min(question.concurrency, most)
    if case.rules.reserves_full_length or fitting >= wanted:
        return min(fitting, wanted)
    found = budget(case)
    if not isinstance(found, Budget):
        return fitting
    limit = found.running_limit(question.input_tokens + question.output_tokens // 2)
    return wanted if limit is None else max(fitting, min(wanted, limit))
