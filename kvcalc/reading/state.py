"""What a shell remembers between commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcalc.reading.command import Command, unknown

if TYPE_CHECKING:
    from tree_sitter import Node

# A value: a text, the words of an array, or None for a variable that is not set.
Value = str | list[str] | None


class State:
    """Variables, functions and files of a shell, and the commands that it has started.

    `is_closed` is whether a variable without a value here is not set (`env -i`). Otherwise the user's own environment
    may have it. `positional` are $1, $2, ..., None if they are not known. `stop` is the word that ended the commands:
    exit, return, break or continue.
    """

    def __init__(
        self, environment: Mapping[str, str], files: Mapping[str, str], packages: Mapping[str, str],
        positional: list[str] | None = None, is_closed: bool = False,
    ) -> None:  # fmt: skip
        self.variables: dict[str, Value] = dict(environment)
        self.exported = set(environment)
        self.files, self.packages = dict(files), dict(packages)
        self.functions: dict[str, Node] = {}
        self.positional, self.is_closed = positional, is_closed
        self.commands: list[Command] = []
        self.stop = ""
        # The values that the local variables of a function hide, None outside of functions.
        self.local: dict[str, Value] | None = None
        self.exports_all, self.read_only = False, set[str]()

    def copy(self) -> State:
        """The state of a subshell."""
        state = State({}, self.files, self.packages, self.positional, self.is_closed)
        state.variables, state.exported = dict(self.variables), set(self.exported)
        state.functions, state.commands = dict(self.functions), list(self.commands)
        state.exports_all, state.local = self.exports_all, None if self.local is None else dict(self.local)
        state.read_only = set(self.read_only)
        return state

    def same(self, other: State) -> bool:
        """Whether what follows is the same as after `other`."""
        names = ("variables", "exported", "files", "packages", "positional", "commands", "stop")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def after_subshell(self, inner: State) -> None:
        """Keep what a subshell leaves behind: files and what it started."""
        self.files, self.packages, self.commands = inner.files, inner.packages, inner.commands

    def environment(self) -> dict[str, str]:
        """The exported variables."""
        return {name: text for name in sorted(self.exported) if isinstance(text := self.variables.get(name), str)}

    def assign(self, name: str, value: Value, is_exported: bool = False) -> None:
        """Set a variable, or remove it with None."""
        if name in self.read_only:
            return
        self.variables[name] = value
        if is_exported or (self.exports_all and value is not None):
            self.exported.add(name)

    def forget(self, name: str) -> None:
        """Note that the value of a variable is not known any more."""
        self.variables[name] = unknown(f"${name}")

    def value(self, name: str) -> Value:
        """The value of a variable or of a positional parameter. Raises KeyError if it is not known."""
        if name in ("@", "*") or name.isdecimal():
            if self.positional is None or not name.strip("0") or len(name) > 6:
                raise KeyError(name)
            place = int(name) - 1 if name.isdecimal() else 0
            if name in ("@", "*"):
                return self.positional
            return self.positional[place] if place < len(self.positional) else None
        if name == "#" and self.positional is not None:
            return str(len(self.positional))
        if name not in self.variables and not (self.is_closed and name.isidentifier()):
            raise KeyError(name)
        value = self.variables.get(name)
        if isinstance(value, str) and value == unknown(f"${name}"):
            raise KeyError(name)
        return value
