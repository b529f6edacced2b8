"""How many requests an engine runs at once in a steady load, by its rule for admitting them."""

from __future__ import annotations

from kvcalc.memory.engines.options import Given
from kvcalc.planning.attention_replicas import whole_copies
from kvcalc.planning.budget import Budget, budget
from kvcalc.planning.case import Case

# Engines that draft tokens for one sequence at a time: Transformers (_assisted_decoding, generation/utils.py), and
# mlx-lm, whose server runs no batches with a draft model (is_batchable, mlx_lm/server.py).
_DRAFT_FOR_ONE = ("transformers", "mlx")


def most_at_once(case: Case, max_sequences: int) -> int:
    """The most sequences that the engine's settings allow. `max_sequences` is its default.

    Every attention replica has its own scheduler.
    """
    if case.question.speculative is not None and case.engine_name in _DRAFT_FOR_ONE:
        return 1
    option, replicas = case.rules.running_option, case.workload.data_parallel_size
    given = None if option is None else Given(case.engine_name, case.settings).optional_count(option)
    if given is None and case.question.speculative is not None and case.engine_name == "sglang":
        from kvcalc.planning.drafting import SGLANG_DRAFTS_FOR

        given = SGLANG_DRAFTS_FOR
    if given is None:
        return max_sequences * replicas
    if replicas > 1 and case.rules.limits_all_replicas and not whole_copies(case.spec, case.workload):
        return given
    return given * replicas


def wanted_requests(case: Case, max_sequences: int) -> int:
    """The requests that the engine runs at once if the cache has room: its maximum, or the concurrency if lower."""
    most, question = most_at_once(case, max_sequences), case.question.speed
    return most if question is None or question.concurrency is None else min(question.concurrency, most)


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
    wanted = wanted_requests(case, max_sequences)
    if case.rules.reserves_full_length or fitting >= wanted:
        return min(fitting, wanted)
    found = budget(case)
    if not isinstance(found, Budget):
        return fitting
    limit = found.running_limit(question.input_tokens + question.output_tokens // 2)
    return wanted if limit is None else max(fitting, min(wanted, limit))
