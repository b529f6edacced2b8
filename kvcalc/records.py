"""Named tuples that a start can afford.

Before Python 3.14, `typing.NamedTuple` compiles the text of every annotation when it makes a class. A start makes about
80 of these classes, and that took 7 % of its time. kvcalc reads no annotations while it runs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or sys.version_info >= (3, 14):
    from typing import NamedTuple as NamedTuple  # noqa: TID251 - this is the place that chooses
else:
    from collections import namedtuple

    class _Named(type):
        """Makes the named tuple of a class statement, with the docstring and the methods of its body."""

        def __new__(cls, name, bases, body):
            if not bases:
                return super().__new__(cls, name, bases, body)
            fields = tuple(body.pop("__annotations__", ()))
            optional = [field for field in fields if field in body]
            if optional != list(fields[len(fields) - len(optional) :]):
                raise TypeError(f"{name}: a field without a default follows one with a default")
            defaults = [body.pop(field) for field in optional]
            made = namedtuple(name, fields, defaults=defaults, module=body["__module__"])
            for key, value in body.items():
                setattr(made, key, value)
            return made

    class NamedTuple(metaclass=_Named):
        """As `typing.NamedTuple`, for a class whose only base it is, in a module with annotations as text."""
