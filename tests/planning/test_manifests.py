"""`kvcalc plan --emit`: files with keys that compose and Kubernetes know, which start the planned layout."""

from __future__ import annotations

import json
import shlex
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engines.models import plain

PLAN = ("plan", "llama-3.1-8b", "--input-tokens", "2k", "--output-tokens", "500", "--gpu", "h100")
BUSY = (*PLAN, "--concurrency", "4000", "--max-tpot", "40ms")

# The keys of a service, schema/compose-spec.json of compose-spec, that are of use here.
SERVICE = {
    "image", "entrypoint", "command", "environment", "ports", "volumes", "ipc", "restart", "healthcheck", "deploy",
    "devices", "group_add", "shm_size", "configs", "secrets",
}  # fmt: skip
# The fields of PodSpec's containers, kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1.
CONTAINER = {
    "name", "image", "command", "args", "env", "envFrom", "ports", "resources", "startupProbe", "readinessProbe",
    "livenessProbe", "volumeMounts", "workingDir", "securityContext", "imagePullPolicy",
}  # fmt: skip


def emitted(kvcalc: Any, *command: object) -> str:
    result = kvcalc(*command)
    assert result.status == 0, result.err
    return str(result.out)


@pytest.mark.parametrize(
    ("kind", "key"),
    [("vllm", "vllm"), ("sglang", "sglang"), ("trtllm", "tensorrt_llm"), ("llama-server", "llama_cpp")],
)
def test_a_command_is_the_one_in_the_document(kvcalc: Any, kind: str, key: str) -> None:
    engine = {"tensorrt_llm": "tensorrt-llm", "llama_cpp": "llama.cpp"}.get(key, key)
    command = (*PLAN, "--concurrency", "16")
    document = kvcalc(*command, "--engine", engine, "--json").json
    assert emitted(kvcalc, *command, "--emit", kind) == document["best"][key] + "\n"
    assert [row["command"] for row in document["commands"]] == [document["best"][key]]
    assert {name for name in ("vllm", "sglang", "tensorrt_llm", "llama_cpp") if document["best"][name]} == {key}
    several = (*command, "--engine", "vllm,sglang,tensorrt-llm,llama.cpp")
    assert emitted(kvcalc, *several, "--emit", kind) == document["best"][key] + "\n"


