"""The server that a manifest starts: its container, its devices and its number of replicas."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvcalc.engines import SERVERS, command_key, start_command
from kvcalc.engines.command import LISTENING, ROUTER, with_value
from kvcalc.errors import GpuError, UsageError
from kvcalc.records import NamedTuple
from kvcalc.throughput.hardware import Gpu, find_gpu
from kvcalc.writing import shell
from kvcalc.writing.manifest import Interpolated

# How long a start may take: weights are downloaded into the volume and read from it, and kernels are compiled and
# graphs captured. Rates of an ordinary link and of a network volume.
_DOWNLOAD_RATE, _DISK_RATE, _COMPILE_SECONDS = 100e6, 500e6, 900
_BYTES_IF_UNKNOWN = 100 * 10**9

# Kubernetes adds at most 11 characters to the name of a StatefulSet, for a label that may have 63, and `-prefill` is
# added here.
_LONGEST_NAME = 44
# Where engines' images keep checkpoints of the Hub.
CACHE = "/root/.cache/huggingface"
# Where a folder is mounted whose path Kubernetes does not take.
_MOUNTED_AT = "/checkpoint"


class Server(NamedTuple):
    """`environment` and `command` start one replica on `num_devices` devices of `vendor`. A machine has at most
    `machine_devices` of them.

    A replica on several machines runs `command` on the first of its `nodes` and `worker` on the others, each on
    `num_devices`. `router` is the engine and the kind of router in front of several replicas, None if nothing says one.
    `weights_bytes` are those of a replica. It is ready when `health_path` answers. `folder` is the
    folder of a local checkpoint, which the container has at `mounted_at`. Both are None if the checkpoint is on the
    Hugging Face Hub. `comments` say what the layout is for.
    """

    name: str
    image: str
    environment: Mapping[str, str]
    command: list[str]
    health_path: str
    vendor: str
    num_devices: int
    machine_devices: int
    replicas: int
    folder: str | None
    mounted_at: str | None
    comments: list[str]
    weights_bytes: int = _BYTES_IF_UNKNOWN
    nodes: int = 1
    worker: list[str] | None = None
    router: tuple[str, str] | None = None

    @property
    def start_seconds(self) -> int:
        """The seconds until a first start must answer, in whole minutes."""
        rates = (_DISK_RATE,) if self.folder is not None else (_DISK_RATE, _DOWNLOAD_RATE)
        seconds = _COMPILE_SECONDS + sum(self.weights_bytes / rate for rate in rates)
        return -(-int(seconds) // 60) * 60

    def router_of(self, hosts: Sequence[str]) -> Server | None:
        """The router in front of the replicas on these hosts. None if nothing says one, or the engine has none."""
        if self.router is None or self.replicas == 1:
            return None
        engine, kind = self.router
        words = start_command(engine).router_words(kind, hosts)
        return None if words is None else self.as_router(words, engine)

    def as_router(self, words: Sequence[str], engine: str) -> Server:
        """The same container with a router's command, which installs it. It waits until the replicas have started."""
        package, seconds = start_command(engine).router_package, str(self.start_seconds)
        if package is not None:
            words = ["pip", "install", package, shell.AND, "exec", *words, "--worker-startup-timeout-secs", seconds]
        return self._replace(
            name=f"{self.name}-{ROUTER}", environment={}, command=["sh", "-c", shell.script(words)], num_devices=0,
            replicas=1, nodes=1, worker=None,
        )  # fmt: skip


