"""Find the commands that start servers: in words, in a script, in a compose file and in a manifest."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvcalc.engines.reading import Read, Reader, readers
from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple
from kvcalc.releases import parse_release, stable_of
from kvcalc.writing.manifest import read_documents, resolved
from kvcalc.writing.script import parse_script
from kvcalc.writing.shell import words_of

# The version at the beginning of a tag: v0.5.9-cu129, 1.3.0rc5. NVIDIA's 25.09-py3 is a date.
_RELEASE = re.compile(r"v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?)(?:[-+_](?!py3).*)?")
# The options of `docker run` that are not read have a value or not; these are the ones without (docker run --help).
_DOCKER_FLAGS = {
    "-d", "-i", "-t", "-it", "-ti", "-dit", "-itd", "-P", "--detach", "--init", "--interactive", "--no-healthcheck",
    "--oom-kill-disable", "--privileged", "--publish-all", "--quiet", "-q", "--read-only", "--rm", "--sig-proxy",
    "--tty",
}  # fmt: skip
_RUNNERS, _SHELLS = ("docker", "podman", "nerdctl"), ("bash", "sh", "zsh")
_RUNS_TEXT = re.compile(r"-[a-z]*c")
# A program is one of the first words: before it are variables, interpreters and what starts it on other machines.
_MOST_BEFORE = 12
# srun's devices in all or of a node, and its nodes (srun --help): --gpus=2, -G2, --gres gpu:h100:4, -N 2.
_OF_SRUN = re.compile(r"(?<!\S)(--gpus(?:-per-node)?|-G|--gres)[= ]?(?:gpu:)?(?:[a-z]\w*:)?(\d+)(?!\S)")
_NODES = re.compile(r"(?<!\S)(?:-N|--nodes)[= ]?(\d+)(?!\S)")
# Keys of a resource's limits that count devices (device plugins of NVIDIA and AMD).
_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
# Variables that leave a process some of the devices (drivers and container runtimes of NVIDIA and AMD).
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Server(NamedTuple):
    """A command that starts a server: the words after its program.

    `environment` are its variables, `files` what was written before, `release` that of the engine if an image says it,
    and `num_devices` the devices that its container or its variables leave it, None if they do not say it. `name` is
    that of the service, None for a command.
    """

    reader: Reader
    words: list[str]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    name: str | None = None
    release: str | None = None
    num_devices: int | None = None

    @property
    def is_worker(self) -> bool:
        """Whether it is a machine of a replica that another command starts."""
        return "--headless" in self.words or any(
            word == "--node-rank" and rank != "0" for word, rank in pairwise(self.words)
        )

    def read(self) -> Read:
        """What the command says. Raises UsageError (exit 2)."""
        return self.reader.read(self.words, self.environment, self.files, self.release)


def servers_in(text: str) -> list[Server]:
    """The servers that a script, a compose file or a manifest starts."""
    documents = read_documents(text)
    found = [server for document in documents for server in _in_document(document)]
    found = found or servers_of_script(text)
    return [server for server in found if not server.is_worker] or found


def choose_server(text: str, service: str | None) -> Server:
    """The server in a text, by the name of its service if there are several. Raises UsageError (exit 2)."""
    found = servers_in(text)
    names = [server.name or server.reader.engine for server in found]
    if service is not None and found and service not in names:
        raise UsageError(f"service {service[:40]!a}: not found", f"one of {', '.join(names)}")
    chosen = [server for server, name in zip(found, names) if service in (None, name)]
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


def servers_of_script(text: str) -> list[Server]:
    """The servers that the commands of a script start."""
    script = parse_script(text)
    found = (server_of(one.words, one.variables, script.files) for one in script.statements)
    return [server for servers in found for server in servers]


def server_of(
    words: Sequence[str], environment: Mapping[str, str], files: Mapping[str, str], image: str | None = None, *,
    is_program: bool = False,
) -> list[Server]:  # fmt: skip
    """The server that the words start, with what is around them: an interpreter, a shell or a container.

    They are options of the image's own program, unless they begin with a program of theirs (`is_program`).
    """
    words = list(words)
    begin, program = _runner(words)
    if program in _SHELLS:
        inside = next((word for word in words[begin:] if " " in word), "")
        script = parse_script(inside)
        return [
            server
            for one in script.statements
            for server in server_of(
                one.words, {**environment, **one.variables}, {**files, **script.files}, image, is_program=True
            )
        ]
    if program in _RUNNERS:
        return _in_container(words[words.index("run") + 1 :], environment, files)
    for reader in readers():
        place = program_end(reader, words)
        if place is not None:
            number = _visible_devices(environment)
            server = Server(reader, words[place:], environment, files, None, _release(reader.engine, image), number)
            return [_in_devices(server, _launched_devices(words[:place]))]
    if image is not None and not is_program:
        for reader in readers():
            if any(name in image for name in reader.words.images):
                number = _visible_devices(environment)
                return [Server(reader, words, environment, files, None, _release(reader.engine, image), number)]
    return []


def _runner(words: Sequence[str]) -> tuple[int, str]:
    """The place and the name of the program that runs another one: a container, or a shell, also behind `srun`."""
    for place, word in enumerate(words[:_MOST_BEFORE]):
        program, after = os.path.basename(word), words[place : place + 3]
        if program in _RUNNERS and "run" in after:
            return place, program
        if program in _SHELLS and (place == 0 or any(_RUNS_TEXT.fullmatch(one) for one in after)):
            return place, program
    return 0, ""


def program_end(reader: Reader, words: Sequence[str]) -> int | None:
    """The place after the words that begin an engine's command, or None if it is not one of the first."""
    for begin in range(min(len(words), _MOST_BEFORE)):
        for program in reader.programs:
            here = [os.path.basename(words[begin]), *words[begin + 1 : begin + len(program)]]
            end = begin + len(program)
            if tuple(here) == program and words[end : end + 1] not in [[word] for word in reader.words.others.split()]:
                return end
    return None