def test_compose_has_a_service_for_every_replica_on_a_machine(kvcalc: Any) -> None:
    text = emitted(kvcalc, *BUSY, "--emit", "compose")
    best = kvcalc(*BUSY, "--json").json["best"]
    each = best["num_devices"] // best["replicas"]
    assert best["replicas"] > 8 // each, "more than one machine"
    document = yaml.safe_load(text)
    assert set(document) == {"services", "volumes"}
    services = [*document["services"].values()]
    assert len(services) == 8 // each
    devices, ports = [], set()
    for service in services:
        assert set(service) <= SERVICE
        assert shlex.join([*service["entrypoint"], *service["command"]]) == best["vllm"] + " --host 0.0.0.0 --port 8000"
        (reserved,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (reserved["driver"], reserved["capabilities"]) == ("nvidia", ["gpu"])
        devices += reserved["device_ids"]
        ports |= set(service["ports"])
    assert devices == [str(number) for number in range(len(services) * each)], "no device belongs to two services"
    assert len(ports) == len(services)
    machines, rest = divmod(best["replicas"], len(services))
    assert f"# Run this file on {machines} machines" in text
    assert (f"and {rest} of its services on one more" in text) == (rest > 0)


def test_kubernetes_has_a_deployment_and_a_service(kvcalc: Any) -> None:
    command = (*BUSY, "--engine", "sglang")
    text = emitted(kvcalc, *command, "--emit", "k8s")
    best = kvcalc(*command, "--json").json["best"]
    assert "&id" not in text, "YAML anchors are hard to read"
    claim, deployment, service = yaml.safe_load_all(text)
    assert claim["kind"] == "PersistentVolumeClaim"
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    spec = deployment["spec"]
    assert spec["replicas"] == best["replicas"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert set(container) <= CONTAINER
    assert container["resources"]["limits"] == {"nvidia.com/gpu": best["num_devices"] // best["replicas"]}
    assert shlex.join([*container["command"], *container["args"]]).startswith(best["sglang"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"] == 8000


def test_a_command_with_a_file_runs_in_a_shell(kvcalc: Any) -> None:
    command = (*PLAN, "--concurrency", "16", "--engine", "tensorrt-llm", "--kv-dtype", "fp8")
    text = emitted(kvcalc, *command, "--emit", "compose", "--image", "some/image:1")
    (service,) = yaml.safe_load(text)["services"].values()
    assert service["image"] == "some/image:1"
    assert service["entrypoint"] == ["sh"]
    flag, script = service["command"]
    assert flag == "-c"
    best = kvcalc(*command, "--json").json["best"]
    assert script == f"{best['tensorrt_llm']} --host 0.0.0.0 --port 8000"


def test_amd_devices_are_files_and_need_the_name_of_an_image(kvcalc: Any) -> None:
    command = ("plan", "llama-3.1-8b", "--input-tokens", "2k", "--output-tokens", "500", "--concurrency", "16",
               "--gpu", "mi300x")  # fmt: skip
    result = kvcalc(*command, "--emit", "compose")
    assert result.status == 2
    assert "needs the image of vllm for AMD's devices" in result.err
    (service,) = yaml.safe_load(emitted(kvcalc, *command, "--emit", "compose", "--image", "a/b"))["services"].values()
    assert service["devices"] == ["/dev/kfd", "/dev/dri"]
    assert "deploy" not in service
    _, deployment, _ = yaml.safe_load_all(emitted(kvcalc, *command, "--emit", "k8s", "--image", "a/b"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"amd.com/gpu": 1}


def test_a_local_checkpoint_is_mounted(kvcalc: Any, tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**plain(), "vocab_size": 1000, "intermediate_size": 64}))
    # A file without tensors: kvcalc counts the config's weights, and the folder is what a server loads.
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    command = ("plan", folder, "--input-tokens", "100", "--output-tokens", "50", "--concurrency", "4", "--gpu", "h100")
    deployment, _ = yaml.safe_load_all(emitted(kvcalc, *command, "--emit", "k8s"))
    pod = deployment["spec"]["template"]["spec"]
    assert {"path": str(folder), "type": "Directory"} in [volume.get("hostPath") for volume in pod["volumes"]]
    (container,) = pod["containers"]
    assert str(folder) in container["args"]
    assert container["env"] == []
    (service,) = yaml.safe_load(emitted(kvcalc, *command, "--emit", "compose"))["services"].values()
    assert service["volumes"] == [{"type": "bind", "source": str(folder), "target": str(folder), "read_only": True}]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--emit", "docker"), "--emit 'docker': not something that plan can print"),
        (("--emit", "compose", "--json"), "cannot be combined with --json"),
        (("--emit", "k8s", "--get", "best"), "cannot be combined with --get"),
        (("--image", "a/b"), "--image needs --emit compose or --emit k8s"),
        (("--emit", "k8s", "--image", ""), "--image '': not the name of an image"),
        (("--emit", "k8s", "--image", "a b"), "--image 'a b': not the name of an image"),
        (("--emit", "vllm", "--image", "a/b"), "--image has no effect with --emit vllm"),
        (("--emit", "compose", "--engine", "transformers"), "transformers has no server that kvcalc can start"),
        (("--emit", "llama-server", "--kv-dtype", "fp8"), "--kv-dtype fp8: not a cache type of llama.cpp"),
        (("--emit", "sglang", "--engine", "vllm@0.19"), "--emit sglang: this plan is for vllm"),
    ],
)
def test_what_cannot_be_printed(kvcalc: Any, options: tuple[str, ...], words: str) -> None:
    result = kvcalc(*PLAN, "--concurrency", "16", *options)
    assert (result.status, result.out) == (2, "")
    assert words in result.err


def test_a_replica_over_machines_and_a_plan_that_does_not_fit(kvcalc: Any) -> None:
    deep = (
        "plan",
        "deepseek-v3",
        "--input-tokens",
        "2k",
        "--output-tokens",
        "500",
        "--concurrency",
        "16",
        "--gpu",
        "a100",
    )
    result = kvcalc(*deep, "--dtype", "bf16", "--emit", "compose")
    assert result.status == 2, result.err
    assert "needs 4 machines" in result.err
    none = kvcalc(*deep, "--max-gpus", "1", "--emit", "k8s")
    assert (none.status, none.out) == (4, "")
    assert "no layout serves this load" in none.err


ROUTED = (*PLAN, "--requests-per-second", "40", "--max-ttft", "400ms@p90", "--confidence", "50",
          "--requests", "300", "--router")  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("engine", "package"), [("vllm", "vllm-router==0.1.17"), ("sglang", "sglang-router==0.3.2")])
def test_what_is_emitted_has_the_router_that_was_simulated(kvcalc: Any, engine: str, package: str) -> None:
    words = (*ROUTED, "prefix-aware", "--engine", engine)
    (row,) = kvcalc(*words, "--json").json["commands"]
    assert row["replicas"] > 1
    names = [f"replica-{number}" for number in range(row["replicas"])]
    urls = " ".join(f"http://{name}:8000" for name in names)
    routed = f"--policy cache_aware --worker-urls {urls} --host 0.0.0.0 --port 8000"
    assert row["router"].endswith(routed)
    assert row["command"].endswith(" --host 0.0.0.0 --port 8000")
    text = f"# {names[0]} to {names[-1]}\n{row['command']}\n# router\n{row['router']}\n"
    assert emitted(kvcalc, *words, "--emit", engine) == text
    services = yaml.safe_load(emitted(kvcalc, *words, "--emit", "compose"))["services"]
    *replicas, router = services
    assert (len(replicas), services[router]["depends_on"]) == (row["replicas"], replicas)
    assert services[router]["ports"] == ["8000:8000"]
    assert not any("ports" in services[name] for name in replicas)
    text = services[router]["command"][-1]
    assert package in text
    assert all(f"http://{name}:8000" in text for name in replicas)
    documents = list(yaml.safe_load_all(emitted(kvcalc, *words, "--emit", "k8s")))
    by_kind = {
        kind: [one for one in documents if one["kind"] == kind] for kind in ("StatefulSet", "Service", "Deployment")
    }
    (pods,), (started,) = by_kind["StatefulSet"], by_kind["Deployment"]
    name = pods["metadata"]["name"]
    assert pods["spec"]["serviceName"] == name
    assert [one["spec"].get("clusterIP") for one in by_kind["Service"]] == ["None", None]
    text = started["spec"]["template"]["spec"]["containers"][0]["args"][-1]
    assert all(f"http://{name}-{number}.{name}:8000" in text for number in range(row["replicas"]))


@pytest.mark.parametrize("kind", ["compose", "k8s"])
def test_a_router_is_no_server(kvcalc: Any, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(emitted(kvcalc, *ROUTED, "round-robin", "--emit", kind))
    result = kvcalc("check", "-f", file, "--gpu", "h100")
    assert result.status == 0, result.err


@pytest.mark.parametrize(("engine", "router"), [("tensorrt-llm", "round-robin"), ("vllm", "least-loaded")])
def test_a_router_that_an_engine_has_not_is_named(kvcalc: Any, engine: str, router: str) -> None:
    result = kvcalc(*ROUTED, router, "--engine", engine, "--json")
    (row,) = result.json["commands"]
    assert row["router"] is None
    text = f"the figures assume a {router} router in front of the replicas, and {engine} has none"
    assert [note["text"] for note in result.json["warnings"] if note["code"] == "router"] == [text]
    own = kvcalc(*ROUTED, "round-robin", "--json").json
    assert own["commands"][0]["router"] is not None
    assert not any(note["code"] == "router" for note in own["warnings"])


def test_a_service_picks_replicas_at_random_and_so_does_the_plan(kvcalc: Any) -> None:
    words = (*PLAN, "--requests-per-second", "40", "--max-ttft", "400ms@p90", "--requests", "300", "--emit", "k8s")
    assert "a random router sends to the replicas" in emitted(kvcalc, *words)
    refused = kvcalc(*words, "--router", "least-loaded")
    assert (refused.status, refused.out) == (2, "")
    assert "a Service chooses a replica at random" in refused.err
