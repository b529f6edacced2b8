"""What containers start: compose files, manifests, values of charts, Dockerfiles, and units of services."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvcalc import check
from kvcalc.errors import DoesNotFitError
from kvcalc.planning.check.servers import Server, servers_in

IMAGE = "vllm/vllm-openai:v0.11.0"


def one(text: str) -> Server:
    """The one server in a text."""
    (server,) = servers_in(text)
    return server


def service(rows: str) -> str:
    return f"services:\n  v:\n    image: {IMAGE}\n" + "".join(f"    {row}\n" for row in rows.split("\n"))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("command: --model ${M:-a/b} -tp ${TP-2}", ["--model", "a/b", "-tp", "2"]),
        ("command: --model ${M:-${N:-a/b}}", ["--model", "a/b"]),
        ('command: ["--model", "a/b", "--x", "$$HOME"]', ["--model", "a/b", "--x", "$HOME"]),
        ("command: >\n      --model a/b\n      -tp 2", ["--model", "a/b", "-tp", "2"]),
        ('entrypoint: bash\ncommand: -c "exec vllm serve a/b -tp 2"', ["a/b", "-tp", "2"]),
        ('entrypoint: ["vllm", "serve"]\ncommand: a/b -tp 2', ["a/b", "-tp", "2"]),
        ("environment: {TP: 2}\nentrypoint: bash\ncommand: -c 'vllm serve a/b -tp $$TP'", ["a/b", "-tp", "2"]),
        ("environment: [TP=2]\nentrypoint: [sh, -c]\ncommand: ['vllm serve a/b -tp $$TP']", ["a/b", "-tp", "2"]),
        # Neither compose nor a shell knows it.
        ("command: --model a/b -tp ${TP}", ["--model", "a/b", "-tp", "${TP}"]),
    ],
)
def test_a_service_of_compose_is_read_as_compose_reads_it(rows: str, words: list[str]) -> None:
    assert one(service(rows)).words == words


def test_files_of_variables_are_read_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.env").write_text("# x\nA=1\nexport B=2 3\n")
    for text in (service("command: --model a/b\nenv_file: v.env"), f"docker run --env-file v.env {IMAGE} --model a/b"):
        server = one(text)
        assert ({**server.environment}, server.unread) == ({"A": "1", "B": "2 3"}, ())
    server = one(service("command: --model a/b\nenv_file: [{path: other.env}]"))
    assert server.read().unknown == ["variables of other.env"]
    os.mkfifo(tmp_path / "pipe")
    for path in ("pipe", "/dev/zero"):
        assert one(f"docker run --env-file {path} {IMAGE} --model a/b").unread == (f"variables of {path}",)


def pod(container: str, more: str = "") -> str:
    spec = f"{{containers: [{{image: '{IMAGE}', {container}}}]}}"
    return f"{more}apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec: {spec}"


CONFIG = "kind: ConfigMap\nmetadata: {name: c}\ndata: {TP: '2', r.sh: 'vllm serve a/b -tp 2'}\n---\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (pod("args: [--model, a/b, -tp, $(TP)], env: [{name: TP, value: '2'}]"), ["--model", "a/b", "-tp", "2"]),
        (pod("args: [--model, $$(TP)]"), ["--model", "$(TP)"]),
        (pod("args: [--model, a/b, -tp, $(TP)], envFrom: [{configMapRef: {name: c}}]", CONFIG),
         ["--model", "a/b", "-tp", "2"]),
        (pod("args: [--model, a/b, -tp, $(X)], env: [{name: X, valueFrom: {configMapKeyRef: {name: c, key: TP}}}]",
             CONFIG), ["--model", "a/b", "-tp", "2"]),
        (pod("command: [bash, /scripts/r.sh]", CONFIG), ["a/b", "-tp", "2"]),
        (pod("command: [vllm, serve], args: [a/b]"), ["a/b"]),
        (pod("command: [/bin/sh, -c], args: ['export T=2; exec vllm serve a/b -tp $T']"), ["a/b", "-tp", "2"]),
        (f"kubectl apply -f - <<EOF\n{pod('args: [--model, a/b]')}\nEOF", ["--model", "a/b"]),
        (f"cat > compose.yaml <<EOF\n{service('command: --model a/b')}EOF\ndocker compose up -d", ["--model", "a/b"]),
    ],
)  # fmt: skip
def test_a_container_is_read_as_kubernetes_reads_it(text: str, words: list[str]) -> None:
    assert one(text).words == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (pod("args: [--model, Qwen/Qwen3-8B, -tp, 2]"), "args: 2 is not a text"),
        (pod("args: [vllm, serve, Qwen/Qwen3-8B]"), "gets 'vllm' as an argument"),
        (service("command: vllm serve Qwen/Qwen3-8B"), "gets 'vllm' as an argument"),
        (service("command: [--model, Qwen/Qwen3-8B, -q, true]"), "command: true is not a text"),
        (f'FROM {IMAGE}\nCMD ["vllm", "serve", "Qwen/Qwen3-8B"]', "gets 'vllm' as an argument"),
    ],
)
def test_a_container_that_cannot_start_says_why(text: str, said: str) -> None:
    with pytest.raises(DoesNotFitError, match=said):
        check(text, "h100x2")


def test_the_pods_of_a_group_have_their_devices_together() -> None:
    limits = "resources: {limits: {nvidia.com/gpu: 8}}"
    container = f"{{image: '{IMAGE}', command: [vllm, serve, a/b], args: [-tp, '8', -pp, '2'], {limits}}}"
    template = f"{{spec: {{containers: [{container}]}}}}"
    text = f"kind: LeaderWorkerSet\nspec: {{leaderWorkerTemplate: {{size: 2, leaderTemplate: {template}}}}}"
    assert one(text).num_devices == 16


def test_a_model_of_kserve_has_vllms_options() -> None:
    text = (
        "kind: InferenceService\nspec: {predictor: {model: {modelFormat: {name: huggingface}, "
        "args: [--model_name=q, --model_id=a/b, --max-model-len=8192]}}}"
    )
    server = one(text)
    assert server.words == ["a/b", "--max-model-len=8192"]
    assert server.read().unknown == ["KServe's release of vLLM"]
    (server,) = servers_in(text.replace("--model_id=a/b", "-tp, '2'").replace("args:", "storageUri: hf://c/d, args:"))
    assert server.words == ["c/d", "-tp", "2", "--max-model-len=8192"]


def test_the_values_of_a_chart_are_options() -> None:
    """helm/templates/deployment-vllm-multi.yaml of production-stack: prefix caching is off unless it is turned on."""
    settings = {"tensorParallelSize": 2, "maxModelLen": 16384, "enableChunkedPrefill": False, "extraArgs": ["-q"]}
    row = {"name": "q", "repository": "vllm/vllm-openai", "tag": "v0.11.0", "modelURL": "a/b", "requestGPU": 2}
    server = one(json.dumps({"servingEngineSpec": {"modelSpec": [{**row, "vllmConfig": settings}]}}))
    assert server.words == [
        "a/b", "--tensor-parallel-size", "2", "--max-model-len", "16384", "--no-enable-chunked-prefill",
        "--no-enable-prefix-caching", "-q",
    ]  # fmt: skip
    assert (server.name, server.release, server.num_devices) == ("q", "0.11.0", 2)
    text = "image: {repository: vllm/vllm-openai, tag: v0.11.0, command: [vllm, serve, a/b]}\nextraArgs: [-tp, '2']"
    assert (one(text).words, one(text).release) == (["a/b", "-tp", "2"], "0.11.0")


@pytest.mark.parametrize(
    ("text", "words", "release"),
    [
        ('ENTRYPOINT ["vllm", "serve", "a/b"]\nCMD ["-tp", "2"]', ["a/b", "-tp", "2"], "0.11.0"),
        ('CMD ["--model", "a/b"]', ["--model", "a/b"], "0.11.0"),
        ('CMD ["x"]\nENTRYPOINT vllm serve a/b', ["a/b"], "0.11.0"),
        ('ENTRYPOINT []\nCMD vllm serve a/b \\\n  # two\n  -tp 2', ["a/b", "-tp", "2"], "0.11.0"),
        ('ENV TP=2\nENTRYPOINT vllm serve a/b -tp $TP', ["a/b", "-tp", "2"], "0.11.0"),
        ('RUN pip install vllm==0.9.1\nCMD ["--model", "a/b"]', ["--model", "a/b"], "0.9.1"),
        ('FROM python AS y\nFROM x\nCMD ["--model", "a/b"]', ["--model", "a/b"], "0.11.0"),
        ('COPY <<E /r.sh\nvllm serve a/b -tp 2\nE\nENTRYPOINT ["/r.sh"]', ["a/b", "-tp", "2"], "0.11.0"),
    ],
)  # fmt: skip
def test_a_dockerfile_starts_the_program_of_its_image(text: str, words: list[str], release: str) -> None:
    server = one(f"# syntax=docker/dockerfile:1\nARG V=v0.11.0\nFROM vllm/vllm-openai:$V AS x\n{text}\n")
    assert (server.words, server.release) == (words, release)


@pytest.mark.parametrize(
    ("text", "words", "environment"),
    [
        ("[Service]\nEnvironment=\"TP=2\" 'A=b c'\nExecStart=-/opt/vllm serve a/b \\\n  -tp ${TP} $A\n",
         ["a/b", "-tp", "2", "b", "c"], {"TP": "2", "A": "b c"}),
        ("[Service]\nEnvironment=TP=2\nExecStart=/bin/bash -c 'exec vllm serve a/b -tp $$TP'\n",
         ["a/b", "-tp", "2"], {"TP": "2"}),
        (f"[Service]\nExecStart=/usr/bin/docker run -e A=1 {IMAGE} --model a/b\n", ["--model", "a/b"], {"A": "1"}),
        ("[program:v]\ncommand=/opt/vllm serve a/b\n  -tp 2\nenvironment=A=\"1,2\",B='3'\n",
         ["a/b", "-tp", "2"], {"A": "1,2", "B": "3"}),
    ],
)  # fmt: skip
def test_a_unit_starts_its_program(text: str, words: list[str], environment: dict[str, str]) -> None:
    server = one(f"[Unit]\nDescription=It's\n{text}[Install]\nx=y\n")
    assert (server.words, {**server.environment}) == (words, environment)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("-tid -p8000:8000 -v/a:/b", ["--model", "a/b"]), ("-itv /a:/b", ["--model", "a/b"]),
        ("--rm --gpus=all --name x -h y", ["--model", "a/b"]), ("--entrypoint '' --", ["a/b"]),
        ("--init=true --ipc host", ["--model", "a/b"]),
    ],
)  # fmt: skip
def test_options_of_docker_are_not_the_servers(option: str, words: list[str]) -> None:
    command = "vllm serve a/b" if "entrypoint" in option else "--model a/b"
    assert one(f"docker run {option} {IMAGE} {command}").words == words


def test_a_file_needs_no_option(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("vllm serve Qwen/Qwen3-8B -tp 2\n")
    assert kvcalc("check", str(path), "--gpu", "h100x2", "--get", "engine.tensor_parallel_size").out == "2\n"
    os.mkfifo(tmp_path / "pipe")
    for special in (str(tmp_path / "pipe"), "/dev/null"):
        for words in ([special], ["-f", special]):
            result = kvcalc("check", *words, "--gpu", "h100")
            assert (result.status, "not a regular file" in result.err) == (2, True)
