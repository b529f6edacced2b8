"""`kvcalc plan --emit`: how to start the best layout, as a command, a compose file or a Kubernetes manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvcalc.engines import SERVERS, start_command
from kvcalc.engines.command import NODE, REPLICA, ROUTER, host_of
from kvcalc.errors import UsageError, nearest
from kvcalc.planning.manifests.compose import compose
from kvcalc.planning.manifests.kubernetes import kubernetes
from kvcalc.planning.manifests.server import Server, server_of
from kvcalc.writing import shell

# A kind of output -> the engine whose command it is.
COMMANDS = {start_command(engine).program: engine for engine in SERVERS}
FILES: dict[str, Callable[[Server], str]] = {"compose": compose, "k8s": kubernetes}
KINDS = (*COMMANDS, *FILES)


def check_kind(kind: str) -> None:
    """Raise UsageError (exit 2) if `kind` is not one of KINDS."""
    if kind not in KINDS:
        hint = nearest(kind, KINDS) or f"one of {', '.join(KINDS)}"
        raise UsageError(f"--emit {kind[:40]!a}: not something that plan can print", hint)


def check_engine(kind: str, engines: Sequence[str]) -> None:
    """Raise UsageError (exit 2) if `kind` is the command of an engine that is not among those of the plan."""
    if kind in COMMANDS and COMMANDS[kind] not in _names(engines):
        planned = " and ".join(dict.fromkeys(_names(engines)))
        raise UsageError(f"--emit {kind}: this plan is for {planned}", f"--engine {COMMANDS[kind]} --emit {kind}")


def _names(engines: Sequence[str]) -> list[str]:
    return [engine.casefold().partition("@")[0] for engine in engines]


def emit(document: Mapping[str, Any], kind: str, image: str | None = None) -> str:
    """The file that starts the best layout of a plan, as text with a newline at its end.

    `kind` is one of KINDS. A command is that of the best layout of its engine. `image` is the container image, by
    default the one that the engine's project publishes. The document must have a `best` layout.

    Raises UsageError (exit 2) if this layout cannot be started in this way.
    """
    check_kind(kind)
    check_engine(kind, document["engines"])
    best = document["best"]
    if best.get("disaggregated") is not None:
        from kvcalc.planning.manifests.pools import emit_pools

        return emit_pools(document, kind, image)
    if kind in COMMANDS:
        if image is not None:
            raise UsageError(f"--image has no effect with --emit {kind}", "--emit compose or --emit k8s")
        command = next((row for row in document["commands"] if _names([row["engine"]]) == [COMMANDS[kind]]), None)
        if command is None:
            raise UsageError(f"--emit {kind}: {kind} has no options for this layout", "--engine vllm --emit vllm")
        return shell.lines(list(_lines_of(command)))
    return FILES[kind](server_of(document, kind, image))


def _lines_of(command: Mapping[str, Any]) -> Iterator[str]:
    """The commands of a replica and of the router in front of all, each after a comment if there are several."""
    replicas = f"{host_of(REPLICA, 0)} to {host_of(REPLICA, command['replicas'] - 1)}" if command["router"] else None
    for number, text in enumerate(command["nodes"] or [command["command"]]):
        machine = host_of(NODE, number) if command["nodes"] else None
        names = [name for name in (replicas, machine) if name is not None]
        if names:
            yield shell.comment(": ".join(names))
        yield text
    if command["router"]:
        yield shell.comment(ROUTER)
        yield command["router"]
