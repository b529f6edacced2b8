"""A table of cases in one test, which reports every wrong row.

A case that takes a millisecond takes three more as a test of its own: to be collected in each worker, set up and
reported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

MOST_SHOWN = 10


def every_row(names: str, table: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but one test for all rows. It goes on after a wrong row, up to MOST_SHOWN.

    The rows share the test's fixtures, so a row may not leave anything in them.
    """
    keys, table = [name.strip() for name in names.split(",")], list(table)
    assert table, names

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        assert signature.parameters.keys() >= {*keys}, keys
        others = [parameter for name, parameter in signature.parameters.items() if name not in keys]

        @functools.wraps(test)
        def whole(**fixtures: Any) -> None:
            wrong, first, skipped = list[str](), None, list[str]()
            for row in table:
                given = dict(zip(keys, row if len(keys) > 1 else (row,), strict=True))
                try:
                    test(**fixtures, **given)
                except pytest.skip.Exception as error:
                    skipped.append(str(error))
                except (Exception, pytest.fail.Exception) as error:
                    wrong.append(f"{given}: {str(error) or type(error).__name__}")
                    first = first or error
                    if len(wrong) == MOST_SHOWN:
                        break
            if wrong:
                raise AssertionError(f"{len(wrong)} of {len(table)} rows are wrong:\n" + "\n".join(wrong)) from first
            if len(skipped) == len(table):
                pytest.skip(skipped[0])

        whole.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return whole

    return decorate
