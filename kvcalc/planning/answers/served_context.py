"""The default context of a list's rows: the longest one that their servers allow and can hold."""

from __future__ import annotations

from collections.abc import Iterable

from kvcalc.errors import KvcalcError
from kvcalc.planning.answers.load import at_load
from kvcalc.question.question import Question
from kvcalc.server.budget import budget
from kvcalc.server.capacity import usable_context
from kvcalc.server.case import make_case
from kvcalc.server.fit import describe_fit


def common_context(questions: Iterable[Question], default_tokens: int) -> int:
    """The shortest context of the servers of several questions on devices. `default_tokens` if all are refused."""
    return min(filter(None, map(served_context, questions)), default=default_tokens)


def served_context(question: Question) -> int:
    """The context that the server of a question on a device has, or the longest that it surely holds if it holds any.

    0 if the engine refuses the server.
    """
    try:
        case = at_load(make_case(question))
        room = budget(case)
        longest = None if isinstance(room, str) else usable_context(describe_fit(room, []))
    except KvcalcError:
        return 0
    tokens = case.workload.context_tokens
    return min(tokens, longest) if longest else tokens
