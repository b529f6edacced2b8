"""Whether a server starts: by its memory, and by its context and its limit of running requests, whatever the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.engines import context_limits
from kvcalc.records import NamedTuple
from kvcalc.server.capacity import too_many, usable_context
from kvcalc.server.case import Case
from kvcalc.server.layout import server_context
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents


class Refused(NamedTuple):
    """The reason, and the option and value with which the engine starts. None if no option is enough."""

    reason: str
    change: tuple[str, str] | None


def refused_start(case: Case, document: documents.Estimate, lifts_limit: bool) -> Refused | None:
    """Why the engine refuses the server of a case with this estimate. None if it does not.

    `lifts_limit` is whether its variable for contexts beyond the model's is set.
    """
    engine, question, fit = case.engine_class, case.question, document["fit"]
    option = engine.running_option
    settings: Any = document["engine"]
    running = settings.get(option.replace("-", "_")) if option else None
    too_large = too_many(question, running, None if fit is None else fit["start_limit"])
    if too_large is not None:
        return Refused(too_large.reason, (f"--{too_large.option}", str(too_large.limit)))
    _, longest = context_limits(question.engine, question.model)
    tokens = server_context(question, case.workload.context_tokens)
    if not engine.limit_variable or lifts_limit or longest is None or tokens <= longest:
        return None
    text = f"{tokens:,} tokens are beyond the model's {longest:,}, which {engine.title} refuses without "
    usable = min(longest, (fit and usable_context(fit)) or 0)
    change = (engine.context_option or "", str(usable)) if usable and engine.context_option else None
    return Refused(f"{text}{engine.limit_variable}=1", change)


def starts_within(case: Case, fit: documents.Fit) -> tuple[bool | None, str | None]:
    """Whether the server starts by its memory, None if its range has both, and why it does not.

    An engine that `starts_short` needs memory for one token, and others for a request of their whole context.
    """
    engine, workload = case.engine_class, case.workload
    if engine.starts_short:
        if fit["max_context_tokens"] != 0:
            return True, None
        tokens, batch = 1, workload.layout.data_parallel_size
    else:
        tokens = server_context(case.question, workload.context_tokens)
        batch = workload.batch_size if engine.allocates_slots else workload.layout.data_parallel_size
    needed = case.needed_bytes(tokens, workload.layout.attention_batch(batch))
    free = fit["kv_cache_memory_bytes"] - needed
    if engine.allocates_slots:  # also on other devices and in host memory
        free = fit["free_bytes"] if fit["fits"] else min(fit["free_bytes"], -1)
    low, high = (
        free if end is None else free + end - fit["free_bytes"]
        for end in (fit["free_low_bytes"], fit["free_high_bytes"])
    )
    if low >= 0:
        return True, None
    if free >= 0:
        text = f"the estimated parts may take up to {format_size(free - low)} more, and "
        return None, text + f"{format_size(free, capacity=True)} is free"
    reason = _shortage(fit, tokens, needed, free)
    if high < 0:
        return False, reason
    return None, f"{reason}; the estimated parts may take up to {format_size(high - free)} less"


def _shortage(fit: documents.Fit, tokens: int, needed: int, free: int) -> str:
    memory = fit["kv_cache_memory_bytes"]
    if memory <= 0:
        return (
            f"the weights and the reserve leave no memory for the cache: {format_size(-free)} more is needed per device"
        )
    if fit["devices"] is not None or fit["host"] is not None:
        return f"{tokens:,} tokens need {format_size(-free)} more on the fullest device"
    available = format_size(memory, capacity=True)
    return f"{tokens:,} tokens need {format_size(needed)} per device, and {available} is available"
