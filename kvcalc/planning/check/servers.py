"""The servers that a text starts: in a script, a compose file, a manifest, a Dockerfile or a unit of systemd."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from kvcalc.engines.reading import Read, Reader, readers
from kvcalc.errors import KvcalcError, LayoutError, UsageError
from kvcalc.reading.command import Budget, Command
from kvcalc.reading.manifests import commands_in_manifest
from kvcalc.reading.pasted import blocks_of
from kvcalc.reading.service_files import commands_in_files
from kvcalc.reading.shell import run_command, run_script
from kvcalc.records import NamedTuple
from kvcalc.releases import Release, parse_release, stable_of

# The version at the beginning of a tag: v0.5.9-cu129, 1.3.0rc5. NVIDIA's 25.09-py3 is a date.
_RELEASE = re.compile(r"v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?)(?:[-+_](?!py3).*)?")
# The build of llama.cpp in server-cuda-b6097.
_BUILD = re.compile(r"(?:^|[-_])(b\d{1,6})(?:[-_]|$)")
# srun's devices in all or of a node, and its nodes (srun --help): --gpus=2, -G2, --gres gpu:h100:4, -N 2.
_OF_SRUN = re.compile(r"(?<!\S)(--gpus(?:-per-node)?|-G|--gres)[= ]?(?:gpu:)?(?:[a-z]\w*:)?(\d+)(?!\S)")
_NODES = re.compile(r"(?<!\S)(?:-N|--nodes)[= ]?(\d+)(?!\S)")
# A program is one of the first words: before it are variables, interpreters and what starts it on other machines.
_MOST_BEFORE = 12
# Programs that run models with settings of their own, and the words with which they do.
_OTHERS = {"ollama": ("run", "serve"), "lms": ("load", "server")}
_NVIDIA, _COUNT, _QUOTES = "nvcr.io/nvidia/", re.compile(r"[1-9]\d{0,5}"), "\u201c\u201d\u201e\u2018\u2019\u00a0"
# Variables that leave a process some of the devices (drivers and container runtimes of NVIDIA and AMD).
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Server(NamedTuple):
    """A command that starts a server: the words after its program.

    `environment` are its variables, `files` what was written before, `release` that of the engine if an image or a
    package says it, and `num_devices` the devices that its container or its variables leave it, None if they do not say
    it. `name` is that of the service, None for a command. `fault` is why it does not start, whatever its options are,
    and `unread` where more variables come from. `in_image` is whether it runs in an image of the engine's project.
    """

    reader: Reader
    words: list[str]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    name: str | None = None
    release: str | None = None
    num_devices: int | None = None
    fault: str = ""
    unread: tuple[str, ...] = ()
    in_image: bool = False

    @property
    def is_worker(self) -> bool:
        """Whether it is a machine of a replica that another command starts."""
        return "--headless" in self.words or any(
            word == "--node-rank" and rank != "0" for word, rank in pairwise(self.words)
        )

    def read(self) -> Read:
        """What the command says. Raises UsageError (exit 2), and LayoutError (exit 2) for a `fault`."""
        if self.fault:
            raise LayoutError(f"{self.reader.programs[0][0]} does not start: {self.fault}")
        read = self.reader.read(self.words, self.environment, self.files, self.release)
        read.unknown += self.unread
        if self.in_image:
            self.reader.installed(read)
        return read


def servers_in(text: str) -> list[Server]:
    """The servers that a script, a compose file, a manifest, a Dockerfile or a unit of systemd starts.

    Raises UsageError (exit 2) if branches of a script start different servers, or for a text that cannot be read.
    """
    budget, servers, scripts = Budget(_program_begin, _entrypoint), list[Server](), list[str]()
    for block in blocks_of(text):
        commands = commands_in_manifest(block, {}) or commands_in_files(block, {})
        for command in commands:
            servers += _same_on_every_way(run_command(command, budget))
        scripts += [] if commands else [block]
    servers = servers or _same_on_every_way(run_script("\n".join(scripts), budget))
    return [server for server in servers if not server.is_worker] or servers


def servers_of_words(words: Sequence[str]) -> list[Server]:
    """The servers that the words of a command start."""
    budget = Budget(_program_begin, _entrypoint)
    return _same_on_every_way(run_command(Command(list(words), {}, {}), budget))


def choose_server(text: str, service: str | None) -> Server:
    """The server in a text, by the name of its service if there are several. Raises UsageError (exit 2)."""
    servers = servers_in(text)
    names = [server.name or server.reader.engine for server in servers]
    if service is not None and servers and service not in names:
        raise UsageError(f"service {service[:40]!a}: not found", f"one of {', '.join(names)}")
    chosen = [server for server, name in zip(servers, names) if service in (None, name)]
    if not chosen:
        raise no_server()
    if len(chosen) > 1:
        raise UsageError(f"{len(chosen)} servers: {', '.join(names)}", "name one: service=...")
    return chosen[0]


def of_release(server: Server, release: str | None) -> Server:
    """The same server in another release of its engine (None: its own)."""
    return server if release is None else server._replace(release=release)


def no_server() -> UsageError:
    """The error for a text without a command that is read."""
    return UsageError(
        "not a server command that kvcalc reads",
        "vllm serve, python -m sglang.launch_server, trtllm-serve, llama-server or mlx_lm.server",
    )


def _same_on_every_way(ways: list[list[Command]]) -> list[Server]:
    """The servers of a script. UsageError (exit 2) if they depend on what is outside of the script."""
    started = [way for way in ways if way]
    # A value that comes from outside, where another way has one of its own, is a default of the script.
    started = [way for way in started if all(command.is_known for command in way)] or started
    servers: list[Server] = []
    for way in started:
        other = [server for command in way for server in _server_of(command)]
        if other and servers and other != servers and [*map(_meaning, servers)] != [*map(_meaning, other)]:
            texts = _difference(servers, other)
            raise UsageError(
                f"the branches of the script start different servers: {texts[0]}, or {texts[1]}",
                "paste the command that runs, without the branch",
            )
        servers = servers or other
    if not servers:
        _refuse_others(ways)
    return servers


def _meaning(server: Server) -> Any:
    """What a server's words and variables mean. Those without an effect may differ."""
    try:
        return server.release, server.num_devices, {**vars(server.read()), "ignored": None}
    except KvcalcError as error:
        return error.message


