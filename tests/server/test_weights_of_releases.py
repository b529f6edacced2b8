"""The weights of quantized releases, which do not quantize every module, and those that a user states."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.model.presets import find_preset
from kvcalc.model.published import PUBLISHED_BYTES
from kvcalc.model.resolve import load_model
from tests.documents import estimate

GIB = 2**30


def weights(name: str, **asked: Any) -> Any:
    return estimate(name, kv_dtype="bf16", **asked)["weights"]


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        # vLLM prints 21.88 GiB: llm-compressor leaves the linear attention in 16 bits.
        ("RedHatAI/Qwen3.6-35B-A3B-NVFP4", 21.88),
        # 93 GiB of files, of which the experts of eight layers are not quantized.
        ("poolside/Laguna-S-2.1-NVFP4", 93.0),
        # vLLM prints 69.34 GiB with 2.8 GiB of a draft head.
        ("poolside/Laguna-S-2.1-INT4", 69.34 - 2.8),
        # Files of 21.6 GB.
        ("poolside/Laguna-XS.2-NVFP4", 21.6e9 / GIB),
        # Files of 23.4 GB with a layer for MTP in 16 bits (0.79 GiB).
        ("unsloth/Qwen3.8-27B-NVFP4", 23.4e9 / GIB - 0.79),
        # A server's notes: 18 GB of weights in groups of 32.
        ("cyankiwi/Qwen3-Coder-30B-A3B-Instruct-AWQ-4bit", 18e9 / GIB),
        # Files of 20.4 GB, and 23.25 GiB, with a layer for MTP in 16 bits.
        ("cyankiwi/Qwen3.6-27B-AWQ-INT4", 20.4e9 / GIB - 0.79),
        ("cyankiwi/Qwen3.6-35B-A3B-AWQ-4bit", 23.25 - 1.57),
        ("Inferact/Muse-Glimmer-30B-NVFP4-W4A4", 25.42e9 / GIB),
    ],
)
def test_a_release_has_the_size_that_a_server_loads(name: str, loaded: float) -> None:
    counted = weights(name)
    size = counted["bytes"] + sum(tower["bytes"] or 0 for tower in counted["towers"])
    assert size / GIB == pytest.approx(loaded, rel=0.01)


@pytest.mark.parametrize(("kind", "size"), [("BF16", 354_029_930_496), ("Q8_0", 188_225_033_248)])
def test_a_table_of_ngrams_is_counted(kind: str, size: int) -> None:
    """The files of unsloth/Qwen3.8-Flash-Next-GGUF, of whose 177 billion parameters 51 billion are the table."""
    counted = weights(f"unsloth/Qwen3.8-Flash-Next-GGUF:{kind}", engine="llama.cpp")
    assert counted["bytes"] == pytest.approx(size, rel=0.001)


def test_groups_of_32_are_divided_among_eight_devices() -> None:
    """The 512 inputs of its experts' down projections are 64 on each device, which is no group of 128."""
    assert weights("cyankiwi/Qwen3.6-35B-A3B-AWQ-4bit", engine="vllm", tensor_parallel_size=8)["bytes"]


def test_a_published_size_beats_the_recipe() -> None:
    name = "poolside/Laguna-S-2.1-NVFP4"
    assert weights(name)["bytes_source"] == "published"
    assert weights(name)["bytes"] == PUBLISHED_BYTES[name.casefold()]
    assert not load_model(name).has_unread_recipe
    # Another type is not the release's.
    assert weights(name, dtype="fp8")["bytes_source"] == "config"


def test_the_cache_of_a_release_is_the_one_that_its_server_keeps() -> None:
    """A log of vLLM 0.25.1: 94,135 tokens in 6.97 GiB, where Laguna-S-2.1-INT4 has 950,420 in 35.2 GiB."""
    types = {name: estimate(f"poolside/Laguna-{name}", engine="vllm")["kv_cache"]["dtype"] for name in LAGUNA}
    assert types == LAGUNA


LAGUNA = {"S-2.1-NVFP4": "bf16", "S-2.1-INT4": "fp8", "XS.2-NVFP4": "fp8"}


def test_a_recipe_that_was_not_read_has_a_range_to_one_side() -> None:
    def lines(name: str) -> dict[str, Any]:
        gpu = kvcalc.find_devices("h100x2")
        found = estimate(name, devices=gpu, engine="vllm", kv_dtype="bf16")["fit"]["lines"]
        return {each["name"]: each for each in found}

    line = lines("QuantTrio/Qwen3-235B-A22B-AWQ")["modules that may stay in 16 bits"]
    # 7.2 B parameters of attention take 2 instead of 0.52 bytes, on two devices.
    assert line["bytes"] == line["low_bytes"] == 0
    assert line["high_bytes"] == pytest.approx(7.2e9 * (2 - 0.52) / 2, rel=0.1)
    assert "modules that may stay in 16 bits" not in lines("Qwen/Qwen3-235B-A22B-FP8")


def test_the_user_may_state_the_weights() -> None:
    name, gpu = "RedHatAI/Qwen3.6-35B-A3B-NVFP4", kvcalc.find_devices("rtx-5090")
    counted, stated = (
        estimate(name, devices=gpu, engine="vllm", kv_dtype="bf16", context_tokens=8192, weights_bytes=size)["fit"]
        for size in (None, 21 * GIB)
    )
    assert stated["weights_bytes"] == 21 * GIB
    assert stated["free_bytes"] - counted["free_bytes"] == counted["weights_bytes"] - 21 * GIB
    # They hold the tower, whose step still takes memory; and nothing about them is unknown.
    assert stated["activation_bytes"] == counted["activation_bytes"]
    assert {line["name"] for line in counted["lines"]} - {line["name"] for line in stated["lines"]} == {
        "vision tower", "rotary tables", "modules that may stay in 16 bits",
    }  # fmt: skip


