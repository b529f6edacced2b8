"""A Deployment and a Service for Kubernetes, or a LeaderWorkerSet for replicas on several machines.

Fields: https://kubernetes.io/docs/reference/kubernetes-api (Deployment apps/v1, Service v1, PersistentVolumeClaim v1),
and https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1 (v0.7), which sets LWS_LEADER_ADDRESS and
LWS_WORKER_INDEX in every container. The device plugins of NVIDIA and AMD name the resources
(https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus). RDMA plugins have no common name for theirs.
"""

from __future__ import annotations

from typing import Any

from kvcalc.engines.command import NODE, PORT, host_of
from kvcalc.errors import UsageError
from kvcalc.planning.manifests.server import CACHE, Server
from kvcalc.question.fields import AT_RANDOM
from kvcalc.writing.manifest import Interpolated, kubernetes_file

_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu"}
_PERIOD_SECONDS = 10
SEVERAL_KINDS = "Add a nodeSelector if the cluster has several kinds of devices"
_CLAIM = "models"
_RDMA = "rdma/hca"
RDMA_COMMENT = f"{_RDMA} is the resource of the cluster's RDMA device plugin, which may have another name"
# The claim has room for files that are not loaded, such as a second format. Each device's processes share memory.
_CLAIM_ROOM, _SHARED_BYTES = 1.25, 2 * 2**30


def kubernetes(server: Server) -> str:
    """The manifest. Kubernetes places the replicas on machines, and the Service spreads the requests over them."""
    is_large = server.nodes > 1
    comments = [*server.comments, SEVERAL_KINDS, *([RDMA_COMMENT] if is_large else [])]
    documents, router = claims(server), _router(server)
    if is_large:
        documents.append(leader_worker_set(server))
    elif router is None:
        documents.append(deployment(server))
    else:
        documents += [stateful_set(server), headless(server)]
    documents += [service(server)] if router is None else [deployment(router), service(router)]
    return kubernetes_file(comments, documents)


def _router(server: Server) -> Server | None:
    """The router of several replicas. None if a Service is enough.

    Raises UsageError (exit 2) if the engine has no router of this kind.
    """
    if server.router is None or server.replicas == 1 or server.router[1] == AT_RANDOM:
        return None
    engine, kind = server.router
    router = server.router_of([f"{server.name}-{number}.{server.name}" for number in range(server.replicas)])
    if router is None:
        text = f"--emit k8s: a Service chooses a replica at random, and {engine} has no {kind} router"
        raise UsageError(text, "--router random")
    return router


def claims(server: Server) -> list[dict[str, Any]]:
    """The claim of a volume that keeps the checkpoint for all pods, unless it is a folder of the machine."""
    if server.folder is not None:
        return []
    size = -(-int(server.weights_bytes * _CLAIM_ROOM) // 2**30)
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": f"{size}Gi"}}}
    return [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": _CLAIM}, "spec": spec}]


def with_rdma(container: dict[str, Any]) -> dict[str, Any]:
    """The container with a network adapter and the right to pin memory, which RDMA needs."""
    container["resources"]["limits"][_RDMA] = 1
    return {**container, "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}


def leader_worker_set(server: Server) -> dict[str, Any]:
    """Groups of pods, one pod for each machine of a replica. The leader answers requests."""
    known = host_of(NODE, 0)

    def addressed(words: list[str]) -> list[str]:
        return [Interpolated(word.replace(known, "$(LWS_LEADER_ADDRESS)")) if known in word else word for word in words]

    def template(words: list[str], *, is_leader: bool) -> dict[str, Any]:
        container = with_rdma(_container(server._replace(command=addressed(words))))
        if not is_leader:
            container = {
                key: value for key, value in container.items() if key not in ("ports", "startupProbe", "readinessProbe")
            }
        labels = {"app": server.name, "role": "leader" if is_leader else "worker"}
        spec = {"containers": [container], "volumes": [volume for volume, _ in _volumes(server)]}
        return {"metadata": {"labels": labels}, "spec": spec}

    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": server.name},
        "spec": {
            "replicas": server.replicas,
            "leaderWorkerTemplate": {
                "size": server.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": template(server.command, is_leader=True),
                "workerTemplate": template(server.worker or [], is_leader=False),
            },
        },
    }


def deployment(server: Server) -> dict[str, Any]:
    """A Deployment of all replicas of a server."""
    labels = {"app": server.name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": server.name, "labels": labels},
        "spec": {
            "replicas": server.replicas,
            "progressDeadlineSeconds": server.start_seconds,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [_container(server)], "volumes": [volume for volume, _ in _volumes(server)]},
            },
        },
    }


def stateful_set(server: Server) -> dict[str, Any]:
    """The replicas as a StatefulSet, whose pods have names that a router can know: NAME-0.NAME, NAME-1.NAME."""
    manifest = deployment(server)
    spec = {key: value for key, value in manifest["spec"].items() if key != "progressDeadlineSeconds"}
    own_spec = {"serviceName": server.name, "podManagementPolicy": "Parallel", **spec}
    return {**manifest, "kind": "StatefulSet", "spec": own_spec}


def headless(server: Server) -> dict[str, Any]:
    """The Service that gives the pods of a StatefulSet their names."""
    manifest = service(server)
    return {**manifest, "spec": {"clusterIP": "None", **manifest["spec"]}}


def _container(server: Server) -> dict[str, Any]:
    probe = {"httpGet": {"path": server.health_path, "port": PORT}, "periodSeconds": _PERIOD_SECONDS}
    return {
        "name": "server",
        "image": server.image,
        "command": server.command[:1],
        "args": server.command[1:],
        "env": _environment(server),
        "ports": [{"containerPort": PORT}],
        **({"resources": {"limits": {_RESOURCES[server.vendor]: server.num_devices}}} if server.num_devices else {}),
        "startupProbe": {**probe, "failureThreshold": server.start_seconds // _PERIOD_SECONDS},
        "readinessProbe": probe,
        "volumeMounts": [mount for _, mount in _volumes(server)],
    }


def _environment(server: Server) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in server.environment.items()]
    if server.folder is None:
        key = {"name": "hf-token", "key": "token", "optional": True}
        variables.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    return variables


def _volumes(server: Server) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The volumes, each with where it is mounted. Tensor parallelism exchanges data in shared memory."""
    shared = {"medium": "Memory", "sizeLimit": f"{max(server.num_devices, 1) * _SHARED_BYTES // 2**30}Gi"}
    volumes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"name": "shm", "emptyDir": shared}, {"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    ]
    if server.folder is not None:
        volume = {"name": "checkpoint", "hostPath": {"path": server.folder, "type": "Directory"}}
        volumes.append((volume, {"name": "checkpoint", "mountPath": server.mounted_at, "readOnly": True}))
    else:
        claim = {"name": _CLAIM, "persistentVolumeClaim": {"claimName": _CLAIM}}
        volumes.append((claim, {"name": _CLAIM, "mountPath": CACHE}))
    return volumes


def service(server: Server) -> dict[str, Any]:
    """The Service that spreads requests over the replicas of a server.

    LeaderWorkerSet makes a headless Service with its own name for the names of its pods, unless there is one
    (CreateHeadlessServiceIfNotExists, pkg/utils/controller).
    """
    is_large = server.nodes > 1
    labels = {"app": server.name, **({"role": "leader"} if is_large else {})}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{server.name}-leader" if is_large else server.name},
        "spec": {"selector": labels, "ports": [{"port": PORT, "targetPort": PORT}]},
    }
