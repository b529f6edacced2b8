"""CONTRIBUTING.md is true: its plain decoder is one row and a preset, and nothing else is needed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvcalc
from kvcalc.errors import ModelError
from kvcalc.model.families import decoder_table
from presets.check import check_decoders
from tests.conftest import ROOT, at_night
from tests.documents import estimate

TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def block(language: str, starts: str) -> str:
    (found,) = (text for text in re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) if text.startswith(starts))
    return str(found)


@pytest.fixture
def acorn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The preset's path, with the row in the table."""
    own = yaml.safe_load(block("yaml", "acorn:"))
    check_decoders({**decoder_table.rows(), **own})
    monkeypatch.setitem(decoder_table.rows(), "acorn", own["acorn"])
    decoder_table.model_types.cache_clear()
    path = tmp_path / "acorn-7b.yaml"
    path.write_text(block("yaml", "name: acorn-7b"))
    yield str(path)
    decoder_table.model_types.cache_clear()
    decoder_table.row.cache_clear()


def test_a_plain_decoder_is_one_row_and_a_preset(acorn: str) -> None:
    spec = kvcalc.load_model(acorn)
    document = estimate(spec, context_tokens=32_768)
    # 24 layers keep 4,096 tokens and 8 layers all of them: K and V of 8 heads, each 128 wide, in two bytes.
    assert document["kv_cache"]["total_bytes"] == (24 * 4096 + 8 * 32_768) * 2 * 8 * 128 * 2
    attention = 4096 * 128 * (32 + 8 + 8 + 32)
    layer = attention + 3 * 4096 * 11_008 + 2 * 4096 + 2 * 128
    assert document["weights"]["parameters"] == 32 * layer + 2 * 32_000 * 4096 + 4096
    for engine in ("vllm", "tensorrt-llm", "transformers"):
        assert estimate(spec, context_tokens=32_768, engine=engine)["kv_cache"]["total_bytes"]
    for engine in ("sglang", "llama.cpp"):
        with pytest.raises(ModelError, match="not modelled"):
            estimate(spec, context_tokens=32_768, engine=engine)


