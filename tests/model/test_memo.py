"""Remembered results are computed once, belong to one object only, and are bounded in number."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvcalc.errors import UsageError
from kvcalc.model import memo
from kvcalc.model.memo import forget, remembered, remembered_of_two
from tests.documents import estimate, texts


class Thing:
    """An unhashable object, like a ModelSpec."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: int) -> None:
        self.number = number


def test_once_for_each_object_and_each_other_argument() -> None:
    asked = []

    @remembered
    def times(thing: Thing, factor: int = 2) -> int:
        asked.append((thing.number, factor))
        return thing.number * factor

    one, two = Thing(1), Thing(2)
    assert [times(one, 3), times(two, 3), times(one, 3), times(one), times(one, factor=5)] == [3, 6, 3, 2, 5]
    assert asked == [(1, 3), (2, 3), (1, 2), (1, 5)]


def test_two_functions_do_not_share() -> None:
    thing = Thing(4)
    assert remembered(lambda t: t.number)(thing) == 4
    assert remembered(lambda t: -t.number)(thing) == -4


def test_of_two_objects_both_count() -> None:
    @remembered_of_two
    def both(a: Thing, b: Thing) -> tuple[int, int]:
        return a.number, b.number

    one, two = Thing(1), Thing(2)
    assert [both(one, two), both(two, one), both(one, one)] == [(1, 2), (2, 1), (1, 1)]


def test_none_is_an_answer_and_an_error_is_raised_every_time() -> None:
    asked = []

    @remembered
    def nothing(thing: Thing) -> None:
        asked.append(thing)

    @remembered
    def refuse(thing: Thing) -> None:
        asked.append(thing)
        raise UsageError("no")

    thing = Thing(0)
    nothing(thing)
    nothing(thing)
    assert len(asked) == 1
    for _ in range(2):
        with pytest.raises(UsageError):
            refuse(thing)
    assert len(asked) == 3


def test_it_is_bounded_and_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "_MOST_KEPT", 10)
    forget()
    number = remembered(lambda thing: thing.number)
    assert [number(Thing(i)) for i in range(100)] == list(range(100))
    assert memo.count_kept() <= 10
    thing = Thing(1)
    gone = weakref.ref(thing)
    number(thing)
    del thing
    gc.collect()
    assert gone() is not None
    forget()
    gc.collect()
    assert gone() is None


def test_a_document_is_its_askers_own() -> None:
    import kvcalc

    model = kvcalc.load_model("llama-3-8b")
    first = estimate(model)
    first["model"]["name"] = "spoilt"
    first["weights"]["bytes"] = 0
    first["warnings"].append({"part": "spoilt", "code": "spoilt", "text": "spoilt"})
    second = estimate(model)
    assert second["model"]["name"] == "llama-3-8b"
    assert second["weights"]["bytes"] > 0
    assert "spoilt" not in texts(second)