def _launched_devices(words: Sequence[str]) -> int | None:
    """The devices of a machine that a launcher gives its processes: mpirun one for each, and srun what it is told."""
    programs, text = {os.path.basename(word) for word in words}, " ".join(words)
    if programs & {"mpirun", "mpiexec"}:
        return next((_number(number) for word, number in pairwise(words) if word in ("-n", "-np")), None)
    devices = _OF_SRUN.search(text) if "srun" in programs else None
    if devices is None:
        return None
    nodes = _NODES.search(text)
    is_total = devices[1] in ("--gpus", "-G") and nodes is not None
    return (_number(devices[2]) or 0) // (_number(nodes[1]) or 1 if nodes is not None and is_total else 1)


def _number(value: Any) -> int | None:
    """A number of devices in a text or in YAML, or None."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 7 and int(text) else None


def _visible_devices(environment: Mapping[str, str]) -> int | None:
    """The devices that variables of the drivers leave to a process. None if none of them says it."""
    texts = [environment[name].strip() for name in _VISIBLE if name in environment]
    return min((_listed(text) for text in texts if text != "all" and "$" not in text), default=None)


def _listed(text: str) -> int:
    """The devices in a list of numbers or names, which ends before -1 (CUDA_VISIBLE_DEVICES in NVIDIA's manual)."""
    names = [name.strip() for name in text.split(",")]
    return next((place for place, name in enumerate(names) if name in ("", "-1", "void", "none")), len(names))


def _within(value: Any, *keys: str) -> Any:
    """The value below the keys of nested mappings, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _release(engine: str, image: str | None) -> str | None:
    """The release in the tag of an image: vllm/vllm-openai:v0.11.0. None if it is the newest stable one, or unknown."""
    tag = "" if image is None else image.partition("@")[0].rpartition("/")[2].partition(":")[2].casefold()
    version = _RELEASE.fullmatch(tag)
    try:
        requested = parse_release(engine, version[1] if version is not None else tag)
    except UsageError:
        return None
    if requested.release is None:  # a tag such as nightly-dev or glm5-hopper
        return "nightly" if stable_of(engine) and requested.text not in ("latest", "stable") else None
    return requested.text


def _in_container(words: list[str], environment: Mapping[str, str], files: Mapping[str, str]) -> list[Server]:
    """The server that `docker run` starts, after its own options."""
    own, entry, number = dict[str, str](), [], None
    while words and words[0].startswith("-"):
        option, equals, value = words.pop(0).partition("=")
        if option in _DOCKER_FLAGS:
            continue
        if not equals:
            if not words:
                raise UsageError(f"docker run: {option} has no value")
            value = words.pop(0)
        if option in ("-e", "--env"):
            name, equals, text = value.partition("=")
            if equals or name in environment:
                own[name] = text if equals else environment[name]
        elif option == "--entrypoint":
            entry = [value]
        elif option == "--gpus":
            _, named, devices = value.strip("\"'").partition("device=")
            number = _listed(devices) if named else _number(value)
    if not words:
        raise UsageError("docker run: the command names no image")
    return [_in_devices(server, number) for server in server_of([*entry, *words[1:]], own, files, words[0])]


def _in_devices(server: Server, number: int | None) -> Server:
    """The server in a container that gets `number` devices. Variables may leave it fewer of them."""
    numbers = [one for one in (number, server.num_devices) if one is not None]
    return server._replace(num_devices=min(numbers, default=None))


def _in_document(document: Mapping[str, Any]) -> Iterator[Server]:
    """The servers of a compose file's services, or of the containers in a manifest."""
    services = document.get("services")
    if isinstance(services, dict):
        for name, service in services.items():
            if isinstance(service, dict):
                yield from _of_container(
                    str(name), service, "entrypoint", "command", "environment", _in_compose(service)
                )
        return
    title = document.get("metadata")
    name = title.get("name") if isinstance(title, dict) else None
    for container in _containers(document):
        limits = _within(container, "resources", "limits")
        counts = [limits[key] for key in _RESOURCES if key in limits] if isinstance(limits, dict) else []
        number = _number(counts[0]) if counts else None
        given = name or container.get("name")
        service = None if given is None else str(given)
        yield from _of_container(service, container, "command", "args", "env", number)


def _of_container(
    name: str | None, container: Mapping[str, Any], entry: str, command: str, variables: str, number: int | None
) -> list[Server]:
    environment = _variables(container.get(variables))
    words = [*_list(container.get(entry)), *_list(container.get(command))]
    image = str(container["image"]) if container.get("image") else None
    return [
        _in_devices(server, number)._replace(name=name)
        for server in server_of([resolved(word, environment) for word in words], environment, {}, image)
    ]


def _list(value: Any) -> list[str]:
    if isinstance(value, str):
        words = words_of(value.replace("\\\n", " "))
        if words is None:
            raise UsageError(f"{value[:40]!a}: an unclosed quote")
        return words
    return [str(word) for word in value] if isinstance(value, list) else []


def _variables(given: Any) -> dict[str, str]:
    if isinstance(given, dict):
        return {str(name): str(value) for name, value in given.items() if value is not None}
    rows = given if isinstance(given, list) else []
    named = {str(row["name"]): str(row.get("value", "")) for row in rows if isinstance(row, dict) and "name" in row}
    pairs = dict(row.split("=", 1) for row in rows if isinstance(row, str) and "=" in row)
    return {**named, **pairs}


def _in_compose(service: Mapping[str, Any]) -> int | None:
    """The devices that a service reserves (deploy.md of the compose specification)."""
    rows = _within(service, "deploy", "resources", "reservations", "devices")
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict):
            if isinstance(row.get("device_ids"), list) and row["device_ids"]:
                return len(row["device_ids"])
            if type(row.get("count")) is int:
                return _number(row["count"])  # -1 stands for all
    return None


def _containers(document: Any) -> Iterator[Mapping[str, Any]]:
    """Every container in a manifest, wherever its kind of resource has the pod."""
    nodes = deque([document])
    while nodes:
        node = nodes.popleft()
        if isinstance(node, dict):
            containers = node.get("containers")
            if isinstance(containers, list):
                yield from (container for container in containers if isinstance(container, dict))
            nodes += [value for key, value in node.items() if key != "containers"]
        elif isinstance(node, list):
            nodes += node
