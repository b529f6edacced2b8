"""A compose file for one machine.

Keys: https://github.com/compose-spec/compose-spec (05-services.md, deploy.md). A replica is a service of its own,
because each has its own devices and port.
"""

from __future__ import annotations

from typing import Any

from kvcalc.engines.command import PORT
from kvcalc.planning.manifests.server import CACHE, Server
from kvcalc.writing.manifest import Interpolated, compose_file


def compose(server: Server) -> str:
    """The file for one machine with all its devices. Comments say how many machines run it."""
    here = min(server.replicas, server.machine_devices // server.num_devices)
    names = [f"{server.name}-{number}" for number in range(here)]
    router = server.router_of(names) if here == server.replicas else None
    services = {
        name: service_of(server, number * server.num_devices, PORT + number if router is None else None)
        for number, name in enumerate(names)
    }
    if router is not None:
        services[router.name] = {**service_of(router, 0, PORT), "depends_on": names}
    document: dict[str, Any] = {"services": services}
    if server.folder is None:
        document["volumes"] = {"huggingface": {}}
    return compose_file([*server.comments, *_machines(server, here)], document)


def _machines(server: Server, here: int) -> list[str]:
    if here == server.replicas:
        return []
    machines, last = divmod(server.replicas, here)
    more = f", and {last} of its services on one more" if last else ""
    route = [] if server.router is None else [f"The {server.router[1]} router in front of all of them is not in it"]
    return [f"Run this file on {machines} machines{more}", *route]


def service_of(server: Server, first: int, port: int | None) -> dict[str, Any]:
    """A service on the machine's devices from number `first` on. Without a `port`, only other services reach it."""
    devices = [str(device) for device in range(first, first + server.num_devices)]
    environment = dict(server.environment)
    if server.folder is None:
        volume: dict[str, Any] = {"type": "volume", "source": "huggingface", "target": CACHE}
        environment["HF_TOKEN"] = Interpolated("${HF_TOKEN-}")
    else:
        volume = {"type": "bind", "source": server.folder, "target": server.mounted_at, "read_only": True}
    service: dict[str, Any] = {
        "image": server.image,
        # Images differ in their entry points.
        "entrypoint": server.command[:1],
        "command": server.command[1:],
        "environment": environment,
        "ports": [] if port is None else [f"{port}:{PORT}"],
        "volumes": [volume],
        # Processes of tensor parallelism exchange data in shared memory.
        "ipc": "host",
        "restart": "unless-stopped",
        "healthcheck": {
            "test": ["CMD", "curl", "-f", f"http://localhost:{PORT}{server.health_path}"],
            "interval": "10s",
            "start_period": f"{server.start_seconds}s",
        },
    }
    if not devices:
        pass
    elif server.vendor == "AMD":
        service["devices"] = ["/dev/kfd", "/dev/dri"]
        service["group_add"] = ["video", "render"]
        environment["HIP_VISIBLE_DEVICES"] = ",".join(devices)
    else:
        reserved = {"driver": "nvidia", "device_ids": devices, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [reserved]}}}
    return {key: value for key, value in service.items() if value}
