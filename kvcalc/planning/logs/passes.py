"""The passes in which llama.cpp measures a model before it loads it.

Each of them prints the context, and buffers of 0.00 MiB, and may have another context and other layers on the devices.
The model that is loaded prints the same lines again (`fitting params to device memory`, common/common.cpp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcalc.planning.logs import Fact, Record

_BUFFER, _CONTEXT = "buffer", "context_tokens"
_OF_A_PASS = frozenset((_BUFFER, "cache", "creating", "self", "state_buffer", "states"))


class Passes:
    """Follows the buffers of a log, and says which facts and records are only of a pass that measures."""

    def __init__(self) -> None:
        # Line numbers: of the last buffer with bytes, of the last one without, and of the last context.
        self._loaded = self._measured = self._context = 0
        # The context of the first pass that measured since a model was loaded.
        self._first: int | None = None

    def replaces(self, name: str, said: Fact, line: int) -> bool:
        """Whether a fact in this line replaces the one that was said before, which is of a pass that measured."""
        if name == _CONTEXT:
            self._context = line
        return self._loaded < said.line < self._measured < line

    def measured(self, record: Record) -> range:
        """The lines that are only of passes that measured, as soon as `record` is a buffer that has bytes."""
        if record.name != _BUFFER:
            return range(0)
        if not float(record.parts["size"].split()[0].replace(",", ".")):
            self._measured = record.line
            if self._first is None:
                # Without the line of its context, a pass after a model was loaded begins here.
                self._first = self._context if self._context >= self._loaded else record.line
            return range(0)
        first, self._first, self._loaded = self._first, None, record.line
        if first is None:
            return range(0)
        return range(first, self._context if self._context > self._measured else record.line)


def is_of_pass(record: Record, lines: range) -> bool:
    """Whether `record` is one of those that every pass prints, in one of these lines."""
    return record.name in _OF_A_PASS and record.line in lines
