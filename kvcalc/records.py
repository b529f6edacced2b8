"""Named tuples that a start can afford.

Before Python 3.14, `typing.NamedTuple` compiles the text of every annotation when it makes a class, and
`collections.namedtuple` a constructor. A start makes about 80 of these classes, and that took 15 % of its time. kvcalc
reads no annotations while it runs, and its constructors are copies of one that has as many fields.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or sys.version_info >= (3, 14):
    from typing import NamedTuple as NamedTuple  # noqa: TID251 - this is the place that chooses
else:
    from collections import _tuplegetter
    from functools import cache
    from types import FunctionType

    _new = tuple.__new__

    # What all of these classes have, as `collections.namedtuple` gives it to them.
    class _Common:
        __slots__ = ()

        @classmethod
        def _make(cls, values):
            made = _new(cls, values)
            if len(made) != len(cls._fields):
                raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
            return made

        def _replace(self, /, **changes):
            made = _new(type(self), map(changes.pop, self._fields, self))
            if changes:
                raise ValueError(f"Got unexpected field names: {list(changes)!r}")
            return made

        __replace__ = _replace

        def _asdict(self):
            return dict(zip(self._fields, self))

        def __repr__(self):
            return f"{type(self).__name__}({', '.join(map('{}={!r}'.format, self._fields, self))})"

        def __getnewargs__(self):
            return tuple(self)

    # Constructors with 0, 1, 2, ... fields, which no start has to compile.
    _CONSTRUCTORS = (
        lambda _cls: _new(_cls, ()),
        lambda _cls, a: _new(_cls, (a,)),
        lambda _cls, a, b: _new(_cls, (a, b)),
        lambda _cls, a, b, c: _new(_cls, (a, b, c)),
        lambda _cls, a, b, c, d: _new(_cls, (a, b, c, d)),
        lambda _cls, a, b, c, d, e: _new(_cls, (a, b, c, d, e)),
        lambda _cls, a, b, c, d, e, f: _new(_cls, (a, b, c, d, e, f)),
        lambda _cls, a, b, c, d, e, f, g: _new(_cls, (a, b, c, d, e, f, g)),
        lambda _cls, a, b, c, d, e, f, g, h: _new(_cls, (a, b, c, d, e, f, g, h)),
        lambda _cls, a, b, c, d, e, f, g, h, i: _new(_cls, (a, b, c, d, e, f, g, h, i)),
        lambda _cls, a, b, c, d, e, f, g, h, i, j: _new(_cls, (a, b, c, d, e, f, g, h, i, j)),
        lambda _cls, a, b, c, d, e, f, g, h, i, j, k: _new(_cls, (a, b, c, d, e, f, g, h, i, j, k)),
        lambda _cls, a, b, c, d, e, f, g, h, i, j, k, m: _new(_cls, (a, b, c, d, e, f, g, h, i, j, k, m)),
        lambda _cls, a, b, c, d, e, f, g, h, i, j, k, m, n: _new(_cls, (a, b, c, d, e, f, g, h, i, j, k, m, n)),
        lambda _cls, a, b, c, d, e, f, g, h, i, j, k, m, n, p: _new(_cls, (a, b, c, d, e, f, g, h, i, j, k, m, n, p)),
    )

    @cache
    def _constructor(size):
        if size < len(_CONSTRUCTORS):
            return _CONSTRUCTORS[size].__code__
        names = ", ".join(f"_{place}" for place in range(size))
        return eval(f"lambda _cls, {names}: _new(_cls, ({names}))").__code__  # noqa: S307 - of numbers alone

    class _Named(type):
        """Makes the named tuple of a class statement, with the docstring and the methods of its body."""

        def __new__(cls, name, bases, body):
            if not bases:
                return super().__new__(cls, name, bases, body)
            fields = tuple(body.pop("__annotations__", ()))
            defaults = {field: body[field] for field in fields if field in body}
            if tuple(defaults) != fields[len(fields) - len(defaults) :]:
                raise TypeError(f"{name}: a field without a default follows one with a default")
            code = _constructor(len(fields)).replace(co_varnames=("_cls", *fields), co_name="__new__")
            new = FunctionType(code, globals(), "__new__", tuple(defaults.values()))
            new.__qualname__ = f"{name}.__new__"
            read = {each: _tuplegetter(place, f"Alias for field number {place}") for place, each in enumerate(fields)}
            own = {"__new__": new, "_fields": fields, "_field_defaults": defaults, "__match_args__": fields}
            return type(name, (tuple,), {**vars(_Common), **body, **read, **own})

    class NamedTuple(metaclass=_Named):
        """As `typing.NamedTuple`, for a class whose only base it is, in a module with annotations as text."""