@pytest.mark.parametrize(
    "words",
    [("estimate", "acorn-7b"), ("fit", "acorn-ai/Acorn-7B", "--gpu", "h100"),
     ("plan", "acorn-7b", "--gpu", "h100", "--input-tokens", "1000", "--output-tokens", "100", "--concurrency", "4"),
     ("models", "show", "acorn-7b")],
    ids=" ".join,
)  # fmt: skip
def test_commands_know_its_names(kvcalc: Any, acorn: str, words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCALC_PRESETS", str(Path(acorn).parent))
    document = kvcalc(*words, "--json").json
    assert document.get("model", document)["name"] == "acorn-7b"


def test_measure_builds_it(acorn: str) -> None:
    import torch

    from kvcalc.measure.layers.build import build_layer

    spec = kvcalc.load_model(acorn)
    layer = build_layer(spec.attention, None, torch.bfloat16, torch.device("meta"))
    assert sum(p.numel() for p in layer.parameters()) == 4096 * 128 * (32 + 8 + 8 + 32)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The device's file among those that ship."""
    from kvcalc.throughput import hardware

    folder = tmp_path / "gpus"
    shutil.copytree(ROOT / "presets" / "gpus", folder)
    monkeypatch.setattr(hardware, "gpus_folder", lambda: str(folder))
    hardware._look_up.cache_clear()
    path = folder / "acorn-80gb.yaml"
    path.write_text(block("yaml", "name: acorn-80gb"))
    yield path
    hardware._look_up.cache_clear()


ACORN = ("llama-3.1-8b", "--gpu", "acorn")
SERVED = ("--input-tokens", "1000", "--output-tokens", "100", "--concurrency", "4")
PLAN = ("plan", *ACORN, *SERVED)


@pytest.mark.parametrize("form", [(), ("--json",), ("--format", "tsv"), ("--format", "csv")])
def test_a_device_of_a_new_vendor_is_listed_after_those_of_known_ones(kvcalc: Any, device: Path, form: Any) -> None:
    shown = kvcalc("gpus", *form)
    assert shown.status == 0, shown.err
    assert shown.out.rindex("acorn-80gb") > shown.out.rindex("m2-ultra")
    if not form:
        assert [*vendors_of(kvcalc("gpus", "--json").json)] == ["NVIDIA", "AMD", "Intel", "Google", "Apple", "Acorn"]
        device.with_name("birch-40gb.yaml").write_text(re.sub("[Aa]corn(-80gb)?", "birch-40gb", device.read_text()))
        device.with_name("acorn-16gb.yaml").write_text(
            device.read_text().replace("acorn-80gb", "acorn-16gb").replace("[acorn]", "[acorn16]")
        )
        assert [*vendors_of(kvcalc("gpus", "--json").json)][-2:] == ["Acorn", "birch-40gb"]


def vendors_of(document: Any) -> list[str]:
    """The vendors in the order of the list, each once if its devices are together."""
    return [vendor for vendor, _ in groupby(document["gpus"], lambda row: row["vendor"])]


@pytest.mark.parametrize(
    "words",
    [
        ("gpus", "show", "acorn"),
        ("estimate", *ACORN),
        ("estimate", *ACORN, "--engine", "vllm", *SERVED, "--report", "page.html"),
        ("estimate", *ACORN, "--engine", "all"),
        ("fit", *ACORN, "--engine", "sglang"),
        ("fit", "llama-3.1-8b", "--gpu", "acornx2", "--engine", "llama.cpp"),
        ("compare", *ACORN, "--engine", "vllm"),
        ("sweep", *ACORN, "--engine", "vllm", "--context", "1k,2k"),
        ("simulate", *ACORN, "--input-tokens", "1000", "--output-tokens", "100", "--concurrency", "4",
         "--requests", "20", "--report", "page.html"),
        ("prefix", "mooncake.jsonl", *ACORN, "--engine", "vllm"),
        ("score", "vllm-bench.json", "--gpu", "acorn"),
        (*PLAN, "--report", "page.html"),
        (*PLAN, "--max-ttft", "1s@p99", "--requests", "50", "--pareto", "--price", "acorn=2"),
        (*PLAN, "--disaggregate", "--transfer-bandwidth", "infiniband-400g", "--all-layouts"),
        ("plan", "llama-3.1-8b", "--gpu", "acorn,h100,mi300x", *SERVED, "--engine", "all"),
        *((*PLAN, "--engine", engine, "--emit", kind) for engine, kind in (
            ("vllm", "vllm"), ("sglang", "sglang"), ("tensorrt-llm", "trtllm"), ("llama.cpp", "llama-server")
        )),
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("device_class", ["oak", at_night("hopper")])
def test_a_device_of_a_new_vendor_is_used_by_every_command(
    kvcalc: Any, device: Path, words: Any, device_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(device.parent)
    device.write_text(device.read_text().replace("device_class: hopper", f"device_class: {device_class}"))
    # The names of tests have no path, so that they are the same in every checkout.
    logs = ROOT / "tests" / "logs"
    words = [str(logs / word) if (logs / word).is_file() else word for word in words]
    shown = kvcalc(*words)
    assert shown.status == 0, shown.err
    # A table of engines has the figures on the device, and not its name.
    is_table = words[0] == "estimate" and "all" in words
    found = '"fits": true' if is_table else "acorn-80gb"
    assert found in kvcalc(*words, "--json").out or "--emit" in words
    if "--report" in words:
        assert "acorn-80gb" in Path("page.html").read_text()


@pytest.mark.parametrize("kind", ["k8s", "compose"])
def test_containers_of_a_new_vendor_are_refused_by_its_name(kvcalc: Any, device: Path, kind: str) -> None:
    """Neither the resource of Kubernetes nor the device files of the vendor are known."""
    shown = kvcalc(*PLAN, "--emit", kind)
    assert (shown.status, shown.out) == (2, "")
    assert "containers do not see devices of Acorn" in shown.err


OPTIONAL = {"note", "inline_ecc", "machine_devices", "network_gb_per_second"}


def test_a_device_is_one_file(device: Path) -> None:
    from kvcalc.throughput.hardware import load_gpu

    path = device
    gpu = load_gpu(str(path))
    assert (gpu.name, gpu.memory_bytes, gpu.bandwidth_bytes_per_second) == ("acorn-80gb", 81_559 * 2**20, 3350 * 10**9)
    # Every file has these keys, but for a note, for ECC, and for unusual machines and networks.
    keys = set(re.findall(r"^(\w+):", path.read_text(), re.MULTILINE))
    for shipped in (ROOT / "presets" / "gpus").glob("*.yaml"):
        assert set(re.findall(r"^(\w+):", shipped.read_text(), re.MULTILINE)) <= keys | OPTIONAL, shipped


def test_the_map_names_every_folder_of_the_package() -> None:
    named = set(re.findall(r"^kvcalc/(\w+) ", TEXT, re.MULTILINE))
    assert named == {path.parent.name for path in (ROOT / "kvcalc").glob("*/__init__.py")}


@pytest.mark.parametrize(
    "folder", re.findall(r"^(?:kvcalc|presets|benchmarks|docs|tests)(?:/\w+)?(?= )", TEXT, re.MULTILINE)
)
def test_the_folders_it_names_are_there(folder: str) -> None:
    assert (ROOT / folder).is_dir()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:kvcalc|tests|benchmarks|\.ci)/[\w./]+)`", TEXT))))
def test_the_files_it_names_are_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_tests_it_selects_are_there() -> None:
    (pattern,) = re.findall(r"^pytest .*tests/test_units.py -k (\w+)", TEXT, re.MULTILINE)
    assert re.search(rf"^def test_\w*{pattern}", (ROOT / "tests" / "test_units.py").read_text(), re.MULTILINE)


def test_hooks_run_what_ci_runs() -> None:
    import yaml

    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    ci = (ROOT / ".ci" / "run").read_text()
    assert [hook["entry"].removesuffix(" --fix") for hook in hooks] == [
        ".venv/bin/ruff check", ".venv/bin/ruff format", ".venv/bin/mypy"
    ]  # fmt: skip
    assert all(hook["entry"].removesuffix(" --fix") in ci for hook in hooks)


def test_the_citation_names_the_version_of_the_package() -> None:
    import yaml

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == kvcalc.__version__


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_templates_are_forms(path: Path) -> None:
    import yaml

    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"]
    assert form["description"]
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names))
    if path.name == "wrong-number.yml":
        assert {"config", "command", "expected"} <= set(names)


def test_the_package_is_typed() -> None:
    assert (ROOT / "kvcalc" / "py.typed").exists()


def test_its_test_command_is_the_readmes() -> None:
    assert block("bash", "./dev test").strip() in (ROOT / "README.md").read_text()
