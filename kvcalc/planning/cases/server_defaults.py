"""The context that a server has if a question does not say it, and the settings that follow from one that it says."""

from __future__ import annotations

from kvcalc.engines import context_limits, engine_class
from kvcalc.engines.declarations import OPTIONS
from kvcalc.errors import UsageError
from kvcalc.model.spec import weights_of
from kvcalc.model.variants import WhatIf
from kvcalc.question.question import Question
from kvcalc.releases import release_of
from kvcalc.units import parse_tokens


def as_started(question: Question, context_tokens: int) -> Question:
    """The question about a server that is started with this context, if its engine counts by an option for it."""
    option, settings = _counted_option(question), question.engine_settings or {}
    if not option or option in settings or context_limits(question.engine, question.model)[0] == context_tokens:
        return question
    return question._replace(engine_settings={**settings, option: str(context_tokens)})


def _counted_option(question: Question) -> str:
    """The engine's option for the context if kvcalc has it as a setting of the engine, else nothing."""
    option = (engine_class(question.engine).context_option or "").removeprefix("--")
    known = OPTIONS[question.engine.partition("@")[0]]
    return option if any(each.name == option for each in known) else ""


def with_context(question: Question) -> Question:
    """The question with the context that its server has, if nothing says one and the engine has a server.

    That is the one of its settings, else the model's own length, or the longest context that fits if the engine chooses
    it so.
    """
    engine = engine_class(question.engine)
    if question.context_tokens is not None or question.fits_context or not engine.has_server:
        return question
    given = (question.engine_settings or {}).get(_counted_option(question))
    if given is not None:
        return question._replace(context_tokens=parse_tokens(given, engine.context_option or ""))
    default, _ = context_limits(question.engine, question.model)
    if default is None:
        return question
    # Without the bytes of the weights it is not known what fits.
    is_known = question.what_if == WhatIf() and weights_of(question.model) is not None
    if engine.chooses_context and not is_known:
        return question
    if not engine.chooses_context:
        return question._replace(context_tokens=default)
    try:
        engine.check_auto_context(question.engine_settings or {}, release_of(question.engine))
    except UsageError:  # an older build, whose default is that of `resolve_context`
        return question
    return question._replace(fits_context=True)
