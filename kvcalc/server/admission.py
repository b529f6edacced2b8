"""How many requests an engine runs at once, whatever their lengths, and which prompts and instances serve none."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines import engine_class
from kvcalc.errors import UsageError
from kvcalc.notes import Note
from kvcalc.server.budget import Budget
from kvcalc.server.capacity import least, max_running_requests
from kvcalc.server.case import Case

# The most requests considered of an engine without a limit.
_UNLIMITED = 4096


def most_at_once(case: Case, room: Budget | str) -> int:
    """The most requests that the engine's DP ranks run at once, whatever their lengths.

    `room` is the budget of the case, or the reason if it is not known. For an engine without a limit, it is the most
    that kvcalc considers. An engine that keeps memory for every request that may run gets the limit that fits.
    """
    if case.question.speculative is not None and case.engine.drafts_for_one:
        return 1
    limit = max_running_requests(case, None if isinstance(room, str) else room.offered_bytes)
    if case.engine.reserves_running and not isinstance(room, str):
        limit = least(limit, room.running_limit())
    return _UNLIMITED * case.layout.data_parallel_size if limit is None else limit


def check_serves(engine: str, settings: Mapping[str, str]) -> None:
    """Raise UsageError (exit 2) if the settings make a prefill or decode instance, which serves no requests alone."""
    reason = serves_nothing(engine_class(engine).role_in(settings))
    if reason is not None:
        raise UsageError(
            reason.text, "kvcalc plan --disaggregate and kvcalc simulate --prefill-replicas choose the mode"
        )


def serves_nothing(role: str | None) -> Note | None:
    """A note that an instance of a role serves no requests alone. None if it has no role."""
    if role is None:
        return None
    return Note("engine", "separate-instance", f"a {role} instance serves no requests alone")


def accept_prompts(case: Case, prompt_tokens: int, notes: list[Note]) -> None:
    """Add a note if the server needs another setting for prompts of `prompt_tokens` tokens.

    Raises LayoutError (exit 2) if the settings that are given make it refuse them.
    """
    for name, text in case.engine_class.prompt_settings(case.settings, prompt_tokens).items():
        if name not in case.settings:
            why = f"a step of {case.engine_class.title} needs room for a whole prompt of {prompt_tokens:,} tokens"
            notes.append(Note("engine", "prompt-setting", f"start the server with --{name} {text}: {why}"))


def wanted_requests(case: Case, most: int) -> int:
    """The requests that the engine runs at once if the cache has room: `most_at_once`, or the concurrency if lower."""
    question = case.question.speed
    return most if question is None or question.concurrency is None else min(question.concurrency, most)
