"""A replica on several machines: what starts on each, and the manifests, which are checked by the published schemas."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

import kvcalc
from tests.planning.manifest_rules import check

LARGE = (
    "plan", "deepseek-r1", "--gpu", "h100", "--input-tokens", "2k", "--output-tokens", "300", "--requests-per-second",
    "2",
)  # fmt: skip
SMALL = (
    "plan",
    "llama-3.1-8b",
    "--gpu",
    "h100",
    "--input-tokens",
    "2k",
    "--output-tokens",
    "500",
    "--concurrency",
    "64",
)


def emitted(run: Any, *command: str) -> str:
    found = run(*command)
    assert found.status == 0, found.err
    return str(found.out)


# vllm/entrypoints/cli/serve.py and config/parallel.py, 0.33.0; srt/arg_groups/fields/parallel.py of SGLang 0.5.23.
@pytest.mark.parametrize(
    ("engine", "of_rank"),
    [
        ("vllm", lambda rank: f"--nnodes 2 --node-rank {rank} --master-addr node-0" + " --headless" * rank),
        ("sglang", lambda rank: f"--nnodes 2 --node-rank {rank} --dist-init-addr node-0:20000"),
    ],
)
def test_each_machine_has_its_command(kvcalc: Any, engine: str, of_rank: Any) -> None:
    document = kvcalc(*LARGE, "--engine", engine, "--json").json
    (command,) = document["commands"]
    assert command["command"] == command["nodes"][0]
    assert len(command["nodes"]) == 2
    for rank, text in enumerate(command["nodes"]):
        assert text.endswith(of_rank(rank))
    lines = emitted(kvcalc, *LARGE, "--engine", engine, "--emit", engine).splitlines()
    assert lines == ["# node-0", command["nodes"][0], "# node-1", command["nodes"][1]]
    human = emitted(kvcalc, *LARGE, "--engine", engine, "--format", "human")
    assert "machine node-1" in human


def test_mpi_starts_tensorrt_llm_on_all_machines(kvcalc: Any) -> None:
    text = emitted(kvcalc, *LARGE, "--engine", "tensorrt-llm", "--emit", "trtllm")
    words = shlex.split(text)
    assert words[:7] == ["mpirun", "-n", "16", "-H", "node-0:8,node-1:8", "trtllm-llmapi-launch", "trtllm-serve"]
    found = kvcalc(*LARGE, "--engine", "tensorrt-llm", "--emit", "k8s")
    assert found.status == 2
    assert "needs several machines" in found.err


def test_old_releases_of_vllm_have_no_option_for_it(kvcalc: Any) -> None:
    document = kvcalc(*LARGE, "--engine", "vllm@0.11", "--json").json
    assert document["best"]["num_devices"] == 16
    assert document["commands"] == []


@pytest.mark.parametrize(
    ("engine", "emit"),
    [("vllm", "k8s"), ("vllm", "vllm"), ("sglang", "k8s"), ("sglang", "sglang"), ("tensorrt-llm", "trtllm")],
)
def test_check_reads_the_commands_of_all_machines_back(kvcalc: Any, tmp_path: Any, engine: str, emit: str) -> None:
    file = tmp_path / "server"
    file.write_text(emitted(kvcalc, *LARGE, "--engine", engine, "--emit", emit))
    found = kvcalc("check", "-f", str(file), "--gpu", "h100x8", "--json").json
    assert found["starts"]
    assert found["hardware"]["num_devices"] == 16
    assert found["hardware"]["replicas"] == 1


def test_a_leader_worker_set_is_one_that_kubernetes_accepts(kvcalc: Any) -> None:
    documents = [*yaml.safe_load_all(emitted(kvcalc, *LARGE, "--engine", "vllm", "--emit", "k8s"))]
    assert [one["kind"] for one in documents] == ["PersistentVolumeClaim", "LeaderWorkerSet", "Service"]
    for one in documents:
        check(one, one["kind"])
    claim, group, service = documents
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    pods = [template[name] for name in ("leaderTemplate", "workerTemplate")]
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 1}
        assert container["args"][container["args"].index("--master-addr") + 1] == "$(LWS_LEADER_ADDRESS)"
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"]["sizeLimit"] == "16Gi"
        assert volumes["models"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    worker = pods[1]["spec"]["containers"][0]
    assert worker["args"][worker["args"].index("--node-rank") + 1] == "$(LWS_WORKER_INDEX)"
    assert "startupProbe" not in worker
    assert service["spec"]["selector"] == pods[0]["metadata"]["labels"] != pods[1]["metadata"]["labels"]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--concurrency", "4000", "--max-tpot", "40ms"),
        (
            "--disaggregate",
            "--transfer-bandwidth",
            "50GB/s",
            "--requests-per-second",
            "8",
            "--max-ttft",
            "1s",
            "--max-tpot",
            "30ms",
        ),
        ("--gpu", "mi300x", "--image", "vllm/vllm-openai-rocm:v0.33.0"),
        ("--engine", "sglang"),
        ("--engine", "tensorrt-llm", "--kv-dtype", "fp8", "--image", "some/image:1"),
    ],
)
def test_manifests_follow_the_published_schemas(kvcalc: Any, options: tuple[str, ...]) -> None:
    command = SMALL[:2] + SMALL[4:-2] + options
    command += () if {"--concurrency", "--requests-per-second"} & {*options} else ("--concurrency", "64")
    command += () if "--gpu" in options else ("--gpu", "h100")
    for one in yaml.safe_load_all(emitted(kvcalc, *command, "--emit", "k8s")):
        check(one, one["kind"])
    check(yaml.safe_load(emitted(kvcalc, *command, "--emit", "compose")), "compose")


def test_the_rules_of_the_schemas_refuse_what_is_wrong(kvcalc: Any) -> None:
    (claim, deployment, _) = yaml.safe_load_all(emitted(kvcalc, *SMALL, "--emit", "k8s"))
    deployment["spec"]["replica"] = 2
    with pytest.raises(AssertionError, match="no field replica"):
        check(deployment, "Deployment")
    claim["spec"]["resources"]["requests"]["storage"] = "20GiB"
    with pytest.raises(AssertionError, match="20GiB"):
        check(claim, "PersistentVolumeClaim")


def test_a_start_may_take_as_long_as_the_weights_need(kvcalc: Any) -> None:
    seconds = {}
    for model in ("llama-3.1-8b", "llama-3.3-70b"):
        documents = [*yaml.safe_load_all(emitted(kvcalc, "plan", model, *SMALL[2:], "--emit", "k8s"))]
        (deployment,) = (one for one in documents if one["kind"] == "Deployment")
        probe = deployment["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        seconds[model] = probe["failureThreshold"] * probe["periodSeconds"]
        assert deployment["spec"]["progressDeadlineSeconds"] == seconds[model]
    # 100 MB/s from the Hub, 500 MB/s from the volume, and 15 minutes.
    assert seconds["llama-3.1-8b"] == pytest.approx(900 + 16e9 / 100e6 + 16e9 / 500e6, abs=60)
    assert seconds["llama-3.3-70b"] == pytest.approx(900 + 141e9 / 100e6 + 141e9 / 500e6, abs=60)


@pytest.mark.parametrize(
    ("gpus", "sizes"),
    [("h100x16", (8, 2)), ("h100x32", (8, 4)), ("h100x8", (8, 1)), ("gb200x16", (16, 1)), ("l40sx16", (8, 2))],
)
def test_tensor_parallelism_stays_within_a_machine_by_default(gpus: str, sizes: tuple[int, int]) -> None:
    found = kvcalc.fit("deepseek-v3", kvcalc.find_devices(gpus), engine="vllm")
    assert (found["engine"]["tensor_parallel_size"], found["engine"]["pipeline_parallel_size"]) == sizes
    asked = kvcalc.fit("deepseek-v3", kvcalc.find_devices(gpus), engine="vllm", tensor_parallel_size=8)
    assert asked["engine"]["tensor_parallel_size"] == 8


def test_a_model_that_needs_two_machines_is_told_so() -> None:
    found = kvcalc.fit("deepseek-v3", kvcalc.find_devices("h100x8"), engine="vllm")
    assert not found["fit"]["fits"]
    smallest = found["smallest"]
    assert smallest is not None
    assert (smallest["tensor_parallel_size"], smallest["pipeline_parallel_size"]) == (8, 2)
    document = kvcalc.check("vllm serve deepseek-ai/DeepSeek-V3 -tp 8 --max-model-len 8192", "h100x8")
    server: Any = document["server"]
    assert {"option": "--pipeline-parallel-size", "value": "2"} in server["try"]
