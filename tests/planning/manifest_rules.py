"""What compose and Kubernetes accept, as far as kvcalc prints it: the fields of objects and the form of their values.

Compared field by field with the published schemas; each field that these require is required here. The schemas are the
models of the Kubernetes client 37.0.2 (PyPI), generated from the OpenAPI document of release-1.37;
config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml of kubernetes-sigs/lws at 060ab4da (August 2026);
schema/compose-spec.json of compose-spec at 170098ba.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# A rule is a type, a pattern, a list with the rule of its items, a set of allowed values, or the name of an object. The
# fields that an object must have end in `!`; `*` is the rule of any other field.
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(Ki|Mi|Gi|Ti)?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_PATH, _DURATION = re.compile(r"/[^:]*"), re.compile(r"\d+(s|m|h)")
OBJECTS: dict[str, dict[str, Any]] = {
    "Deployment": {"apiVersion!": {"apps/v1"}, "kind!": {"Deployment"}, "metadata!": "meta", "spec!": "deployment"},
    "StatefulSet": {"apiVersion!": {"apps/v1"}, "kind!": {"StatefulSet"}, "metadata!": "meta", "spec!": "stateful set"},
    "Service": {"apiVersion!": {"v1"}, "kind!": {"Service"}, "metadata!": "meta", "spec!": "service"},
    "PersistentVolumeClaim": {
        "apiVersion!": {"v1"}, "kind!": {"PersistentVolumeClaim"}, "metadata!": "meta", "spec!": "claim"
    },
    "LeaderWorkerSet": {
        "apiVersion!": {"leaderworkerset.x-k8s.io/v1"}, "kind!": {"LeaderWorkerSet"}, "metadata!": "meta",
        "spec!": "leader worker set",
    },
    "meta": {"name!": _LABEL, "labels": "labels"},
    "template meta": {"labels!": "labels"},
    "labels": {"*": _LABEL},
    "deployment": {
        "replicas": int, "progressDeadlineSeconds": int, "selector!": "selector", "template!": "template"
    },
    "stateful set": {
        "serviceName!": _LABEL, "podManagementPolicy": {"OrderedReady", "Parallel"}, "replicas": int,
        "selector!": "selector", "template!": "template",
    },
    "leader worker set": {"replicas": int, "leaderWorkerTemplate!": "leader worker template"},
    "leader worker template": {
        "size": int, "restartPolicy": {"RecreateGroupOnPodRestart", "Default", "None"}, "leaderTemplate": "template",
        "workerTemplate!": "template",
    },
    "selector": {"matchLabels!": "labels"},
    "template": {"metadata!": "template meta", "spec!": "pod"},
    "pod": {"containers!": ["container"], "volumes": ["volume"], "nodeSelector": {"*": str}},
    "container": {
        "name!": _LABEL, "image!": str, "command": [str], "args": [str], "env": ["variable"],
        "ports": ["container port"],
        "resources": "resources", "startupProbe": "probe", "readinessProbe": "probe", "volumeMounts": ["mount"],
        "securityContext": "security",
    },
    "variable": {"name!": _VARIABLE, "value": str, "valueFrom": "source"},
    "source": {"secretKeyRef": "secret", "fieldRef": {"fieldPath!": {"status.podIP"}}},
    "secret": {"name!": _LABEL, "key!": str, "optional": bool},
    "container port": {"containerPort!": int},
    "resources": {"limits": {"*": (int, _QUANTITY)}, "requests": {"*": (int, _QUANTITY)}},
    "probe": {"httpGet": {"path!": _PATH, "port!": int}, "periodSeconds": int, "failureThreshold": int},
    "mount": {"name!": _LABEL, "mountPath!": _PATH, "readOnly": bool},
    "security": {"capabilities": {"add": [{"IPC_LOCK"}]}},
    "volume": {
        "name!": _LABEL, "emptyDir": {"medium": {"Memory"}, "sizeLimit": _QUANTITY},
        "hostPath": {"path!": str, "type": {"Directory"}}, "persistentVolumeClaim": {"claimName!": _LABEL},
    },
    "service": {"clusterIP": {"None"}, "selector!": "labels", "ports!": [{"port!": int, "targetPort": int}]},
    "claim": {
        "accessModes!": [{"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"}], "resources!": "resources",
    },
    "compose": {"services!": {"*": "compose service"}, "volumes": {"*": dict}},
    "compose service": {
        "image!": str, "entrypoint": [str], "command": [str], "environment": {"*": str}, "ports": [str],
        "volumes": ["compose volume"], "ipc": {"host"}, "restart": {"unless-stopped"}, "healthcheck": "health",
        "deploy": {"resources!": {"reservations!": {"devices!": ["reserved"]}}}, "devices": [str], "group_add": [str],
        "depends_on": [str],
    },
    "compose volume": {"type!": {"volume", "bind"}, "source!": str, "target!": str, "read_only": bool},
    "health": {"test!": [str], "interval": _DURATION, "start_period": _DURATION},
    "reserved": {"driver": {"nvidia"}, "device_ids": [str], "capabilities!": [{"gpu"}]},
}  # fmt: skip


def check(value: Any, rule: Any, place: str = "") -> None:
    """Raise AssertionError for a value that its rule does not allow."""
    if isinstance(rule, str):
        rule = OBJECTS[rule]
    if isinstance(rule, tuple):
        assert any(_allows(value, one) for one in rule), f"{place}: {value!r}"
    elif isinstance(rule, list):
        assert isinstance(value, list), place
        for number, item in enumerate(value):
            check(item, rule[0], f"{place}.{number}")
    elif isinstance(rule, Mapping):
        assert isinstance(value, dict), place
        fields = {name.removesuffix("!"): one for name, one in rule.items()}
        missing = {name[:-1] for name in rule if name.endswith("!")} - value.keys()
        assert not missing, f"{place}: no {missing}"
        for name, item in value.items():
            assert name in fields or "*" in fields, f"{place}: no field {name}"
            check(item, fields.get(name, fields.get("*")), f"{place}.{name}")
    else:
        assert _allows(value, rule), f"{place}: {value!r}"


def _allows(value: Any, rule: Any) -> bool:
    if isinstance(rule, set):
        return value in rule
    if isinstance(rule, re.Pattern):
        return isinstance(value, str) and rule.fullmatch(value) is not None
    return type(value) is rule and (rule is not int or value > 0)
