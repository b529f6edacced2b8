"""What a search needs of an estimate, without the rest of its document.

A search looks at thousands of cases, and only asks whether each fits and how fast it serves. The figures are those of
`planning.estimate.answer_case`, by the same functions. What few layouts have, such as devices with different layers, is
left to that.
"""

from __future__ import annotations

from kvcalc.planning.answers.estimate import Answer, answer_case
from kvcalc.planning.cases.attention_replicas import whole_copies
from kvcalc.planning.cases.case import Case
from kvcalc.planning.device.budget import Budget, budget, free_range
from kvcalc.planning.device.capacity import holds
from kvcalc.planning.serving.throughput import describe_serving, speed_of
from kvcalc.throughput.speed import hide_wide_ranges


def brief_answer(case: Case, needs_speed: bool) -> Answer:
    """The estimate of a case with requests to serve, whose batch is final.

    Its document may have only `fits`, `free_bytes` and `free_low_bytes` of `fit`, `serving` of `throughput`, and the
    size of expert parallelism. `throughput` is null without `needs_speed`, and may be null if it does not fit.
    """
    found = _brief(case, needs_speed)
    return answer_case(case) if found is None else found


def _brief(case: Case, needs_speed: bool) -> Answer | None:
    """None if only the whole estimate knows."""
    room = budget(case)
    if not isinstance(room, Budget) or room.devices or room.host is not None:
        return None
    workload, allocation = case.workload, case.allocation
    sizes = case.share, workload.kv_dtype, workload.context_tokens
    held = allocation.batch_bytes(*sizes, workload.attention_batch(workload.batch_size))
    fits = holds(case, room.pool_bytes)
    free = room.pool_bytes - held
    low, _ = free_range(room, free)
    throughput = None
    if needs_speed and free >= 0:
        if not fits or (workload.data_parallel_size > 1 and whole_copies(case.spec, workload)):
            return None
        speed = speed_of(case, [])
        if isinstance(speed, str) or speed.calibration is not None:
            return None
        throughput = {"serving": describe_serving(case, speed, [])}
        hide_wide_ranges(throughput)
    document = {
        "engine": {"expert_parallel_size": workload.expert_parallel_size},
        "fit": {"fits": fits, "free_bytes": free, "free_low_bytes": low},
        "throughput": throughput,
    }
    return Answer(document, ())