def server_of(document: Mapping[str, Any], kind: str, image: str | None) -> Server:
    """The server of a plan's best layout. Raises UsageError (exit 2) if `kind` of manifest cannot start it."""
    best = document["best"]
    engine = best["engine"].partition("@")[0]
    command = best[command_key(engine)] if engine in SERVERS else None
    if command is None:
        raise UsageError(f"--emit {kind}: {engine} has no server that kvcalc can start", "--engine vllm")
    each, replicas = best["num_devices"] // best["replicas"], best["replicas"]
    used = f"{replicas} x {each} {best['gpu']}"
    nodes = start_command(engine).node_words(shell.split(command))
    router = None if document["router"] is None else (engine, document["router"])
    if len(nodes) == 1:
        return server_with(document, kind, image, nodes[0], each, used)._replace(replicas=replicas, router=router)
    if kind != "k8s":
        raise UsageError(f"--emit {kind}: a replica of {each} devices needs {len(nodes)} machines", "--emit k8s")
    first, second = (server_with(document, kind, image, words, each // len(nodes), used) for words in nodes[:2])
    worker, option = second.command, start_command(engine).rank_option
    if option in worker:
        worker = with_value(worker, option, Interpolated("$(LWS_WORKER_INDEX)"))
    elif len(nodes) > 2:
        raise UsageError(
            f"--emit {kind}: DP ranks on {len(nodes)} machines need a command for each",
            f"--emit {start_command(engine).program} prints them",
        )
    return first._replace(replicas=replicas, nodes=len(nodes), worker=worker, router=router)


def server_with(
    document: Mapping[str, Any], kind: str, image: str | None, words: Sequence[str], each: int, used: str
) -> Server:  # fmt: skip
    """A server of a plan's best row that the command of `words` starts on `each` devices. `used` says in a comment what
    is used.

    Raises UsageError (exit 2) if `kind` of manifest cannot start it.
    """
    best = document["best"]
    engine = best["engine"].partition("@")[0]
    gpu = _gpu_of(best["gpu"])
    vendor = None if gpu is None else gpu.vendor
    if gpu is None or vendor is None:
        raise UsageError(f"--emit {kind}: the vendor of {best['gpu']} is not known", "--emit vllm prints the command")
    if vendor not in ("NVIDIA", "AMD"):
        raise UsageError(f"--emit {kind}: containers do not see devices of {vendor}", "--emit vllm prints the command")
    if each > gpu.machine_devices:
        raise UsageError(
            f"--emit {kind}: a replica of {each} devices needs several machines, and {kind} starts it on one",
            f"--emit {start_command(engine).program} prints the commands",
        )
    start = start_command(engine)
    image = image or (start.image if vendor == "NVIDIA" else None)
    if image is None:
        raise UsageError(f"--emit {kind} needs the image of {engine} for {vendor}'s devices", "--image NAME:TAG")
    folder, mounted_at, words = _mounted(document["checkpoint"], words, kind)
    words += LISTENING
    environment = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if shell.AND in words:
        words = ["sh", "-c", shell.script(words)]
    return Server(
        _name_of(document["model"]["name"]), image, environment, words, start.health_path, vendor, each,
        gpu.machine_devices, 1, folder, mounted_at, _comments(document, used),
        best.get("weights_bytes") or _BYTES_IF_UNKNOWN,
    )  # fmt: skip


def _mounted(checkpoint: str, words: Sequence[str], kind: str) -> tuple[str | None, str | None, list[str]]:
    """The folder of a local checkpoint, where the container has it, and the words with the path there.

    Compose mounts it where it is. So does Kubernetes, if the path has no colon (VolumeMount.mountPath).
    """
    if not os.path.exists(checkpoint):
        return None, None, list(words)
    path = os.path.abspath(checkpoint)
    folder, file = (path, "") if os.path.isdir(path) else os.path.split(path)
    mounted_at = _MOUNTED_AT if kind == "k8s" and ":" in folder else folder
    inside = os.path.join(mounted_at, file) if file else mounted_at
    return folder, mounted_at, [inside if word == checkpoint else word for word in words]


def _gpu_of(name: str) -> Gpu | None:
    try:
        return find_gpu(name)
    except GpuError:  # described by options
        return None


def _name_of(model: str) -> str:
    """A name that compose and Kubernetes accept: lower case letters, digits and hyphens (RFC 1123)."""
    name = re.sub(r"[^a-z0-9]+", "-", model.casefold().rpartition("/")[2]).strip("-")
    return (name if name[:1].isalpha() else f"model-{name}")[:_LONGEST_NAME].strip("-")


def _comments(document: Mapping[str, Any], used: str) -> list[str]:
    best, targets = document["best"], document["targets"]
    if targets["users"] is not None:
        load = f"requests of {targets['users']:,} users, {targets['think_seconds']:g} s between messages,"
    elif targets["concurrency"] is not None:
        load = f"{targets['concurrency']:,} concurrent requests"
    else:
        load = f"{targets['requests_per_second']:g} requests per second"
    lengths = document["lengths"]
    text = f"{load} of {lengths['input_tokens']:,.0f} + {lengths['output_tokens']:,.0f} tokens"
    if document["router"] is not None and (best["replicas"] or 1) > 1:
        text += f", which a {document['router']} router sends to the replicas"
    return [f"{document['model']['name']} with {best['engine']} on {used}, made by kvcalc plan", f"Planned for {text}"]
