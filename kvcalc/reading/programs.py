"""Programs that change what a later word means: they print, install, set variables or start another program."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from kvcalc.reading.command import UNKNOWN, Command
from kvcalc.writing.escapes import unescaped

SHELLS, CONTAINERS = ("bash", "sh", "zsh", "dash"), ("docker", "podman", "nerdctl")
# Programs that show or search for the words after them, and whose status nobody foresees.
QUERIES = {
    "grep", "which", "type", "hash", "pgrep", "pkill", "kill", "killall", "man", "alias", "test", "[", "diff",
    "command", "nvidia-smi", "curl", "wget", "nc", "ls",
}  # fmt: skip
_RUNS_TEXT = re.compile(r"-[a-zA-Z]*c")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PACKAGE = re.compile(r"(?:--?[a-z-]+=)?([A-Za-z][\w.-]*?)(?:\[[^]]*\])?(?:==?|@)v?(\d[\w.+-]*)")
_BARE = re.compile(r"([A-Za-z][\w.-]*)(?:\[[^]]*\])?(?:[<>~!].*)?")
_INSTALLERS = ("pip", "pip3", "uv", "conda", "mamba", "pipx")
_LONGEST_SEQUENCE = 1000
# Options of these programs that take a value.
_ENV_VALUES, _SUDO_VALUES = ("-u", "--unset", "-C", "--chdir"), ("-u", "-g", "-C", "-D", "-h", "-p", "-r", "-t", "-T")
_SSH_VALUES = tuple(f"-{letter}" for letter in "BbcDEeFIiJLlmOopQRSWw")
_SHELL_VALUES = ("-o", "+o", "-O", "+O", "--rcfile", "--init-file")


def is_shell(words: Sequence[str], place: int) -> bool:
    """Whether a shell that runs a text or a file begins at a place. Behind other programs it needs -c."""
    is_named = os.path.basename(words[place]) in SHELLS
    return is_named and (place == 0 or any(_RUNS_TEXT.fullmatch(word) for word in words[place : place + 3]))


def script_of(words: Sequence[str], files: Mapping[str, str], stdin: str | None) -> tuple[str | None, list[str]]:
    """The text that a shell runs, None if it is not here, and $1, $2, ..."""
    takes_text, place = False, 1
    while place < len(words) and words[place][:1] in ("-", "+") and words[place] != "--":
        takes_text |= _RUNS_TEXT.fullmatch(words[place]) is not None
        place += 2 if words[place] in _SHELL_VALUES else 1
    rest = [*words[place + (words[place : place + 1] == ["--"]) :]]
    if not rest:
        return (None if takes_text else stdin), []
    return (rest[0], rest[2:]) if takes_text else (file_text(rest[0], files), rest[1:])


def file_text(path: str, files: Mapping[str, str]) -> str | None:
    """The text of a file that the script wrote earlier, whatever its folder."""
    return files.get(path, files.get(os.path.basename(path)))


def with_environment(command: Command) -> Command:
    """The command behind `env`, `sudo` or assignments, with the variables that they set and remove."""
    words, environment = list(command.words), dict(command.environment)
    program, is_closed = "", command.is_closed
    if _ASSIGNMENT.fullmatch(words[0]) is None:
        program = os.path.basename(words.pop(0))
    removes = program == "sudo"
    values = _SUDO_VALUES if program == "sudo" else _ENV_VALUES
    variables: dict[str, str] = {}
    while words:
        word = words.pop(0)
        assigned = _ASSIGNMENT.fullmatch(word)
        if assigned is not None:
            variables[assigned[1]] = assigned[2]
            continue
        if not word.startswith("-"):
            words.insert(0, word)
            break
        option, equals, text = word.partition("=")
        if program == "env" and word.startswith("-u") and len(word) > 2:
            option, equals, text = "-u", "=", word[2:]
        if option in values and not equals:
            text = words.pop(0) if words else ""
        if program == "env" and option in ("-u", "--unset"):
            environment.pop(text, None)
        elif program == "env" and option in ("-i", "-", "--ignore-environment"):
            environment, is_closed = {}, True
        elif option in ("-E", "--preserve-env"):
            removes = False
    # sudo gives the program few of the caller's variables (env_reset in sudoers).
    environment = {**({} if removes else environment), **variables}
    return command._replace(words=words, environment=environment, is_closed=is_closed)


def sets_variables(words: Sequence[str], place: int) -> bool:
    """Whether a command with variables of its own begins at a place. Assignments are the first words."""
    is_assignment = place == 0 and _ASSIGNMENT.fullmatch(words[0]) is not None
    return is_assignment or os.path.basename(words[place]) in ("env", "sudo")


def remote_text(program: str, words: Sequence[str]) -> str | None:
    """The text that ssh, tmux, screen or su gives to a shell of its own. None without one."""
    if program in ("tmux", "screen", "su"):
        return words[-1] if " " in words[-1] else None
    if program != "ssh":
        return None
    place = 1
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] in _SSH_VALUES else 1
    return " ".join(words[place + 1 :]) or None


def packages_in(words: Sequence[str]) -> dict[str, str]:
    """The releases of packages in words such as vllm==0.9.1 or vllm[audio]@0.9.1."""
    matches = (_PACKAGE.fullmatch(word) for word in words if UNKNOWN not in word)
    return {_normalized(match[1]): match[2] for match in matches if match is not None}


def installed(words: Sequence[str]) -> dict[str, str | None]:
    """The packages that a command installs, with their releases: None for one that it does not name."""
    places = [place for place, word in enumerate(words[:6]) if word == "install"]
    if not places or not any(os.path.basename(word) in _INSTALLERS for word in words[: places[0]]):
        return {}
    rest = words[places[0] + 1 :]
    bare = (match for word in rest if (match := _BARE.fullmatch(word)) is not None)
    return {**{_normalized(match[1]): None for match in bare}, **packages_in(rest)}


def _normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).casefold()


def without_release(words: Sequence[str]) -> list[str]:
    """The words behind `uvx`, whose program may have a release: vllm@0.9.1."""
    return [re.sub(r"^([A-Za-z][\w-]*)@\d[\w.]*$", r"\1", word) for word in words]


def prints(words: Sequence[str], files: Mapping[str, str], stdin: str | None) -> str | None:
    """What a program prints. None if that is not known."""
    program, arguments = words[0], list(words[1:])
    if program == "echo":
        end, is_escaped = "\n", False
        while arguments and re.fullmatch("-[neE]+", arguments[0]):
            option = arguments.pop(0)
            end, is_escaped = ("" if "n" in option else end), "e" in option
        text = " ".join(arguments)
        return (unescaped(text) if is_escaped else text) + end
    if program == "printf" and arguments:
        return _formatted(*arguments)
    if program == "cat":
        paths = [word for word in arguments if not word.startswith("-") or word == "-"]
        texts = [file_text(path, files) if path != "-" else stdin for path in paths] if paths else [stdin]
        return None if None in texts else "".join(text or "" for text in texts)
    if program == "seq" and arguments and all(re.fullmatch(r"-?\d{1,6}", word) for word in arguments):
        ends = [int(word) for word in arguments]
        first, step, last = (1, 1, *ends) if len(ends) == 1 else (ends[0], ends[1] if ends[2:] else 1, ends[-1])
        numbers = range(first, last + (1 if step > 0 else -1), step or 1)
        return "".join(f"{number}\n" for number in numbers[:_LONGEST_SEQUENCE])
    if program in ("basename", "dirname") and len(arguments) == 1:
        return str(getattr(os.path, program)(arguments[0].rstrip("/"))) + "\n"
    return None


def _formatted(form: str, *arguments: str) -> str | None:
    """The output of printf, for formats of %s and %d. They are used again for further arguments."""
    parts = re.split(r"(%%|%[sd]|%.?)", form)
    if any(part.startswith("%") and part not in ("%s", "%d", "%%") for part in parts):
        return None
    number = sum(part in ("%s", "%d") for part in parts)
    rest, text = list(arguments), ""
    while True:
        for part in parts:
            if part in ("%s", "%d"):
                text += rest.pop(0) if rest else ""
            else:
                text += "%" if part == "%%" else unescaped(part)
        if not rest or not number:
            return text
