"""What compose, Kubernetes and bash make of text, for tests that read back what kvcalc has written."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# compose-go, template/template.go.
_COMPOSE = re.compile(r"\$(?:(?P<escaped>\$)|(?P<named>[_a-zA-Z]\w*)|\{(?P<braced>[^}]*)\}|(?P<invalid>))", re.ASCII)
# The programs whose commands are printed. Each prints its name, its words, and the file that was written before.
_PROGRAMS = r"""
shown() {
    builtin printf '%s\0' "$@"
    shopt -s nullglob
    local file
    for file in *.yaml; do builtin printf '%s\0' "$(< "$file")"; rm "$file"; done
}
for program in vllm python trtllm-serve llama-server vllm-router; do
    eval "$program() { shown $program \"\$@\"; }"
done
"""


def interpolated(text: str) -> str:
    """`text` after compose has replaced its variables, all of which are unset."""

    def value(found: re.Match[str]) -> str:
        assert found["invalid"] is None, f"compose refuses {text!r}"
        return "$" if found["escaped"] else "<variable>"

    return _COMPOSE.sub(value, text)


def expanded(text: str) -> str:
    """`text` as Kubernetes expands it (third_party/forked/golang/expansion/expand.go); all variables are known."""
    found, place = "", 0
    while place < len(text):
        after = text[place + 1 : place + 2]
        end = text.find(")", place)
        if text[place] != "$" or not after:
            found, place = found + text[place], place + 1
        elif after == "$":
            found, place = found + "$", place + 2
        elif after == "(" and end > 0:
            found, place = found + "<variable>", end + 1
        else:
            found, place = found + text[place : place + 2], place + 2
    return found


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A document with `change` applied to its values that are text."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def in_container(value: Any, is_inside: bool = False) -> Any:
    """A Kubernetes document as its containers see it."""
    if isinstance(value, dict):
        return {key: in_container(item, is_inside or key in ("command", "args", "env")) for key, item in value.items()}
    if isinstance(value, list):
        return [in_container(item, is_inside) for item in value]
    return expanded(value) if is_inside and isinstance(value, str) else value


def run_in_bash(commands: Iterable[str], folder: Path) -> list[list[str]]:
    """What each command gives its program: the program, its words, and the text of the file that it wrote first."""
    script = folder / "commands.sh"
    text = _PROGRAMS + "".join(f"{command}\nbuiltin printf '\\1\\0'\n" for command in commands)
    script.write_bytes(text.encode(errors="surrogateescape"))
    subprocess.run(["bash", "-n", str(script)], check=True, capture_output=True)
    done = subprocess.run(
        ["bash", "--norc", str(script)], check=True, capture_output=True, cwd=folder, env={"PATH": "/usr/bin:/bin"}
    )
    assert not done.stderr, done.stderr[:500]
    records = done.stdout.decode(errors="surrogateescape").split("\0\1\0")
    assert records.pop() == ""
    return [record.split("\0") for record in records]
