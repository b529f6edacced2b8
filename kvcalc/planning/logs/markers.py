"""Find the lines of a block that have a marker, at a cost that hardly depends on the text.

Python searches for one text quickly, and for many texts slowly. So the markers are superimposed. Four bytes of each
marker, its window, belong to one of four groups. For each byte, a table says at which places of a group's windows it
occurs, one bit per place. A block is translated with the table and read as one large integer. Shifts and ands of this
integer find the places where every byte fits (Shift-And with classes of characters; Navarro and Raffinot, Flexible
Pattern Matching in Strings, chapter 4). The few places found are looked up in a dictionary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

# Bytes of a window. A table has two groups, with a bit for each byte of a window.
_WIDTH, _NUM_TABLES = 4, 2

# Bytes that are searched at once, so that the integers stay in the processor's cache.
_PART = 64 * 1024
_FIRST_BITS = int.from_bytes(b"\x11" * (_PART + _WIDTH - 1), "little")
_LOWEST_BITS = int.from_bytes(b"\x01" * (_PART + _WIDTH - 1), "little")

# Bytes by how often they occur in logs, the most frequent first; all others are rarer. Windows of rare bytes seldom
# fit.
_FREQUENT = b" etaoinsrhldcu0123456789.mpfg:/,wyb-vk\"'()[]xjqzTIOEANRSPGCDLFMHUBW"
_SHARES = [0.1 * 0.95 ** (_FREQUENT.find(byte) if byte in _FREQUENT else len(_FREQUENT)) for byte in range(256)]


class Markers:
    """Finds the lines with one of `markers`."""

    def __init__(self, markers: Iterable[bytes]) -> None:
        # A marker that has others in it is found with the first of them.
        self._longer: dict[bytes, list[bytes]] = {}
        for marker in sorted(set(markers), key=lambda marker: (len(marker), marker)):
            least = next((other for other in self._longer if other in marker), marker)
            self._longer.setdefault(least, []).append(marker)
        self._size = min([_WIDTH, *map(len, self._longer)])
        self._by_start: dict[bytes, list[tuple[bytes, int]]] = {}
        tables = [bytearray(256) for _ in range(_NUM_TABLES)]
        for marker, offset, group in _windows(self._longer):
            window = marker[offset : offset + _WIDTH]
            self._by_start.setdefault(window[: self._size], []).append((marker, offset))
            for place in range(_WIDTH):
                bit = 1 << (place + _WIDTH * (group % 2))
                # After the end of a marker, every byte fits.
                for byte in window[place : place + 1] or range(256):
                    tables[group // 2][byte] |= bit
        self._tables = [bytes(table) for table in tables]

    def lines(self, block: bytes, end: int = 0) -> Iterator[tuple[int, int]]:
        """The start and the end of each line of the block that has a marker, from the place `end` on."""
        by_start, size = self._by_start, self._size
        for start in range(end, len(block), _PART):
            if end >= start + _PART:
                continue
            # A window may reach into the next part.
            marks = self._marks(block[start : start + _PART + _WIDTH - 1])
            at = marks.find(1, max(end - start, 0))
            while at >= 0:
                place = start + at
                if block[place : place + size] in by_start and self._at(block, place):
                    end = block.find(b"\n", place)
                    end = len(block) if end < 0 else end
                    yield block.rfind(b"\n", 0, place) + 1, end
                    at = end - start - 1
                at = marks.find(1, at + 1)

    def found_in(self, line: bytes) -> set[bytes]:
        """The markers in a line of at most 64 KiB."""
        marks, found = self._marks(line), set()
        at = marks.find(1)
        while at >= 0:
            found.update(self._at(line, at))
            at = marks.find(1, at + 1)
        return {marker for least in found for marker in self._longer[least] if marker in line}

    def _at(self, block: bytes, place: int) -> list[bytes]:
        """The markers with a window at this place, without those that have another marker in them."""
        return [
            marker for marker, offset in self._by_start.get(block[place : place + self._size], ())
            if place >= offset and block.startswith(marker, place - offset)
        ]  # fmt: skip

    def _marks(self, part: bytes) -> bytes:
        """For each byte of the part, 1 if a window may begin there, else 0. Empty if no window does."""
        found = 0
        # A marker shorter than a window may be at the end. No marker has a newline.
        padded = part + b"\n" * (_WIDTH - 1)
        for table in self._tables:
            bits = int.from_bytes(padded.translate(table), "little")
            # One bit further in the next byte, and then two bits further in the byte after the next.
            bits &= bits >> 9
            bits &= bits >> 18
            found |= bits & _FIRST_BITS
        return ((found | found >> 4) & _LOWEST_BITS).to_bytes(len(part), "little") if found else b""


def _windows(markers: Iterable[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """Each marker, the place in it where its window begins, and its group, so that few other places fit.

    Short markers have few windows, so they should come first.
    """
    classes: list[list[set[int]]] = [[set() for _ in range(_WIDTH)] for _ in range(2 * _NUM_TABLES)]
    shares = [[0.0] * _WIDTH for _ in classes]
    for marker in markers:
        choices = []
        for offset in range(max(len(marker) - _WIDTH, 0) + 1):
            window = marker[offset : offset + _WIDTH]
            for group, (old, has) in enumerate(zip(shares, classes)):
                new = [share + _SHARES[byte] * (byte not in fit) for share, fit, byte in zip(old, has, window)]
                new += [1.0] * (_WIDTH - len(window))
                choices.append((prod(new) - prod(old), offset, group, new))
        _, offset, group, shares[group] = min(choices)
        for fit, byte in zip(classes[group], marker[offset:]):
            fit.add(byte)
        yield marker, offset, group
