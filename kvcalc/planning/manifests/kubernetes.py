"""A Deployment and a Service for Kubernetes.

Fields: https://kubernetes.io/docs/reference/kubernetes-api (Deployment apps/v1, Service v1). The device plugins of
NVIDIA and AMD name the resources (https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus).
"""

from __future__ import annotations

from typing import Any

from kvcalc.engines.command import PORT
from kvcalc.planning.manifests.server import START_SECONDS, Server
from kvcalc.writing.manifest import kubernetes_file

_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu"}
_PERIOD_SECONDS = 10
SEVERAL_KINDS = "Add a nodeSelector if the cluster has several kinds of devices"


def kubernetes(server: Server) -> str:
    """The manifest. Kubernetes places the replicas on machines, and the Service spreads the requests over them."""
    return kubernetes_file([*server.comments, SEVERAL_KINDS], [deployment(server), service(server)])


def deployment(server: Server) -> dict[str, Any]:
    """A Deployment of all replicas of a server."""
    labels = {"app": server.name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": server.name, "labels": labels},
        "spec": {
            "replicas": server.replicas,
            "progressDeadlineSeconds": START_SECONDS,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [_container(server)], "volumes": [volume for volume, _ in _volumes(server)]},
            },
        },
    }


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
        "startupProbe": {**probe, "failureThreshold": START_SECONDS // _PERIOD_SECONDS},
        "readinessProbe": probe,
        "volumeMounts": [mount for _, mount in _volumes(server)],
    }


def _environment(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in server.environment.items()]
    if server.folder is None:
        key = {"name": "hf-token", "key": "token", "optional": True}
        found.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    return found


def _volumes(server: Server) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The volumes, each with where it is mounted. Tensor parallelism exchanges data in shared memory."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    ]
    if server.folder is not None:
        volume = {"name": "checkpoint", "hostPath": {"path": server.folder, "type": "Directory"}}
        found.append((volume, {"name": "checkpoint", "mountPath": server.mounted_at, "readOnly": True}))
    return found


def service(server: Server) -> dict[str, Any]:
    """The Service that spreads requests over the replicas of a server."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": server.name},
        "spec": {"selector": {"app": server.name}, "ports": [{"port": PORT, "targetPort": PORT}]},
    }
