"""What a server has if a question does not say it: its engine and its context.

Both are those of a server that somebody starts on the question's devices without the option.
"""

from __future__ import annotations

from kvcalc.engines import context_limits, engine_class
from kvcalc.engines.declarations import OPTIONS
from kvcalc.engines.default_engine import engine_on
from kvcalc.errors import UsageError
from kvcalc.question.question import Question
from kvcalc.releases import release_of


def with_engine(question: Question) -> Question:
    """The question with the name of its engine in lower case, and with the default engine if it names none."""
    gpu = None if question.devices is None else question.devices.gpu
    engine = engine_on(question.engine, question.model, gpu, question.dtype)
    return question if engine == question.engine else question._replace(engine=engine)


def as_started(question: Question, context_tokens: int) -> Question:
    """The question about a server that is started with this context, if its engine counts by an option for it."""
    option = (engine_class(question.engine).context_option or "").removeprefix("--")
    settings = question.engine_settings or {}
    is_counted = any(each.name == option for each in OPTIONS[question.engine.partition("@")[0]])
    if not is_counted or option in settings or context_limits(question.engine, question.model)[0] == context_tokens:
        return question
    return question._replace(engine_settings={**settings, option: str(context_tokens)})


def with_context(question: Question) -> Question:
    """The question with the context that its server has, if nothing says one and the engine has a server.

    That is the model's own length, or the longest context that fits if the engine chooses it so.
    """
    engine = engine_class(question.engine)
    if question.context_tokens is not None or question.fits_context or not engine.has_server:
        return question
    default, _ = context_limits(question.engine, question.model)
    if default is None:
        return question
    if not engine.chooses_context:
        return question._replace(context_tokens=default)
    try:
        engine.check_auto_context(question.engine_settings or {}, release_of(question.engine))
    except UsageError:  # an older build, whose default is that of `resolve_context`
        return question
    return question._replace(fits_context=True)
