"""Why an engine refuses to start a server whose memory would do: its context, or its limit of running requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.engines import context_limits
from kvcalc.planning.cases.case import Case
from kvcalc.planning.device.capacity import too_many
from kvcalc.records import NamedTuple

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
    tokens = case.workload.context_tokens
    if not engine.limit_variable or lifts_limit or longest is None or tokens <= longest:
        return None
    text = f"{tokens:,} tokens are beyond the model's {longest:,}, which {engine.title} refuses without "
    usable = min(longest, (fit and (fit["sure_context_tokens"] or fit["max_context_tokens"])) or 0)
    change = (engine.context_option or "", str(usable)) if usable and engine.context_option else None
    return Refused(f"{text}{engine.limit_variable}=1", change)
