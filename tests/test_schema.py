"""Validates the documents of all commands, in many variants, against the JSON Schema in the wheel."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

import kvcalc as api
from kvcalc.engines import ENGINES
from kvcalc.errors import ModelError, UsageError
from kvcalc.model.presets import presets_folder
from kvcalc.schema import SCHEMA_VERSION, load_schema
from tests.conftest import ROOT, asked_presets, loaded, one_of_each_type, preset_names
from tests.documents import validate
from tests.rows import every_row

SCHEMA = load_schema()


def check(document: dict[str, Any], kind: str) -> None:
    validate(document, kind)


def test_the_schema_is_a_schema() -> None:
    jsonschema_rs.meta.validate(SCHEMA)


@every_row("name", one_of_each_type())
@every_row("options", [
        (), ("--context", "1M", "--batch", "7", "--kv-memory", "80GiB"), ("--engine", "transformers"),
        ("--attention", "mha", "--kv-dtype", "fp8"), ("--attention", "mla"),
    ])  # fmt: skip
def test_estimate(kvcalc: Any, name: str, options: tuple[str, ...]) -> None:
    result = kvcalc("estimate", name, *options, "--json")
    if result.status:
        # Some caches have no what-if, and Transformers keeps some states elsewhere. These are refused with a reason.
        assert result.status in (2, 3)
        assert {"--attention", "--engine"} & set(options)
        assert name in result.err or options[0] in result.err
    else:
        check(result.json, "estimate")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3", "bert-base"])
def test_estimate_of_an_engine(kvcalc: Any, name: str, engine: str) -> None:
    options = ("--engine", engine, "--kv-memory", "80GiB", "--batch", "3")
    check(kvcalc("estimate", name, *options, "--json").json, "estimate")


@pytest.mark.parametrize("method", ["mtp:3", "eagle:3", "draft:3", "ngram:3"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "logical"])
def test_drafted_tokens_and_prefix_hits(kvcalc: Any, method: str, engine: str) -> None:
    name = "deepseek-v3" if method == "mtp:3" else "llama-3.1-8b"
    options = ["--speculative", method, "--acceptance-length", "2", "--engine", engine]
    options += ["--draft-model", "llama-3.2-1b"] if method == "draft:3" else []
    load = ["--gpu", "h200", "--prefix-hit-rate", "0.3", "--input-tokens", "1k", "--output-tokens", "100"]
    check(kvcalc("estimate", name, *options, "--json").json, "estimate")
    check(kvcalc("estimate", name, *options, *load, "--num-gpus", "8", "--json").json, "estimate")
    check(kvcalc("fit", name, *options, "--gpu", "h200x8", "--json").json, "fit_document")
    check(kvcalc("plan", name, *options, *load, "--concurrency", "4", "--json").json, "plan")


ENGINES_ASKED = ("logical", "transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp")


@pytest.mark.parametrize(
    ("device", "engine"),
    [*product(("h100", "m2-ultra", "rtx-a400", "gaudi2"), ENGINES_ASKED), ("tpu-v5e", "logical")],
)
def test_estimate_on_a_device(kvcalc: Any, device: str, engine: str) -> None:
    check(kvcalc("estimate", "llama-3.1-8b", "--gpu", device, "--engine", engine, "--json").json, "estimate")
    check(kvcalc("fit", "llama-3.1-8b", "--gpu", device, "--engine", engine, "--json").json, "fit_document")


def test_fit_of_a_device_of_ones_own(kvcalc: Any) -> None:
    for options in ((), ("--gpu-bandwidth", "1TB/s", "--flops", "1P", "--num-gpus", "2")):
        check(kvcalc("fit", "llama-3.1-8b", "--gpu-memory", "40GB", *options, "--json").json, "fit_document")


def test_gpus(kvcalc: Any) -> None:
    document = kvcalc("gpus", "--json").json
    check(document, "gpus")
    for row in document["gpus"]:
        check(kvcalc("gpus", "show", row["name"], "--json").json, "gpus_show")


@pytest.mark.parametrize("options", [("vllm-bench.json", "--gpu", "h100"), ("sglang-bench.jsonl", "--gpu", "h100"),
                                     ("guidellm.json", "--gpu", "h100", "--engine", "vllm"), ("llama-bench.json",),
                                     ("llama-bench.json", "--engine", "logical", "--gpu", "h100")])  # fmt: skip
def test_score(kvcalc: Any, options: tuple[str, ...]) -> None:
    check(kvcalc("score", ROOT / "tests" / "logs" / options[0], *options[1:], "--json").json, "score")


@pytest.mark.parametrize("options", [("vllm.log",), ("sglang.log", "--model", "llama-3-8b"),
                                     ("vllm.log", "--tp", "2", "--kv-dtype", "fp8", "--context", "4k")])  # fmt: skip
def test_audit(kvcalc: Any, options: tuple[str, ...]) -> None:
    check(kvcalc("audit", ROOT / "tests" / "logs" / options[0], *options[1:], "--json").json, "audit")


@pytest.mark.parametrize(
    "options",
    [
        (), ("--context", "1k..4k", "--batch", "1,2", "--tp", "1,3", "--engine", "logical,vllm", "--kv-memory", "1GiB"),
        ("--context", "8k,1..3:1", "--kv-dtype", "fp8,nvfp4", "--attention", "mla"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v4-flash", "t5-small", "bert-base"])
def test_sweep(kvcalc: Any, name: str, options: tuple[str, ...]) -> None:
    result = kvcalc("sweep", name, *options, "--json")
    if result.status:
        assert "--attention" in result.err
        return
    check(result.json, "sweep")
    assert len(result.json["points"]) == result.json["num_points"]
    assert list(result.json) == SCHEMA["$defs"]["sweep"]["required"]
    for line in kvcalc("sweep", name, *options, "--format", "jsonl").out.splitlines():
        check(json.loads(line), "sweep_point")


@pytest.mark.parametrize(
    "options", [(), ("--kv-memory", "1GiB", "--tp", "2"), ("--attention", "all"), ("--engine", "vllm")]
)
def test_compare(kvcalc: Any, options: tuple[str, ...]) -> None:
    document = kvcalc("compare", "llama-3-8b", "falcon-7b", "nope", "jamba-v0.1", *options, "--json").json
    check(document, "compare")
    assert list(document) == SCHEMA["$defs"]["compare"]["required"]


@pytest.mark.parametrize(
    "options",
    [
        ("--concurrency", "64", "--gpu", "h100", "--gpu", "t4", "--price", "h100=2.5"),
        ("--requests-per-second", "3", "--max-tpot", "50ms", "--engine", "sglang", "--dtype", "fp8", "--gpu", "h200"),
        ("--concurrency", "4", "--gpu", "t4", "--max-gpus", "1"),
    ],
)
def test_plan(kvcalc: Any, options: tuple[str, ...]) -> None:
    for name in ("llama-3-70b", "gpt-oss-120b"):
        result = kvcalc("plan", name, "--input-tokens", "2k", "--output-tokens", "500", *options, "--json")
        check(result.json, "plan")
        assert list(result.json) == SCHEMA["$defs"]["plan"]["required"]
        assert result.status == (4 if result.json["best"] is None else 0)


def test_sweep_and_compare_on_devices(kvcalc: Any) -> None:
    options = ("--gpu", "h100", "--context", "8k", "--json")
    check(kvcalc("sweep", "llama-3.1-8b", "--batch", "1..64", *options).json, "sweep")
    check(kvcalc("compare", "llama-3.1-8b", "gpt2", *options).json, "compare")


def test_batch(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "questions"
    path.write_text('{"model": "gpt2"}\n{"model": "gpt-2"}\n[\n{"model": "gpt2", "engine": "all"}\n')
    lines = [json.loads(line) for line in kvcalc("batch", path).out.splitlines()]
    assert ["error" in line for line in lines] == [False, True, True, False]
    for line, kind in zip(lines, ("estimate", "batch_error", "batch_error", "engines")):
        check(line, "batch")
        check(line, kind)


def test_models(kvcalc: Any) -> None:
    check(kvcalc("models", "--json").json, "models")


def test_models_show(kvcalc: Any) -> None:
    for name in preset_names():
        check(kvcalc("models", "show", name, "--json").json, "models_show")


def test_models_check(kvcalc: Any) -> None:
    good, bad = f"{presets_folder()}/gpt2.yaml", __file__
    check(kvcalc("models", "check", good, bad, "--json").json, "models_check")


def test_keys_stand_in_the_contracts_order_and_the_version_first(kvcalc: Any) -> None:
    document = kvcalc("estimate", "llama-7b", "--json").json
    assert list(document) == SCHEMA["$defs"]["estimate"]["required"]
    assert next(iter(document)) == "schema_version"
    assert document["schema_version"] == SCHEMA_VERSION


def test_a_document_with_a_key_more_or_less_or_a_float_for_bytes_is_refused(kvcalc: Any) -> None:
    for spoil in (
        lambda d: d.pop("warnings"),
        lambda d: d.update(extra=1),
        lambda d: d["kv_cache"].update(total_bytes=1.5),
        lambda d: d["model"].update(attention="mgqa"),
        lambda d: d["variants"][0].pop("reason"),
    ):
        document = kvcalc("estimate", "llama-7b", "--json").json
        spoil(document)
        with pytest.raises(jsonschema_rs.ValidationError):
            check(document, "estimate")


@pytest.mark.parametrize("engine", ENGINES)
def test_presets_under_every_engine(engine: str, pytestconfig: pytest.Config) -> None:
    """Also in lengths that no block divides. Rounding may leave no part of the cache below zero."""
    answered, names = 0, asked_presets(pytestconfig)
    for name in names:
        spec = loaded(name)
        for tokens in (1000, 131_072):
            try:
                document = api.estimate(spec, context_tokens=tokens, engine=engine)
            except (UsageError, ModelError):
                continue
            cache = document["kv_cache"]
            grown = cache["bytes_per_token"] * tokens + cache["fixed_bytes_per_sequence"]
            assert grown == cache["bytes_per_sequence"], (name, tokens)
            validate(document, "estimate")
            answered += 1
    assert answered > len(names)


def test_what_another_process_prints_is_checked_too() -> None:
    from tests.documents import check_printed

    document = '{"schema_version": 2}'
    for command in ("estimate", "batch", "fit"):
        with pytest.raises(jsonschema_rs.ValidationError):
            check_printed(command, document)
        with pytest.raises(jsonschema_rs.ValidationError):
            check_printed(command, f"{document}\n{document}\n")
        check_printed(command, "12\n")
        check_printed(command, '{"schema_version": 2')