def _difference(first: list[Server], other: list[Server]) -> list[str]:
    """The texts in which servers differ: their words, or else their variables."""
    sides = [[word for server in servers for word in server.words] for servers in (first, other)]
    if sides[0] == sides[1]:
        sides = [
            [f"{name}={text}" for server in servers for name, text in server.environment.items()]
            for servers in (first, other)
        ]
    shorter = min(map(len, sides))
    same = next((n for n in range(shorter) if sides[0][n] != sides[1][n]), shorter)
    after = next((n for n in range(shorter - same) if sides[0][-1 - n] != sides[1][-1 - n]), shorter - same)
    return [" ".join(side[max(0, same - 1) : len(side) - after])[:80] or "none of it" for side in sides]


def _refuse_others(ways: list[list[Command]]) -> None:
    """Raise UsageError (exit 2) if a text starts a server whose options are not read."""
    for words in (command.words for way in ways for command in way):
        place = next((place for place, word in enumerate(words) if _base(word) in _OTHERS), None)
        if place is not None:
            hint = "for the same files, ask about llama-server: kvcalc check llama-server -hf REPOSITORY -c TOKENS"
            name = _base(words[place])
            raise UsageError(f"{' '.join(words[place:])[:60]}: the settings of {name}'s server are not read", hint)


def _server_of(command: Command) -> list[Server]:
    """The server that a command starts, or none. Its words are options if they begin with no program."""
    words, image = command.words, command.image
    for reader in readers():
        place = program_end(reader, words)
        if place is None and (image is None or command.is_program or not _is_image(reader.words.images, image)):
            continue
        if place is None and image is not None and not _is_image(reader.words.entrypoints, image):
            program = " ".join(reader.programs[0])
            program = program if "." not in program else f"python3 -m {program}"
            text = f"{image[:60]} starts no server by itself, so its options are no command"
            raise UsageError(text, f"put {program} before the options")
        numbers = (command.num_devices, _launched_devices(words[: place or 0]), _visible_devices(command.environment))
        release = _stated(reader, command.packages) or _release(reader, image)
        fault = command.fault or next(filter(None, map(_mistyped, words[place or 0 :])), "")
        return [
            Server(
                reader, words[place or 0 :], command.environment, command.files, command.name, release,
                min((number for number in numbers if number is not None), default=None), fault, command.unread,
                image is not None and _is_image(reader.words.images, image),
            )
        ]  # fmt: skip
    return []


def _mistyped(word: str) -> str:
    """Why a program does not take a word as it was meant. Empty if nothing is wrong with it."""
    if word and not word.strip(" \t"):
        return "a backslash with a space behind it is an argument, and continues no line"
    wrong = word[:1] if unicodedata.category(word[:1] or "a") == "Pd" and word[0] != "-" else ""
    wrong = wrong or next((c for c in word if c in _QUOTES), "")
    if not wrong:
        return ""
    return f"{word[:40]} has {unicodedata.name(wrong).lower()} (U+{ord(wrong):04X}), which a word processor writes"


