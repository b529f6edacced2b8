"""The passes in which llama.cpp measures a model before it loads it.

Each of them prints the context, and buffers of 0.00 MiB, and may have another context and other layers on the devices.
The model that is loaded prints the same lines again (`fitting params to device memory`, common/common.cpp).
"""

from __future__ import annotations

_BUFFER, _CONTEXT = "buffer", "context_tokens"
_OF_A_PASS = frozenset((_BUFFER, "cache", "creating", "self", "state_buffer", "states"))


class Passes:
    """Follows the buffers of a log, and says which facts and records are only of a pass that measures."""

    def __init__(self) -> None:
        # Line numbers: of the last buffer with bytes, of the last one without, and of the last context.
        self._loaded = self._measured = self._context = 0
        # The context of the first pass that measured since a model was loaded.
        self._first: int | None = None

    def replaces(self, name: str, said: int, line: int) -> bool:
        """Whether the fact `name` in this line replaces the one of line `said`, which is of a pass that measured."""
        if name == _CONTEXT:
            self._context = line
        return self._loaded < said < self._measured < line

    def measured(self, name: str, size: str, line: int) -> range:
        """The lines that are only of passes that measured, as soon as this line is a buffer that has bytes."""
        if name != _BUFFER:
            return range(0)
        if not float(size.split()[0].replace(",", ".")):
            self._measured = line
            if self._first is None:
                # Without the line of its context, a pass after a model was loaded begins here.
                self._first = self._context if self._context >= self._loaded else line
            return range(0)
        first, self._first, self._loaded = self._first, None, line
        if first is None:
            return range(0)
        return range(first, self._context if self._context > self._measured else line)


def is_of_pass(name: str) -> bool:
    """Whether every pass prints the lines with this name."""
    return name in _OF_A_PASS
