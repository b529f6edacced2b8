"""The document of `kvcalc estimate`: the estimate alone, or with its server on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.planning.answers.estimate import answer, answer_asked
from kvcalc.question.question import Question
from kvcalc.server.case import Case, make_case

if TYPE_CHECKING:
    import kvcalc.documents as documents


def estimate(question: Question) -> documents.Estimate:
    """The document of `kvcalc estimate`, with the server if the question has devices.

    Raises what `answer` raises. LayoutError then has the document of the refusal.
    """
    if question.devices is None:
        return answer(question).document
    from kvcalc.planning.answers.fit import documented_refusals

    with documented_refusals():
        return document_of(make_case(question))


def document_of(case: Case) -> documents.Estimate:
    """The document of `kvcalc estimate` for a case from `make_case`, with the server if it has devices."""
    if case.question.devices is None:
        return answer_asked(case).document
    from kvcalc.planning.answers.fit import answer_server

    return answer_server(case)[0].document
