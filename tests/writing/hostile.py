"""Names that files may have and that mean something to a shell, YAML, HTML, a spreadsheet or a terminal."""

from __future__ import annotations

import os
import random

# What a name may have in any language: each is a name of its own, and a part of longer ones.
PIECES = (
    "\n", "\r", "\r\n", "\t", "\v", "\f", "\b", "\x07", "\x1b]0;title\x07", "\x1b[31m", "\x1c", "\x7f",
    "\x85", "\x9b2J", "\xa0", "\xad", "\u200b", "\u200f", "\u2028", "\u2029", "\u202e", "\u2066",
    "\ufeff", "\ue000", "\U000e0001", "\udcff", "\udc80\udcfe", "\udced\udca0\udc80", "é", "e\u0301",
    "模型", "عربي", "😀", "👩\u200d💻", "'", '"', "''", '"\'"', "`", "`id`", "‘’“”", "\\", "\\n", "\\x41",  # noqa: RUF001
    "\\'", "$'", "$\"", "$", "$$", "$$$", "$X", "$HOME", "$(X)", "$$(X)", "$$$(X)", "$(", "$é", "${X}",
    "${HF_TOKEN}", "${", "$((1))", "$(id)", "!", "!!", "!x", "^x^y", ":", ": ", "a: b", ":ro", "#", " #",
    "# ", "---", "--- ", "...", "- ", "-", "--", "--trust-remote-code", "{}", "{0}", "{a: b}", "[", "]",
    "[a]", ",", "?", "? ", "%", "%s", "%TAG", "%PATH%", "@", "@SUM(1)", "*", "*a", "&", "&a", "&&", "|",
    "||", "|-", ">", ">-", ">>", "<", "<<", ";", "~", "=", "=cmd|' /C calc'!A0", "+1+1", "＝1",  # noqa: RUF001
    "!!python/object:os", "!<tag>", "\nkind: Pod\n---\n#", "\n---\nkind: Pod\n", "\n  - x",
    "<script>alert(1)</script>", "</style>", "]]>", "<!--", "-->", "<?x", "&lt;", "&#27;", "onload=x",
    "javascript:x", "null", "~", "yes", "no", "y", "N", "true", "1e3", "0o17", "0x1f", "1_000", "1:30",
    "2026-01-31", ".inf", ".nan", "-1", "+1", ".5", " ", "  ", ".", "a" * 120, "x " * 60, "vllm",
    "serve", "1", "4", "A=b", "sh", "huggingface",
)  # fmt: skip
_LONGEST = 255


def is_name(text: str) -> bool:
    """Whether a file can have this name."""
    return 0 < len(os.fsencode(text)) <= _LONGEST and text not in (".", "..") and not {"/", "\0"} & set(text)


def hostile_names(number: int, seed: int) -> list[str]:
    """Different names: first every piece alone, at the start and at the end of a name, then combinations of pieces."""
    rng = random.Random(seed)
    found = dict.fromkeys(name for piece in PIECES for name in (piece, f"m{piece}", f"{piece}m") if is_name(name))
    while len(found) < number:
        name = "".join(rng.choice(PIECES) for _ in range(rng.randint(2, 6)))
        if is_name(name):
            found[name] = None
    return rng.sample([*found], number)
