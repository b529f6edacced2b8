"""Pasted text as a script for bash: fences and prompts removed, PowerShell and cmd translated."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n`]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
# Prompts of shells: `$ `, `(venv) user@host:~/x$ `, `root@4f2a:/# `, `PS C:\x> `, `C:\x>`.
_PROMPT = re.compile(
    r"^[ \t]*(?:(?:\([\w.-]{1,40}\)[ \t]*)?(?:[\w.-]{1,40}@[\w.-]{1,60}[^\n$#%]{0,60}[$#%]|[$%>\u276f\u279c])[ \t]+"
    r"|(?:PS )?[A-Za-z]:\\[^>\n]{0,100}>[ \t]*)",
    re.MULTILINE,
)
_POWERSHELL = re.compile(r"[ \t]`[ \t]*\r?$|\$env:\w+|^\s*\$\w+ = |^\s*& ", re.MULTILINE | re.IGNORECASE)
_CMD = re.compile(r"[ \t]\^[ \t]*\r?$|^\s*set \"?\w+=|%\w+%|^@echo off", re.MULTILINE | re.IGNORECASE)
_WINDOWS = re.compile(r"^\s*\.\\\w|(?<!\S)\"?[A-Za-z]:\\\w", re.MULTILINE)

_TOKENS = {
    "powershell": re.compile(
        r"""(?P<comment>(?<!\S)\#[^\n]*)|`[ \t]*\r?\n(?P<continued>)|'(?P<single>[^']*)'|(?P<call>(?m:^)[ \t]*&[ ])
        |(?m:^)[ \t]*\$env:(?P<exported>\w+)[ \t]*=[ \t]*|(?m:^)[ \t]*\$(?P<assigned>\w+)[ \t]*=[ \t]*
        |\$env:(?P<variable>\w+)|`(?P<escaped>.)|(?<!\S)@(?P<splatted>[A-Za-z]\w*)|(?P<list>@\()|(?P<comma>,)
        |(?P<path>(?<![\w.\\])(?:[A-Za-z]:|\.{1,2})(?:\\[\w.()-]+)+)|(?P<backslash>\\)|(?P<quote>")""",
        re.VERBOSE | re.IGNORECASE,
    ),
    "cmd": re.compile(
        r"""(?m:^)[ \t]*(?P<comment>(?:rem|::)[^\n]*)|\^[ \t]*\r?\n(?P<continued>)|\^(?P<escaped>.)
        |(?m:^)[ \t]*set[ ](?P<set>[^\n]*)|%(?P<variable>\w+)%
        |(?P<path>(?<![\w.\\])(?:[A-Za-z]:|\.{1,2})(?:\\[\w.()-]+)+)|(?P<backslash>[\\'`$])|(?P<call>(?m:^)@)|(?P<quote>")""",
        re.VERBOSE | re.IGNORECASE,
    ),
}  # fmt: skip


def blocks_of(text: str) -> list[str]:
    """The blocks of code in a page, or the whole text if it has no fences."""
    return [match[2] for match in _FENCE.finditer(text)] or [text]


def as_shell(text: str) -> str:
    """A script for bash. What was written for PowerShell or cmd is translated."""
    text = _PROMPT.sub("", text.replace("\r\n", "\n"))
    if _POWERSHELL.search(text):
        return _translated(text, "powershell")
    if _CMD.search(text):
        return _translated(text, "cmd")
    return _translated(text, "powershell") if _WINDOWS.search(text) else text


def without_apostrophes(text: str) -> str:
    """A text without the apostrophes of English words, which a shell takes for quotes around the commands between."""
    return re.sub(r"(?<=[A-Za-z])'(?=(?:s|t|re|ve|ll|d|m)\b)", "", text)


def _translated(text: str, language: str) -> str:
    is_quoted, in_list = False, False

    def bash(match: re.Match[str]) -> str:
        nonlocal is_quoted, in_list
        kind, value = match.lastgroup or "", match[match.lastgroup or 0]
        if kind == "quote":
            is_quoted = not is_quoted
        if kind == "list":
            in_list = True
        if kind == "comma" and in_list and not is_quoted:
            return " "
        if kind == "set":
            name, _, text = value.strip().strip('"').partition("=")
            return f"export {name.strip()}='{text.strip()}'"
        if is_quoted and kind in ("comment", "single", "call", "splatted", "comma"):
            return match[0]
        return {
            "comment": "", "continued": " ", "call": "", "single": "'" + value.replace('\\"', '"') + "'",
            "exported": f"export {value}=", "assigned": f"{value}=", "variable": f"${{{value}}}",
            "escaped": f"\\{value}", "splatted": f'"${{{value}[@]}}"', "list": "(", "backslash": f"\\{value}",
            "path": value.replace("\\", "/"),
        }.get(kind, match[0])  # fmt: skip

    return _TOKENS[language].sub(bash, text)
