"""Names that once broke out of what kvcalc prints, each with the command that showed it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import spawn

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 1000,
    "intermediate_size": 64,
}  # fmt: skip
LOAD = ("--gpu", "h100", "--input-tokens", "1k", "--output-tokens", "100", "--concurrency", "4")
INJECTED = "m\nkind: Pod\n---\n#"
KINDS = {"k8s": ["PersistentVolumeClaim", "Deployment", "Service"], "compose": [None]}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def model(name: str, has_weights: bool = True) -> str:
    os.makedirs(name)
    with open(os.path.join(name, "config.json"), "w") as file:
        json.dump(CONFIG, file)
    if has_weights:
        with open(os.path.join(name, "model.safetensors"), "wb") as weights:
            weights.write(struct.pack("<Q", 2) + b"{}")
    return name


def printed(kvcalc: Any, name: str, *options: str) -> str:
    result = kvcalc("plan", *LOAD, *options, "--", name)
    assert result.status == 0, result.err
    return str(result.out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [INJECTED, "m\n", "m\u2028kind: Pod", "m\u2029", "m\x85kind: Pod", "m\x1b[31m", "m\ufeff", "\ufeffm", "m\r"]
)
def test_a_name_ends_no_comment_of_a_manifest(kvcalc: Any, name: str, kind: str) -> None:
    text = printed(kvcalc, model(name, has_weights=False), "--emit", kind)
    documents = [*yaml.safe_load_all(text)]
    assert [document.get("kind") for document in documents] == KINDS[kind]
    assert all(line.isprintable() for line in text.split("\n"))


def test_bytes_that_are_no_text_are_escapes_in_a_comment(kvcalc: Any) -> None:
    text = printed(kvcalc, model(os.fsdecode(b"m\xff"), has_weights=False), "--emit", "k8s")
    assert text.startswith("# m\\udcff with vllm ")
    assert len([*yaml.safe_load_all(text)]) == 3


@pytest.mark.parametrize("name", ["a$HOME-${HF_TOKEN}", "a$$b", "a$", "$(X)", "a$$(X)", "a:b", "a:ro", "${"])
def test_a_mounted_path_means_itself(kvcalc: Any, name: str) -> None:
    path = os.path.abspath(model(name))
    (service,) = yaml.safe_load(printed(kvcalc, name, "--emit", "compose"))["services"].values()
    written = path.replace("$", "$$")
    assert service["volumes"] == [{"type": "bind", "source": written, "target": written, "read_only": True}]
    assert service["command"][1] == written
    pod = next(yaml.safe_load_all(printed(kvcalc, name, "--emit", "k8s")))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # A mountPath must not have a colon (VolumeMount). Kubernetes expands $(X) in args, and in no path.
    inside = "/checkpoint" if ":" in name else path
    assert pod["volumes"][1]["hostPath"]["path"] == path
    assert container["volumeMounts"][1]["mountPath"] == inside
    assert container["args"][1] == inside.replace("$", "$$")


def test_a_manifest_is_unicode_and_a_command_any_bytes(kvcalc: Any) -> None:
    name = model(os.fsdecode(b"m\xff"))
    for kind in KINDS:
        result = kvcalc("plan", name, *LOAD, "--emit", kind)
        assert (result.status, result.out) == (2, "")
        assert "not UTF-8, which a manifest must be" in result.err
    assert printed(kvcalc, name, "--emit", "vllm").startswith("vllm serve $'./m\\xff' ")


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm"])
def test_a_command_shows_control_characters_and_hands_them_on(kvcalc: Any, kind: str) -> None:
    name = "./" + model("\x1b]0;p\x07x\u202e'\\!")
    command = printed(kvcalc, name, "--emit", kind).removesuffix("\n")
    assert command.isprintable()
    program = "() { builtin printf '%s\\0' \"$@\"; }\n"
    script = "".join(f"{one}{program}" for one in ("vllm", "python", "trtllm-serve")) + command
    words = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode().split("\0")
    assert name in words


@pytest.mark.parametrize("name", ["vllm", "serve", "4", ">", "&&", "--trust-remote-code", "A=b"])
def test_a_folder_is_no_other_word_of_the_command(kvcalc: Any, name: str) -> None:
    path = os.path.abspath(model(name))
    words = printed(kvcalc, name, "--emit", "vllm").split()
    assert words[:2] == ["vllm", "serve"]
    assert words[2].strip("'") == f"./{name}"
    (service,) = yaml.safe_load(printed(kvcalc, name, "--emit", "compose"))["services"].values()
    assert service["entrypoint"] == ["vllm"]
    assert service["command"].count(path) == 1
    screen = printed(kvcalc, name, "--format", "human")
    assert "serve &&" not in screen
    assert "serve >" not in screen


def test_the_path_of_a_script_is_the_mounted_one(kvcalc: Any) -> None:
    path = os.path.abspath(model("m"))
    options = ("--engine", "tensorrt-llm", "--kv-dtype", "fp8", "--image", "some/image:1", "--emit", "compose")
    (service,) = yaml.safe_load(printed(kvcalc, "m", *options))["services"].values()
    assert f"&& trtllm-serve {path} " in service["command"][1]


def test_names_of_objects_leave_room_for_what_kubernetes_adds(kvcalc: Any) -> None:
    name = model("7" * 80)
    deployment, service = yaml.safe_load_all(printed(kvcalc, name, "--emit", "k8s"))
    found = deployment["metadata"]["name"]
    assert found == service["metadata"]["name"] == ("model-" + "7" * 80)[:44]
    # The label of a StatefulSet's pods: its name, a hyphen and a hash of at most ten characters.
    assert len(f"{found}-prefill-") + 10 <= 63


def test_a_warning_is_one_line(kvcalc: Any) -> None:
    name = model(INJECTED, has_weights=False)
    err = kvcalc("plan", name, *LOAD).err
    assert err.count("\n") == err.count("note: ") == 1


def test_a_name_is_one_line_of_the_screen(kvcalc: Any) -> None:
    name = model("m\nIt fits.\tReally")
    assert kvcalc("estimate", name, "--format", "human").out.startswith("m It fits. Really")


def test_an_error_of_a_batch_is_one_line(kvcalc: Any) -> None:
    os.makedirs("empty\x1b]0;p\x07\nline 2")
    Path("questions.jsonl").write_text(json.dumps({"model": "./empty\x1b]0;p\x07\nline 2"}) + "\n")
    result = kvcalc("batch", "questions.jsonl", "--get", "kv_cache.total_bytes")
    assert result.err.startswith("line 1: ./empty\\x1b]0;p\\x07 line 2: no config.json\n")
    assert all(line.isprintable() for line in result.err.split("\n"))


def test_a_shell_completes_no_name_that_it_would_run(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("presets").mkdir()
    monkeypatch.setenv("KVCALC_PRESETS", os.path.abspath("presets"))
    for name in ("m; id", "m$(id)", "m`id`", "m\nm|id", "mine-7b"):
        Path("presets", f"{name}.yaml").write_text(f"aliases: ['{name} x']\n")
    out = kvcalc("completion", "words", "--", "estimate", "m").out
    assert "mine-7b" in out.splitlines()
    assert not set(out) & set(";$`|() \x1b")


def test_a_dollar_sign_in_a_plot_is_one(kvcalc: Any) -> None:
    pytest.importorskip("matplotlib")
    name = model("a$\\frac$\x1bb")
    for file in ("plot.svg", "plot.png", "plot.pdf"):
        result = kvcalc("sweep", name, "--context", "1k..8k", "--plot", file)
        assert result.status == 0, result.err


@pytest.mark.parametrize("name", ["\t=1+1", " =1+1", "＝1+1", "\n@SUM(1)"])  # noqa: RUF001
def test_a_cell_of_csv_is_no_formula_after_white_space(kvcalc: Any, name: str) -> None:
    out = kvcalc("compare", model(name), "--format", "csv").out
    assert f'"\'{name}"' in out or f"\n'{name}," in out


def test_a_hint_to_paste_is_quoted() -> None:
    model("m")
    result = spawn("sweep", "m", "--plot", "no $(id)\x1b/x.svg")
    assert "  mkdir -p $'no $(id)\\x1b'\n" in result.err
