"""The default context of a list's rows: the longest one that their servers allow and can hold."""

from __future__ import annotations

from collections.abc import Iterable

from kvcalc.errors import KvcalcError
from kvcalc.planning.answers.estimate import answer
from kvcalc.question.question import Question
from kvcalc.server.capacity import usable_context


def common_context(questions: Iterable[Question], default_tokens: int) -> int:
    """The shortest context of the servers of several questions on devices. `default_tokens` if all are refused."""
    return min(filter(None, map(served_context, questions)), default=default_tokens)


def served_context(question: Question) -> int:
    """The context that the server of a question on a device has, or the longest that it surely holds if it holds any.

    0 if the engine refuses the server.
    """
    try:
        document = answer(question).document
    except KvcalcError:
        return 0
    tokens, fit = document["workload"]["context_tokens"], document["fit"]
    longest = fit and usable_context(fit)
    return min(tokens, longest) if longest else tokens
