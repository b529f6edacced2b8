"""The load of a case: how many of the requests to serve fit at their full length, and the start that serves them.

Engines choose a context at their start (`--context auto`), and some refuse to start with their default share of a
device's memory.
"""

from __future__ import annotations

from kvcalc.errors import KvcalcError, ModelError
from kvcalc.notes import Note
from kvcalc.releases import release_of
from kvcalc.server.admission import most_at_once, wanted_requests
from kvcalc.server.budget import budget
from kvcalc.server.case import Case, make_case
from kvcalc.server.layout import server_context
from kvcalc.server.speed import Speed, speed_of


def at_load(case: Case) -> Case:
    """The case with the number of requests that fit as its batch. Returns `case` itself if it serves no requests.

    If the engine is to choose the context, the result has that context. If as many layers as fit are to be on the
    device, the result has that number.
    """
    chosen: Note | None = None
    if case.question.fits_context:
        case, chosen = _with_auto_context(case)
    if case.engine.placement is not None:
        from kvcalc.server.offload import place_layers

        case = place_layers(case)
    if chosen is not None:
        case = case._replace(notes=(*case.notes, chosen))
    if case.question.speed is None or case.question.speed.request_tokens is None:
        return case
    return case.at(case.workload.context_tokens, _fitting_requests(case))


def _fitting_requests(case: Case) -> int:
    """The number of requests that fit at their full length: at most the concurrency and the engine's maximum.

    The result is 1 if not even one request fits, so that the answer shows how much memory one request takes.
    """
    room = budget(case)
    tokens = case.workload.context_tokens
    if case.engine_class.allocates_slots:  # each for the longest request
        tokens = server_context(case.question, tokens)
    limit = None if isinstance(room, str) else room.running_limit(tokens)
    speed, speed_asked = speed_of(case, []), case.question.speed
    if isinstance(speed, Speed):
        wanted = wanted_requests(case, most_at_once(case, room))
    else:
        wanted = (speed_asked and speed_asked.concurrency) or 1
    return max(1, wanted if limit is None else min(wanted, limit))


def larger_share_notes(case: Case) -> list[Note]:
    """A note about the largest share of the memory for the engine, if not one request fits without it and some do then.

    SGLang and vLLM choose their share of the memory before they know the weights. If it leaves no room for the cache,
    they refuse to start, and the user raises the share with a flag. Empty if a share was given.
    """
    question, (option, share) = case.question, case.engine_class.largest_share or ("", "")
    settings, serves = question.engine_settings or {}, question.serves_requests
    if not serves or not option or option in settings or question.kv_memory_bytes is not None:
        return []
    try:
        larger = make_case(question._replace(engine_settings={**settings, option: share}))
    except KvcalcError:
        return []
    room = budget(larger.at(case.workload.context_tokens, case.workload.batch_size))
    requests = 0 if isinstance(room, str) else room.running_limit() or 0
    if not requests:
        return []
    fitting = f"{requests:,} request{'s' if requests > 1 else ''} of this length"
    return [Note("fit", "larger-share", f"with --{option} {share}, there is memory for {fitting}")]


def _with_auto_context(case: Case) -> tuple[Case, Note]:
    """The case with the longest context that fits, and a note about it. The question of the result has this context.

    Raises ModelError (exit 3) if the model's own length, or what fits, is not known.
    """
    longest = case.spec.max_position_embeddings
    if longest is None:
        raise ModelError(
            f"{case.spec.name}: --context auto: the model's maximum length is not known", "give --context N"
        )
    batch = case.workload.batch_size
    blocks = case.allocation.blocks(case.share, case.workload.kv_dtype, longest, batch, None)
    shares_context, release = blocks.own.get("n_stream") == 1, release_of(case.question.engine)
    how = case.engine_class.auto_context(case.settings, longest, batch, shares_context, release)
    tokens = _longest(case.at(how.most_tokens, how.sequences), how.margin_bytes)
    if tokens < longest:
        tokens = max(tokens - tokens % how.step_tokens, how.least_tokens)
    text = f"the context is {tokens:,} tokens: "
    if tokens == longest:
        # The server measures the devices only, so the host's part may still be too large.
        text += "the model's maximum fits" + ("" if case.engine.placement is None else " on the device")
    elif how.least_reason and tokens == how.least_tokens:
        text += how.least_reason
        if case.engine.placement is None:
            text += "; -ngl auto also moves layers into host memory, as the server does"
    else:
        text += "the longest context that fits" + (f" and {how.margin_reason}" if how.margin_reason else "")
    longest_case = case.at(tokens, batch)
    question = longest_case.question._replace(context_tokens=tokens, fits_context=False)
    return longest_case._replace(question=question), Note("workload", "auto-context", text)


def _longest(case: Case, margin: int) -> int:
    """The longest context that fits with `margin` bytes left on every device, at most the case's own."""
    room = budget(case)
    if isinstance(room, str):
        raise ModelError(f"{case.spec.name}: --context auto: it is not known what fits: {room}", "give --context N")
    longest = room.longest_context(margin)
    return case.workload.context_tokens if longest is None else min(case.workload.context_tokens, longest)
