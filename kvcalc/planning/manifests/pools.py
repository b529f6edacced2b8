"""`kvcalc plan --emit` for prefill and decode on separate instances: the instances of both kinds and their router."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvcalc.engines import start_command
from kvcalc.engines.command import DECODE, PORT, PREFILL, ROLES, ROUTER, host_of
from kvcalc.errors import UsageError
from kvcalc.planning.manifests.compose import service_of
from kvcalc.planning.manifests.kubernetes import (
    RDMA_COMMENT,
    SEVERAL_KINDS,
    claims,
    deployment,
    headless,
    service,
    stateful_set,
    with_rdma,
)
from kvcalc.planning.manifests.server import Server, server_with
from kvcalc.writing import shell
from kvcalc.writing.manifest import compose_file, kubernetes_file

# The label by which Kubernetes finds the machines of each kind, if there are two.
_LABEL = "gpu"


def emit_pools(document: Mapping[str, Any], kind: str, image: str | None) -> str:
    """What starts the pools of a plan's best row. Raises UsageError (exit 2) if it cannot be started in this way."""
    best = document["best"]
    if kind not in ("compose", "k8s"):
        if image is not None:
            raise UsageError(f"--image has no effect with --emit {kind}", "--emit compose or --emit k8s")
        engine = best["engine"].partition("@")[0]
        program = start_command(engine).program
        if kind != program:
            raise UsageError(f"--emit {kind}: the instances were planned for {engine}", f"--emit {program}")
        return _commands(best)
    servers = {role: _server(document, kind, image, role) for role in ROLES}
    return _compose(best, servers) if kind == "compose" else _kubernetes(best, servers)


def _is_mixed(best: Mapping[str, Any]) -> bool:
    """Whether the pools are on different kinds of device."""
    pools = best["disaggregated"]
    return bool(pools[PREFILL]["gpu"] != pools[DECODE]["gpu"])


def _commands(best: Mapping[str, Any]) -> str:
    pools, lines = best["disaggregated"], []
    for role in ROLES:
        number = 1 if role == ROUTER else pools[role]["instances"]
        hosts = host_of(role, 0) if number == 1 else f"{host_of(role, 0)} to {host_of(role, number - 1)}"
        on = f" on {pools[role]['gpu']}" if role != ROUTER and _is_mixed(best) else ""
        lines += [shell.comment(role if role == ROUTER else f"{role}: {hosts}{on}"), pools["commands"][role]]
    return shell.lines(lines)


def _server(document: Mapping[str, Any], kind: str, image: str | None, role: str) -> Server:
    """One instance of a role, or the router, which has no devices."""
    best = document["best"]
    pools = best["disaggregated"]
    used, mixed = f"{pools[PREFILL]['num_devices']} + {pools[DECODE]['num_devices']} {best['gpu']}", _is_mixed(best)
    if mixed:
        used = " + ".join(
            f"{pools[role_name]['num_devices']} {pools[role_name]['gpu']}" for role_name in (PREFILL, DECODE)
        )
        # Both kinds are from one vendor.
        document = {**document, "best": {**best, "gpu": pools[PREFILL]["gpu"]}}
    used += ", prefill and decode"
    words = shell.split(pools["commands"][role])
    if role == ROUTER:
        return server_with(document, kind, image, words, 0, used).as_router(words, best["engine"])
    pool = pools[role]
    server = server_with(document, kind, image, words, pool["num_devices"] // pool["instances"], used)
    return server._replace(name=f"{server.name}-{role}", replicas=pool["instances"])


def _compose(best: Mapping[str, Any], servers: Mapping[str, Server]) -> str:
    """A compose file for one machine, whose services have the names that the router's command has."""
    most = servers[PREFILL].machine_devices
    if best["num_devices"] > most:
        raise UsageError(
            f"--emit compose: the pools have {best['num_devices']} devices, and a machine has {most}", "--emit k8s"
        )
    if _is_mixed(best):
        raise UsageError("--emit compose: a compose file is for one machine, with one kind of device", "--emit k8s")
    services, first, variable = {}, 0, start_command(best["engine"]).address_variable
    for role in (PREFILL, DECODE):
        server = servers[role]
        for number in range(server.replicas):
            name = host_of(role, number)
            environment = {key: name if key == variable else value for key, value in server.environment.items()}
            services[name] = service_of(server._replace(environment=environment), first, None)
            first += server.num_devices
    services[ROUTER] = {**service_of(servers[ROUTER], 0, PORT), "depends_on": list(services)}
    document: dict[str, Any] = {"services": services}
    if servers[ROUTER].folder is None:
        document["volumes"] = {"huggingface": {}}
    return compose_file(servers[ROUTER].comments, document)


def _kubernetes(best: Mapping[str, Any], servers: Mapping[str, Server]) -> str:
    """StatefulSets, whose pods have names that the router can know, with their Services, and the router."""
    documents, variable = claims(servers[PREFILL]), start_command(best["engine"]).address_variable
    for role in (PREFILL, DECODE):
        server = servers[role]
        manifest = stateful_set(server)
        pod = manifest["spec"]["template"]["spec"]
        pod["containers"] = [with_rdma(container) for container in pod["containers"]]
        if _is_mixed(best):
            pod["nodeSelector"] = {_LABEL: best["disaggregated"][role]["gpu"]}
        for entry in pod["containers"][0]["env"]:
            if entry["name"] == variable:
                del entry["value"]
                entry["valueFrom"] = {"fieldRef": {"fieldPath": "status.podIP"}}
        documents += [manifest, headless(server)]
    router = servers[ROUTER]
    text = router.command[-1]
    for role in (PREFILL, DECODE):
        name = servers[role].name
        text = re.sub(rf"\b{role}-(\d+):", rf"{name}-\1.{name}:", text)
    router = router._replace(command=[*router.command[:-1], text])
    hints = [SEVERAL_KINDS, RDMA_COMMENT]
    if _is_mixed(best):
        kinds = ", or ".join(f"{_LABEL}={best['disaggregated'][role]['gpu']}" for role in (PREFILL, DECODE))
        hints = [f"Label the machines by their devices: kubectl label nodes NAME {kinds}", RDMA_COMMENT]
    return kubernetes_file([*router.comments, *hints], [*documents, deployment(router), service(router)])
