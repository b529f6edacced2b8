"""The JSON contract: every command's document, in many shapes, against the schema that ships in the wheel."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from kvcalc.model.presets import preset_names, presets_folder
from kvcalc.schema import SCHEMA_VERSION, load_schema
from tests.conftest import ROOT, one_of_each_type

SCHEMA = load_schema()


def check(document: dict[str, Any], kind: str) -> None:
    jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{kind}"}).validate(document)


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", one_of_each_type())
@pytest.mark.parametrize(
    "options",
    [
        (), ("--context", "1M", "--batch", "7", "--kv-memory", "80GiB"), ("--engine", "transformers"),
        ("--attention", "mha", "--kv-dtype", "fp8"), ("--attention", "mla"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_estimate(kvcalc: Any, name: str, options: tuple[str, ...]) -> None:
    result = kvcalc("estimate", name, *options, "--json")
    if result.status:
        # Some caches have no what-if, and Transformers keeps some states elsewhere: refused by name.
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


@pytest.mark.parametrize("engine", ["logical", "transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize("device", ["h100", "m2-ultra", "rtx-a400", "tpu-v5e"])
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


@pytest.mark.parametrize("options", [("vllm.log",), ("sglang.log", "--model", "llama-3-8b"),
                                     ("vllm.log", "--tp", "2", "--kv-dtype", "fp8", "--context", "4k")])  # fmt: skip
def test_audit(kvcalc: Any, options: tuple[str, ...]) -> None:
    check(kvcalc("audit", ROOT / "tests" / "logs" / options[0], *options[1:], "--json").json, "audit")


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
        with pytest.raises(jsonschema.ValidationError):
            check(document, "estimate")
