"""Commands of a shell: its builtins, its functions, and programs behind shells, containers and other programs."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from kvcalc.reading.arithmetic import Unknown, compare
from kvcalc.reading.command import UNKNOWN, Command, Way, shown
from kvcalc.reading.containers import in_container
from kvcalc.reading.manifests import commands_in_manifest
from kvcalc.reading.programs import (
    CONTAINERS,
    QUERIES,
    file_text,
    installed,
    is_shell,
    packages_in,
    prints,
    remote_text,
    script_of,
    sets_variables,
    with_environment,
    without_release,
)
from kvcalc.reading.state import State
from kvcalc.reading.words import Expander

if TYPE_CHECKING:
    from tree_sitter import Node

# The status of a command: known, that of a program that is taken to run without an error, or that of a condition that
# nobody foresees.
FAILS, SUCCEEDS, RUNS, OPEN = range(4)
# A program is one of the first words: before it are interpreters and what starts it on other machines.
_MOST_BEFORE = 12
_READERS = ("read", "mapfile", "readarray", "getopts", "let")


class Calls(Expander):
    """What the words of a command do. `around` has the container and the service in which the shell runs.

    `output` collects what commands print, with None for an unknown text; it is None if nobody reads it.
    """

    def __init__(self, state: State, way: Way, around: Command) -> None:
        super().__init__(state, way)
        self.around = around
        self.stdin: str | None = None
        self.output: list[str | None] | None = None

    @abstractmethod
    def run(self, node: Node) -> int:
        """Run a statement, and give its status."""

    @abstractmethod
    def run_text(self, text: str) -> int:
        """Run the statements of a text."""

    def captured(self, action: Callable[[], object]) -> str | None:
        """What an action prints. None if it is not known."""
        before, self.output = self.output, []
        action()
        texts, self.output = self.output, before
        return None if None in texts else "".join(text or "" for text in texts)

    def call(self, words: list[str], assigned: Mapping[str, str]) -> int:
        """Run a command with the variables that are assigned before it."""
        self.way.budget.spend(0, commands=1)
        name, state = words[0], self.state
        builtin = getattr(self, f"_run_{_METHODS.get(name, name)}", None)
        if name not in state.functions and builtin is None:
            return self._program(words, assigned)
        before, exported = {key: state.variables.get(key) for key in assigned}, state.exported
        state.variables |= assigned
        state.exported = exported | assigned.keys() if assigned else exported
        if name not in state.functions:
            status = int(builtin(words[1:])) if builtin is not None else RUNS
        else:
            outer, state.positional, scope = state.positional, words[1:], state.local
            state.local = {}
            status = self.run(state.functions[name])
            before = {**before, **(self.state.local or {})}
            self.state.positional, self.state.local = outer, scope
            self.state.stop = "" if self.state.stop == "return" else self.state.stop
        self.state.variables |= before
        self.state.exported = exported if assigned else self.state.exported
        return status

    def _run_set(self, words: list[str]) -> int:
        for place, word in enumerate(words):
            if not word.startswith(("-", "+")) or word == "--":
                self.state.positional = words[place + (word == "--") :]
                break
            if word in ("-a", "+a"):
                self.state.exports_all = word == "-a"
        return SUCCEEDS

    def _run_shift(self, words: list[str]) -> int:
        number = int(words[0]) if words and words[0].isdecimal() and len(words[0]) < 7 else 1
        self.state.positional = None if self.state.positional is None else self.state.positional[number:]
        return SUCCEEDS

    def _run_stop(self, words: list[str], word: str) -> int:
        self.state.stop = word
        return FAILS if words and words[0] != "0" else SUCCEEDS

    def _run_exit(self, words: list[str]) -> int:
        return self._run_stop(words, "exit")

    def _run_return(self, words: list[str]) -> int:
        return self._run_stop(words, "return")

    def _run_break(self, _: list[str]) -> int:
        return self._run_stop([], "break")

    def _run_continue(self, _: list[str]) -> int:
        return self._run_stop([], "continue")

    def _run_true(self, _: list[str]) -> int:
        return SUCCEEDS

    def _run_false(self, _: list[str]) -> int:
        return FAILS

    def _run_test(self, words: list[str]) -> int:
        try:
            return int(compare([word for word in words if word != "]"]))
        except Unknown:
            return OPEN

    def _run_eval(self, words: list[str]) -> int:
        return self.run_text(" ".join(words))

    def _run_exec(self, words: list[str]) -> int:
        while words and words[0].startswith("-"):
            words = words[2 if words[0] == "-a" else 1 :]
        if words:
            self.call(words, {})
            self.state.stop = "exit"
        return RUNS

    def _run_source(self, words: list[str]) -> int:
        text = file_text(words[0], self.state.files) if words else None
        return RUNS if text is None else self.run_text(text)

    def _run_read(self, words: list[str]) -> int:
        for word in words:
            name = word.partition("=")[0].rstrip("+-*/")
            if name.isidentifier():
                self.state.forget(name)
        return OPEN

    def _run_tee(self, words: list[str]) -> int:
        for path in (word for word in words if not word.startswith("-")):
            self.write(path, self.stdin, "-a" in words)
        self.print(self.stdin)
        return SUCCEEDS

    def _run_xargs(self, words: list[str]) -> int:
        while words and words[0].startswith("-"):
            words = words[1:]
        return self.call([*words, *self.stdin.split()], {}) if words and self.stdin is not None else RUNS

    def print(self, text: str | None) -> None:
        """Give a text to whoever reads the output."""
        if self.output is not None:
            self.output.append(text)

    def write(self, path: str, text: str | None, is_added: bool) -> None:
        """Write a file. One with an unknown text is not here any more."""
        files = self.state.files
        if is_added and text is not None and path in files:
            text = files[path] + text
        if text is None or (is_added and path not in files and os.path.exists(path)):
            files.pop(path, None)
        else:
            self.way.budget.spend(len(text))
            files[path] = text

    def _program(self, words: list[str], assigned: Mapping[str, str]) -> int:
        """A program that is no part of the shell."""
        name = os.path.basename(words[0])
        for package, release in installed(words).items():
            self.state.packages.pop(package, None)
            self.state.packages |= {package: release} if release else {}
        if words[:2] == ["printf", "-v"] and words[2:]:
            self.state.forget(words[2])
        text = prints(words, self.state.files, self.stdin)
        self.print(text)
        if text is not None or name in ("echo", "printf", "cat"):
            return SUCCEEDS
        if name in QUERIES and not (name == "command" and words[1:2] != ["-v"]):
            return OPEN
        environment = {**self.state.environment(), **assigned}
        self.way.budget.spend(sum(map(len, environment)))
        command = self.around._replace(
            words=words, environment=environment, files=self.state.files, is_closed=self.state.is_closed,
            packages={**self.around.packages, **self.state.packages},
        )  # fmt: skip
        return self.start(command)

    def start(self, command: Command) -> int:
        """Start a program, perhaps behind others: `env`, `srun`, a shell, a container."""
        self.way.enter()
        try:
            return self._start(command)
        finally:
            self.way.depth -= 1

    def _start(self, command: Command) -> int:
        # A script that was written before.
        if command.words and "/" in command.words[0] and file_text(command.words[0], self.state.files) is not None:
            command = command._replace(words=["bash", *command.words])
        words, place = command.words, self.way.budget.find(command.words)
        entry = self.way.budget.entrypoint(command.image) if command.image and not command.is_program else ""
        if entry and words and (place is not None or is_shell(words, 0)):
            fault = f"the image runs {entry!r}, which gets {words[0]!r} as an argument; leave the program out"
            command = command._replace(fault=fault, is_program=True)
        for before in range(min(len(words), _MOST_BEFORE) if place is None else place):
            program, rest = os.path.basename(words[before]), command._replace(words=words[before:])
            if sets_variables(words, before):
                return self.start(with_environment(rest)) if len(rest.words) > 1 else RUNS
            if is_shell(words, before):
                return self._shell(rest)
            if (manifest := self._manifest(program, words[before + 1 :])) is not None:
                for started in commands_in_manifest(manifest, self.state.files):
                    self.start(started)
                return RUNS
            action = next((word for word in words[before + 1 : before + 4] if word in ("run", "exec")), "")
            if program in CONTAINERS and action:
                after = words[words.index(action, before) + 1 :]
                return self.start(in_container(command._replace(words=after), action))
            if (text := remote_text(program, words[before:])) is not None:
                return self._shell(command._replace(words=["bash", "-c", text], environment={}))
            if program == "uvx" and words[before + 1 :] != (plain := without_release(words[before + 1 :])):
                released = packages_in([word for word in words[before + 1 :] if word not in plain])
                return self.start(command._replace(words=plain, packages={**command.packages, **released}))
        if place is None and (command.image is None or command.is_program):
            return RUNS
        texts = {name: shown(text) for name, text in command.environment.items()}
        files = {path: shown(text) for path, text in command.files.items()}
        packages = {**command.packages, **packages_in(words[:place])}
        image, is_known = command.image and shown(command.image), not any(UNKNOWN in word for word in words)
        self.state.commands.append(
            command._replace(
                words=[shown(word) for word in words], environment=texts, image=image, files=files, packages=packages,
                is_known=is_known,
            )
        )  # fmt: skip
        return RUNS

    def _manifest(self, program: str, words: list[str]) -> str | None:
        """The manifest that `docker compose up` or `kubectl apply` starts, if it was written before."""
        is_compose = program == "docker-compose" or (program in CONTAINERS and words[:1] == ["compose"])
        if not (is_compose and "up" in words) and not (program == "kubectl" and {"apply", "create"} & {*words}):
            return None
        paths = [after for word, after in pairwise(words) if word in ("-f", "--file", "--filename")]
        if paths[:1] == ["-"]:
            return self.stdin
        names = paths or ["compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml"]
        return next((text for name in names if (text := file_text(name, self.state.files)) is not None), None)

    def _shell(self, command: Command) -> int:
        """A shell of its own, which has the environment alone."""
        text, positional = script_of(command.words, self.state.files, self.stdin)
        if text is None:
            return RUNS
        state = State(command.environment, self.state.files, self.state.packages, positional, command.is_closed)
        state.commands = self.state.commands
        shell = type(self)(state, self.way, command._replace(is_program=True))
        shell.output = self.output
        shell.run_text(text)
        self.state.after_subshell(shell.state)
        return RUNS


_METHODS = {":": "true", "[": "test", ".": "source", **dict.fromkeys(_READERS, "read")}
