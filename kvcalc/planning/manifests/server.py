"""The server that a manifest starts: its container, its devices and its number of replicas."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

from kvcalc.errors import GpuError, UsageError
from kvcalc.records import NamedTuple
from kvcalc.throughput.hardware import find_gpu

PORT = 8000
# What the engines' servers answer when they are ready (vLLM, SGLang, trtllm-serve and llama-server alike).
HEALTH = "/health"
# Weights are downloaded and kernels are compiled at the first start.
START_SECONDS = 3600

# The images that the projects publish, for the releases whose options kvcalc prints. AMD's images have a tag for every
# kind of device and version of ROCm, so they must be named.
_IMAGES = {
    "vllm": "vllm/vllm-openai:v0.33.0",
    "sglang": "lmsysorg/sglang:v0.5.23",
}
# A machine has at most this many devices in the servers that are sold today (HGX, MI300X platforms).
_DEVICES_PER_MACHINE = 8
_LONGEST_NAME = 50


class Server(NamedTuple):
    """`environment` and `command` start one replica on `num_devices` devices of `vendor`.

    `folder` is the folder of a local checkpoint, or None if the checkpoint is on the Hugging Face Hub. `comments` say
    what the layout is for.
    """

    name: str
    image: str
    environment: Mapping[str, str]
    command: list[str]
    vendor: str
    num_devices: int
    replicas: int
    folder: str | None
    comments: list[str]


def server_of(document: Mapping[str, Any], kind: str, image: str | None) -> Server:
    """The server of a plan's best layout. Raises UsageError (exit 2) if `kind` of manifest cannot start it."""
    best = document["best"]
    engine = best["engine"].partition("@")[0]
    command = best.get(engine.replace("-", "_").replace(".", "_"))
    if command is None:
        raise UsageError(f"--emit {kind}: {engine} has no server that kvcalc can start", "--engine vllm")
    used = f"{best['replicas']} x {best['num_devices'] // best['replicas']} {best['gpu']}"
    found = server_with(document, kind, image, command, best["num_devices"] // best["replicas"], used)
    return found._replace(replicas=best["replicas"])


def server_with(
    document: Mapping[str, Any], kind: str, image: str | None, command: str, each: int, used: str
) -> Server:  # fmt: skip
    """A server of a plan's best row that `command` starts on `each` devices. `used` says in a comment what is used.

    Raises UsageError (exit 2) if `kind` of manifest cannot start it.
    """
    best = document["best"]
    engine = best["engine"].partition("@")[0]
    vendor = _vendor_of(best["gpu"])
    if vendor is None:
        raise UsageError(f"--emit {kind}: the vendor of {best['gpu']} is not known", "--emit vllm prints the command")
    if vendor not in ("NVIDIA", "AMD"):
        raise UsageError(f"--emit {kind}: containers do not see devices of {vendor}", "--emit vllm prints the command")
    if each > _DEVICES_PER_MACHINE:
        raise UsageError(
            f"--emit {kind}: a replica of {each} devices needs several machines, and {kind} starts it on one",
            f"use fewer than {_DEVICES_PER_MACHINE + 1} devices per replica, for example with --kv-dtype fp8",
        )
    image = image or (_IMAGES.get(engine) if vendor == "NVIDIA" else None)
    if image is None:
        raise UsageError(f"--emit {kind} needs the image of {engine} for {vendor}'s devices", "--image NAME:TAG")
    environment, words = _split(command)
    checkpoint = document["checkpoint"]
    folder = None
    if os.path.exists(checkpoint):
        path = os.path.abspath(checkpoint)
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        words = [path if word == checkpoint else word for word in words]
    ports = ["--host", "0.0.0.0", "--port", str(PORT)]  # noqa: S104 - inside the container
    if words[0] == "sh":
        words[-1] += f" {shlex.join(ports)}"
    else:
        words += ports
    return Server(
        _name_of(document["model"]["name"]), image, environment, words, vendor, each, 1, folder,
        _comments(document, used),
    )  # fmt: skip


def _vendor_of(gpu: str) -> str | None:
    try:
        return find_gpu(gpu).vendor
    except GpuError:  # described by options
        return None


def _split(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables before a command, and its words."""
    words = shlex.split(command)
    if "&&" in words:
        return {}, ["sh", "-c", command]
    environment = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    return environment, words


def _name_of(model: str) -> str:
    """A name that compose and Kubernetes accept: lower case letters, digits and hyphens (RFC 1123)."""
    name = re.sub(r"[^a-z0-9]+", "-", model.casefold().rpartition("/")[2]).strip("-")[:_LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"model-{name}".strip("-")


def _comments(document: Mapping[str, Any], used: str) -> list[str]:
    best, targets = document["best"], document["targets"]
    load = f"{targets['concurrency']:,} concurrent requests" if targets["concurrency"] is not None else None
    load = load or f"{targets['requests_per_second']:g} requests per second"
    lengths = document["lengths"]
    asked = f"{load} of {lengths['input_tokens']:,.0f} + {lengths['output_tokens']:,.0f} tokens"
    return [f"{document['model']['name']} with {best['engine']} on {used}, made by kvcalc plan", f"Planned for {asked}"]
