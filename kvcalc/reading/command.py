"""A program that a pasted text starts, and the limits of such texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import process_time

from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple

# Stands before the text of an expansion whose value is not known, such as $MODEL of the user's own shell.
UNKNOWN, _SPACE = "\ue000", "\ue001"
# Bounds of a script for a server. The characters are those of its words and variables, after expansion.
MOST_COMMANDS, LONGEST_WORD, _MOST_CHARACTERS, _MOST_SECONDS = 10_000, 1 << 16, 1 << 22, 1.0
_MOST_WAYS, _DEEPEST, _STEPS = 64, 40, 100


class Command(NamedTuple):
    """A program that is started: its words, its environment, and what is around it.

    `files` are the files that the text writes first. `image` is the container's, and `is_program` is false if the
    words go to the program of the image (its ENTRYPOINT) unless they begin with one. `name` is that of the service,
    and `num_devices` the devices that the container gets, None if nothing says it. `packages` are the releases of
    Python packages that the text installs, and `unread` are files of variables that are not here. `is_known` is false
    if a value in the words comes from outside of the text.
    """

    words: list[str]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    image: str | None = None
    is_program: bool = True
    name: str | None = None
    num_devices: int | None = None
    packages: Mapping[str, str] = {}
    unread: tuple[str, ...] = ()
    is_known: bool = True
    is_closed: bool = False
    fault: str = ""


def unknown(text: str) -> str:
    """An expansion whose value is not known, as a part of a word. It is not split."""
    return UNKNOWN + "".join(_SPACE if c.isspace() else c for c in text.strip())


def shown(text: str) -> str:
    """A text without the marks of unknown values."""
    return text.replace(UNKNOWN, "").replace(_SPACE, " ")


def too_large(text: str) -> UsageError:
    """The error for a text beyond the limits."""
    return UsageError(f"the script is too large: {text}", "paste the command of the server alone")


class Budget:
    """What may still be spent on a text.

    `find` gives the place at which the wanted program begins in the words of a command, or None. Other commands are
    not kept. `entrypoint` gives the program that an image starts with all words of a container, or nothing.
    """

    def __init__(self, find: Callable[[Sequence[str]], int | None], entrypoint: Callable[[str], str]) -> None:
        self.find, self.entrypoint = find, entrypoint
        self.broken: UsageError | None = None  # the first line that is no shell, and may start a wanted program
        self.commands = self.characters = 0
        self.end = process_time() + _MOST_SECONDS

    def check_time(self, end: float | None = None) -> None:
        """Raise UsageError (exit 2) if reading the text takes too long. `end` is the limit of a part of it."""
        if process_time() > (self.end if end is None else end):
            raise too_large(f"reading takes at most {_MOST_SECONDS:g} s")

    def spend(self, characters: int, commands: int = 0) -> None:
        """Count a command or characters. Raises UsageError (exit 2) beyond the limits."""
        self.commands += commands
        self.characters += characters
        if self.commands > MOST_COMMANDS or self.characters > _MOST_CHARACTERS:
            raise too_large(f"a script has at most {MOST_COMMANDS:,} commands and {_MOST_CHARACTERS:,} characters")


class Way:
    """One way through the branches of a script whose conditions are not known: the arm taken at each of them."""

    def __init__(self, arms: list[int], budget: Budget) -> None:
        self.arms, self.budget, self.depth, self.steps = arms, budget, 0, 0
        self.taken: list[tuple[int, int]] = []

    def choose(self, number: int) -> int:
        """The arm to take, of `number` arms."""
        place = len(self.taken)
        self.taken.append((self.arms[place] if place < len(self.arms) else 0, number))
        return self.taken[-1][0]

    def enter(self) -> None:
        """Go one level deeper. Raises UsageError (exit 2) if commands are nested too deeply, or take too long."""
        self.depth += 1
        self.steps += 1
        if not self.steps % _STEPS:  # asking for the time takes longer than a step
            self.budget.check_time()
        if self.depth > _DEEPEST:
            raise UsageError(f"commands are nested more than {_DEEPEST} levels deep")


def ways_through(run: Callable[[Way], list[Command]], budget: Budget) -> list[list[Command]]:
    """The commands of every way through a script. Raises UsageError (exit 2) for too many ways."""
    ways, arms = list[list[Command]](), list[int]()
    while True:
        way = Way(arms, budget)
        try:
            ways.append(run(way))
        except RecursionError:  # an expression or an expansion, which `enter` does not count
            raise too_large("expressions are nested too deeply") from None
        while way.taken and way.taken[-1][0] + 1 == way.taken[-1][1]:
            way.taken.pop()
        if not way.taken:
            if budget.broken is not None and not any(ways):
                raise budget.broken
            return ways
        if len(ways) == _MOST_WAYS:
            raise UsageError(
                f"more than {_MOST_WAYS} ways through the branches of the script", "paste the command that is run"
            )
        arms = [arm for arm, _ in way.taken]
        arms[-1] += 1
