"""Questions that differ from an earlier one only in the context, the batch or the requests.

The lines of a file are usually variations of a few questions. Their other fields are parsed and checked once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.limits import most_of
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    from kvcalc.question.question import Question
    from kvcalc.server.case import Case

# The fields that may differ, if they are plain whole numbers up to these.
_COUNTS = {name: most_of(name) for name in ("context", "batch", "input_tokens", "output_tokens", "concurrency")}
# --max-model-len has to be equal to --context, so a question that has it is always checked as a whole.
_CHECKED_TOGETHER = ("max_model_len", "max-model-len")

# The maximum number of cases kept. When it is reached, all of them are dropped.
_MOST_CASES = 512


class Fields(NamedTuple):
    """The fields of a question in two parts: its counts, and everything else as a key."""

    key: tuple[object, ...]
    counts: dict[str, int]


def split(fields: Mapping[str, Any]) -> Fields | None:
    """The two parts of a question's fields. None if the question has to be read as a whole."""
    key: list[object] = []
    counts: dict[str, int] = {}
    for field, value in fields.items():
        kind = type(value)
        if kind is int and field in _COUNTS and 0 < value <= _COUNTS[field]:
            counts[field] = value
            key.append(field)
        elif kind is dict or kind is list or field in _CHECKED_TOGETHER:
            return None
        else:
            # 1, 1.0 and true are equal, but they are different answers to an option.
            key += (field, kind, value)
    return Fields(tuple(key), counts)


class Cases:
    """The cases of earlier questions, by the fields that are not counts."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Case] = {}

    def find(self, fields: Fields) -> Case | None:
        """The case of the question with these fields, made from that of an earlier one. None if there is none.

        Raises UsageError (exit 2) if the counts contradict the other fields.
        """
        like = self._kept.get(fields.key)
        if like is None:
            return None
        from kvcalc.server.case import case_like

        count, speed = fields.counts.get, like.question.speed
        if speed is not None:
            speed = speed._replace(
                input_tokens=count("input_tokens"), output_tokens=count("output_tokens"),
                concurrency=count("concurrency"),
            )  # fmt: skip
        return case_like(like, count("context"), fields.counts.get("batch", 1), speed)

    def keep(self, fields: Fields, question: Question, case: Case) -> None:
        """Remember the case of a question.

        Not if it has a count in another form (as a text, or under another name), or if other counts change more of the
        case than its workload.
        """
        from kvcalc.server.case import is_reusable

        if not is_reusable(question) or _counts_of(question) != {"batch": 1, **fields.counts}:
            return
        if len(self._kept) >= _MOST_CASES:
            self.forget()
        self._kept[fields.key] = case

    def forget(self) -> None:
        """Drop all cases, and the models they belong to."""
        self._kept.clear()


def _counts_of(question: Question) -> dict[str, int]:
    """The counts that a question has, as it was asked."""
    counts = {"context": question.context_tokens, "batch": question.batch_size}
    if question.speed is not None:
        counts |= {field: getattr(question.speed, field) for field in (*_COUNTS,)[2:]}
    return {field: count for field, count in counts.items() if count is not None}