def _base(word: str) -> str:
    """The name of a program, which may be a path of any system."""
    return word[max(word.rfind("/"), word.rfind("\\")) + 1 :]


@cache
def _first_words() -> frozenset[str]:
    return frozenset(program[0] for reader in readers() for program in reader.programs) | _OTHERS.keys()


def _program_begin(words: Sequence[str]) -> int | None:
    """The place at which the program of a server begins, or None if it is not one of the first words."""
    names = [_base(word) for word in words[:_MOST_BEFORE]]
    if _first_words().isdisjoint(names):
        return None
    begins = (place[0] for reader in readers() if (place := _place_of(reader, words)) is not None)
    others = (n for n, name in enumerate(names) if name in _OTHERS and [*words[n + 1 : n + 2]] != []
              and words[n + 1] in _OTHERS[name])  # fmt: skip
    return next(begins, next(others, None))


def _place_of(reader: Reader, words: Sequence[str]) -> tuple[int, int] | None:
    """The places at which an engine's program begins and ends, or None if it is not one of the first words."""
    for begin in range(min(len(words), _MOST_BEFORE)):
        for program in reader.programs:
            end = begin + len(program)
            is_here = _base(words[begin]) == program[0] and tuple(words[begin + 1 : end]) == program[1:]
            if is_here and not {*words[end : end + 1]} & {*reader.words.others.split()}:
                return begin, end
    return None


def program_end(reader: Reader, words: Sequence[str]) -> int | None:
    """The place after the words that begin an engine's command, or None if it is not one of the first."""
    place = _place_of(reader, words)
    return None if place is None else place[1]


def _is_image(names: Sequence[str], image: str) -> bool:
    """Whether an image has one of the names, in any registry."""
    path = image.partition("@")[0]
    path = path[: path.rfind(":")] if ":" in path.rpartition("/")[2] else path
    return any(f"/{path}".endswith(f"/{name}") for name in names)


def _entrypoint(image: str) -> str:
    """The program that an image starts with the words of its container, or nothing."""
    return next(
        (" ".join(reader.programs[0]) for reader in readers() if _is_image(reader.words.entrypoints, image)), ""
    )


def _stated(reader: Reader, packages: Mapping[str, str]) -> str | None:
    """The release that was installed before. None if nothing says it."""
    version = packages.get(reader.words.package or reader.engine)
    try:
        return None if version is None else parse_release(reader.engine, version).text
    except UsageError:
        return None


def _launched_devices(words: Sequence[str]) -> int | None:
    """The devices that a launcher leaves its processes: one each under mpirun, or those of srun's options."""
    programs, text = {_base(word) for word in words}, " ".join(words)
    if programs & {"mpirun", "mpiexec"}:
        after = pairwise(words)
        return next((int(count) for word, count in after if word in ("-n", "-np") and _COUNT.fullmatch(count)), None)
    devices = _OF_SRUN.search(text) if "srun" in programs else None
    if devices is None or not _COUNT.fullmatch(devices[2]):
        return None
    nodes = _NODES.search(text)
    is_total = devices[1] in ("--gpus", "-G") and nodes is not None and _COUNT.fullmatch(nodes[1])
    return int(devices[2]) // int(nodes[1]) if nodes is not None and is_total else int(devices[2])


def _visible_devices(environment: Mapping[str, str]) -> int | None:
    """The devices that variables of the drivers leave to a process. None if none of them says it."""
    texts = [environment[name].strip() for name in _VISIBLE if name in environment]
    return min((_listed(text) for text in texts if text != "all" and "$" not in text), default=None)


def _listed(text: str) -> int:
    """The devices in a list of numbers or names, which ends before -1 (CUDA_VISIBLE_DEVICES in NVIDIA's manual)."""
    names = [name.strip() for name in text.split(",")]
    return next((place for place, name in enumerate(names) if name in ("", "-1", "void", "none")), len(names))


def _release(reader: Reader, image: str | None) -> str | None:
    """The release in the tag of an engine's own image: vllm/vllm-openai:v0.11.0. NVIDIA's tags may be dates.

    None if it is the newest stable one, or not known.
    """
    engine = reader.engine
    if image is None or not (_is_image(reader.words.images, image) or image.startswith(_NVIDIA)):
        return None
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2].casefold()
    version = _RELEASE.fullmatch(tag)
    try:
        requested = parse_release(engine, version[1] if version is not None else tag)
    except UsageError:
        return None
    if requested.release is None:  # a tag such as nightly-dev or glm5-hopper
        return "nightly" if stable_of(engine) and requested.text not in ("latest", "stable") else None
    build = _BUILD.search(tag)
    return build[1] if build is not None and requested.release == Release.of(int(build[1][1:])) else requested.text
