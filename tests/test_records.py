"""`kvcalc.records.NamedTuple` is `typing.NamedTuple`, made faster."""

from __future__ import annotations

import pickle
import typing
from typing import Any

import pytest

from kvcalc.records import NamedTuple


class Fast(NamedTuple):
    """Two fields and a default."""

    name: str
    size: int
    unit: str = "B"

    @property
    def text(self) -> str:
        return f"{self.size} {self.unit}"

    @classmethod
    def empty(cls) -> Fast:
        return cls("", 0)


class Slow(typing.NamedTuple):
    """Two fields and a default."""

    name: str
    size: int
    unit: str = "B"

    @property
    def text(self) -> str:
        return f"{self.size} {self.unit}"

    @classmethod
    def empty(cls) -> Slow:
        return cls("", 0)


class Larger(Fast):
    """A class with more methods."""

    def twice(self) -> int:
        return 2 * self.size


def test_a_class_is_like_that_of_typing() -> None:
    kinds: tuple[Any, Any] = Fast, Slow
    for name in ("_fields", "_field_defaults", "__match_args__", "__doc__", "__module__", "__slots__", "__bases__"):
        assert getattr(kinds[0], name) == getattr(kinds[1], name), name
    assert set(dir(Slow)) - set(dir(Fast)) <= {"__annotations__", "__orig_bases__", "__annotate__"}
    fast, slow = (kind("a", size=2) for kind in kinds)
    assert fast == slow == ("a", 2, "B")
    assert (fast.text, fast._replace(unit="GiB").text, fast._asdict()) == ("2 B", "2 GiB", slow._asdict())
    assert repr(fast) == repr(slow).replace("Slow", "Fast")
    assert kinds[0].empty() == kinds[1].empty()
    assert Larger("a", 3).twice() == 6
    assert type(pickle.loads(pickle.dumps(fast))) is Fast


@pytest.mark.parametrize("size", [0, 1, 14, 15, 40])
def test_a_class_may_have_any_number_of_fields(size: int) -> None:
    names = [f"field_{place}" for place in range(size)]
    made = {"Base": NamedTuple, "__name__": "wide"}
    exec("class Wide(Base):\n 'Wide.'\n" + "".join(f" {name}: 'int'\n" for name in names), made)
    wide: Any = made["Wide"]
    assert (wide._fields, wide(*range(size)), wide(**dict(zip(names, range(size), strict=True)))) == (
        tuple(names), tuple(range(size)), tuple(range(size)),
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"Wide\.__new__"):
        wide(*range(size + 1))


def test_wrong_fields_are_errors_as_in_typing() -> None:
    kind: Any = Fast
    with pytest.raises(TypeError, match="size"):
        kind("a")
    with pytest.raises(TypeError, match="other"):
        kind("a", 1, other=2)
    for base in (NamedTuple, typing.NamedTuple):
        with pytest.raises(TypeError, match="default"):
            exec("class Late(Base):\n a: 'int' = 1\n b: 'int'", {"Base": base, "__name__": "late"})