def test_weights_that_cannot_be_counted_can_be_stated() -> None:
    preset, gpu = find_preset("llama-3.1-8b"), kvcalc.find_devices("l4")
    assert preset is not None
    model = kvcalc.read_config({**preset.config, "quantization_config": {"quant_method": "new"}}, "x", "x")
    with pytest.raises(kvcalc.KvcalcError, match="not known"):
        kvcalc.fit(model, gpu, engine="vllm", context_tokens=8192)
    stated = kvcalc.fit(model, gpu, engine="vllm", context_tokens=8192, weights_bytes=5 * GIB)
    assert stated["fit"]["weights_bytes"] == 5 * GIB


@pytest.mark.parametrize(
    ("command", "loaded"),
    [
        # vLLM 0.8.5 prints 5.34 GiB.
        ("vllm serve aisingapore/Llama-SEA-LION-v3-8B-IT --quantization bitsandbytes", 5.34),
        # 7.0 B parameters in 33 bytes for each 32, and 1.05 B in 16 bits.
        ("vllm serve meta-llama/Llama-3.1-8B-Instruct -q mxfp8", 8.69),
        # Only experts: Qwen3-30B-A3B has 29 B parameters of them.
        ("vllm serve Qwen/Qwen3-30B-A3B -q int8_per_channel_weight_only", 29.9),
        ("vllm serve Qwen/Qwen3-30B-A3B -q nvfp4_per_token", 18.2),
    ],
)
def test_a_checkpoint_that_is_converted_while_it_is_loaded(command: str, loaded: float) -> None:
    document = kvcalc.check(command + " --max-model-len 4096", "h100")
    assert (document["fit"]["weights_bytes"] or 0) / GIB == pytest.approx(loaded, rel=0.01)
    assert document["command"]["not_counted"] == []


def test_a_refusal_says_what_could_make_the_weights_smaller() -> None:
    command = "vllm serve meta-llama/Llama-3.1-70B-Instruct -q torchao --max-model-len 4096"
    document = kvcalc.check(command, "h100")
    assert document["starts"] is False
    assert "unless --quantization torchao makes the weights small enough" in str(document["reason"])
    assert kvcalc.check(command, "h100", weights_bytes=40 * GIB)["starts"] is True


def warnings(command: str, gpu: str) -> dict[str, str]:
    return {warning["code"]: warning["text"] for warning in kvcalc.check(command, gpu)["warnings"]}


def test_weights_that_may_be_larger_than_the_free_memory_are_a_warning_beside_the_verdict() -> None:
    command = "vllm serve QuantTrio/Qwen3-235B-A22B-AWQ -tp 2 --max-model-len 40960 --gpu-memory-utilization 0.9"
    told = warnings(command, "h100x2")
    assert told["modules-not-counted"].startswith("attention and shared experts may stay in 16 bits and take up to 4.6")
    assert "modules-not-counted" not in warnings(command, "h200x2")


def test_an_answer_says_what_a_first_start_keeps_from_the_cache() -> None:
    """vLLM 0.28 prints a peak of 1.04 GiB at the first start, and 0.28 GiB when it finds the compiled code."""
    command = "vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ --gpu-memory-utilization 0.6 --max-model-len 32768"
    told = warnings(command, "l4")
    assert told["first-start"].startswith("a first start, which compiles, keeps 761.50 MiB from the cache")
    assert "first-start" not in warnings(command + " --enforce-eager", "l4")
    # It is a small share of a large device.
    assert "first-start" not in warnings(command, "h100")


def test_an_answer_says_what_the_estimate_of_graphs_keeps_from_the_cache_and_how_to_gain_it() -> None:
    """A hybrid has lost a fifth of its cache to the estimate since 0.26 (vLLM issue 50780)."""
    command = (
        "vllm serve unsloth/Qwen3.8-27B-NVFP4 --gpu-memory-utilization 0.93 --max-model-len 32768 --max-num-seqs 8"
    )
    told = warnings(command, "rtx-5090")
    assert told["graph-estimate"].startswith("an estimate of the CUDA graphs keeps 441.38 MiB from the cache")
    without = f"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 {command}"
    assert "graph-estimate" not in warnings(without, "rtx-5090")
    pools = [kvcalc.check(each, "rtx-5090")["fit"]["kv_cache_memory_bytes"] for each in (command, without)]
    assert pools[1] - pools[0] == 410 * 2**20 + 64 * 5 * 2**20 * 5 // 51
    # It is a small share of a large device.
    assert "graph-estimate" not in warnings(command, "h200")
    assert "CUDA graphs" not in {line["name"] for line in kvcalc.check(without, "rtx-5090")["fit"]["lines"] or []}


def test_stated_weights_of_a_device_leave_the_host_its_share() -> None:
    """With experts on the host, the weights that a server printed for the device are not all."""
    name, gpu = "unsloth/Qwen3.6-35B-A3B-GGUF:Q4_K_M", kvcalc.find_devices("rtx-4090")
    counted, stated = (
        estimate(name, devices=gpu, engine="llama.cpp", engine_settings={"n-cpu-moe": "20"}, weights_bytes=size)["fit"]
        for size in (None, 11 * GIB)
    )
    assert stated["weights_bytes"] == 11 * GIB
    assert stated["host"] == counted["host"]
    assert stated["host"]["weights_bytes"] > 9 * GIB
