"""Escapes in a text that a shell quotes as $'...'."""

from __future__ import annotations

import re

_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{1,2})|([0-7]{1,3})|([abefnrtv'\"\\?]))")
_LETTERS = dict(zip(b"abefnrtv'\"\\?", b"\a\b\x1b\f\n\r\t\v'\"\\?"))


def unescaped(text: str) -> str:
    """The text that bash reads in $'...' (QUOTING in its manual), up to a NUL. Other backslashes are themselves."""

    def byte(found: re.Match[bytes]) -> bytes:
        if found[3] is not None:
            return bytes([_LETTERS[found[3][0]]])
        return bytes([int(found[1], 16) if found[1] else int(found[2], 8) & 255])

    data = _ESCAPE.sub(byte, text.encode(errors="surrogateescape"))
    return data.partition(b"\0")[0].decode(errors="surrogateescape")
