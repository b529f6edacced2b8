"""A model that fits only if the engine takes a larger share of the device than it does by default.

SGLang and vLLM choose their share of the memory before they know the weights. If it leaves no room for the cache, they
refuse to start, and the user raises the share with a flag. A case then does not fit as it was asked, but there is a
start that runs it.
"""

from __future__ import annotations

from kvcalc.errors import KvcalcError
from kvcalc.planning.budget import budget
from kvcalc.planning.case import Case, make_case
from kvcalc.records import NamedTuple


class LargerShare(NamedTuple):
    """The case with a larger share, the flag that sets it, and the most requests of the case's length that then run."""

    case: Case
    flag: str
    requests: int


def larger_share(case: Case) -> LargerShare | None:
    """The case with the largest share of the memory. None if it does not fit then either, or if a share was given.

    Call this only if not one request fits with the engine's default.
    """
    asked = case.question
    option, share = case.engine_class.largest_share or ("", "")
    given = asked.engine_settings or {}
    if not option or option in given or asked.kv_memory_bytes is not None:
        return None
    try:
        found = make_case(asked._replace(engine_settings={**given, option: share}))
    except KvcalcError:
        return None
    found = found.at(case.workload.context_tokens, case.workload.batch_size)
    room = budget(found)
    requests = 0 if isinstance(room, str) else room.running_limit() or 0
    return LargerShare(found, f"--{option} {share}", requests) if requests else None
