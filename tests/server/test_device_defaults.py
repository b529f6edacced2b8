"""Without a device, `engine.device_defaults` lists every default that a device would change."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import LayoutError
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate

# Every class of devices, and memory on both sides of each step.
GPUS = ("rtx-4090", "a100-80gb", "h100", "h200", "b200", "rtx-5090", "gb10", "mi300x")
CASES = [
    *((model, engine) for model in ("qwen3.6-27b", "deepseek-v3.2", "glm-5") for engine in ("vllm", "sglang")),
    *(("llama-3-8b", engine) for engine in ("vllm@0.11", "vllm@0.7", "tensorrt-llm", "llama.cpp", "transformers")),
    *(("deepseek-v3.2", "vllm@0.28"), ("deepseek-v3", "vllm"), ("deepseek-v3", "vllm@0.16")),
]
# The settings of the cache that an engine has without a device.
SETTINGS = (
    "max-num-batched-tokens", "gdn-prefill-backend", "page-size", "tokens-per-block", "ubatch-size",
    "swa-full-tokens-ratio", "block-size",
)  # fmt: skip


def in_use(document: dict[str, Any], option: str) -> Any:
    return document["kv_cache"]["dtype"] if option == "kv-cache-dtype" else document["engine"][option.replace("-", "_")]


@pytest.mark.parametrize(("model", "engine"), CASES)
def test_the_list_is_what_the_known_devices_change(model: str, engine: str) -> None:
    """Every setting on devices of every kind: those that differ are listed, with the values they have."""
    without = estimate(kvcalc.load_model(model), engine=engine, context_tokens=4096)
    listed = {row["option"]: row for row in without["engine"]["device_defaults"]}
    options = [name for name in SETTINGS if without["engine"].get(name.replace("-", "_")) is not None]
    if "gdn-prefill-backend" in options and "block-size" in options:
        options.remove("block-size")  # beside states, a block follows from the kernel
    found: dict[str, set[Any]] = {option: set() for option in (*options, "kv-cache-dtype")}
    for gpu in GPUS:
        try:
            there = estimate(kvcalc.load_model(model), engine=engine, context_tokens=4096, devices=find_devices(gpu))
        except LayoutError:  # the engine has no kernels for this device
            continue
        assert there["engine"]["device_defaults"] is None
        for option, values in found.items():
            values.add(in_use(there, option))
    for option, values in found.items():
        here = in_use(without, option)
        if values - {here}:
            assert listed[option]["value"] == here
            assert values <= {one["value"] for one in listed[option]["on_devices"]}
        else:
            assert option not in listed


def test_a_setting_that_was_given_is_not_a_default() -> None:
    given = estimate(
        kvcalc.load_model("deepseek-v3.2"), engine="vllm", kv_dtype="fp8",
        engine_settings={"max-num-batched-tokens": "4096", "block-size": "64"},
    )  # fmt: skip
    assert given["engine"]["device_defaults"] == []


def test_the_formula_has_no_defaults() -> None:
    assert estimate(kvcalc.load_model("llama-3-8b"))["engine"]["device_defaults"] is None


def test_the_screen_shows_them(kvcalc: Any) -> None:
    screen = kvcalc("estimate", "qwen3.6-27b", "--engine", "vllm", "--format", "human", "--no-color").out
    assert "--max-num-batched-tokens 8,192: 16,384 on 160 GiB and more" in screen
    assert "--gdn-prefill-backend flashinfer: flashinfer on Hopper and Blackwell, triton on" in screen
    other = kvcalc("estimate", "qwen3.6-27b", "--engine", "vllm", "--gpu", "h100", "--format", "human").out
    assert "--gdn-prefill-backend" not in other
