"""Buffers for LoRA adapters: A and B of every linear layer, in every slot."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate


def buffers(name: str, devices: str = "h100", engine: str = "vllm", **asked: Any) -> int:
    answer = estimate(kvcalc.load_model(name), devices=find_devices(devices), engine=engine, **asked)
    lines = answer["fit"]["lines"]
    assert sum(line["bytes"] for line in lines) == answer["fit"]["device_bytes"]
    return sum(line["bytes"] for line in lines if "LoRA" in line["name"])


def lora(loras: int, rank: int, slots: str = "max-loras") -> dict[str, Any]:
    return {"engine_settings": {slots: str(loras), "max-lora-rank": str(rank)}}


# Llama-3.1-8B: q, k, v, o, gate, up and down, each with its inputs and its outputs.
LAYER = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 2 * (4096 + 14336) + (14336 + 4096)


def test_every_linear_layer_has_a_and_b_in_every_slot() -> None:
    assert buffers("llama-3.1-8b", **lora(4, 64)) == 4 * 64 * 32 * LAYER * 2
    assert buffers("llama-3.1-8b", **lora(8, 64, "max-loras-per-batch"), engine="sglang") == 8 * 64 * 32 * LAYER * 2


def test_ranks_split_the_outputs_of_columns_and_the_inputs_of_rows() -> None:
    q_k_v = (4096 + 1024) + 2 * (4096 + 256)
    layer = q_k_v + (1024 + 4096) + 2 * (4096 + 3584) + (3584 + 4096)
    assert buffers("llama-3.1-8b", "h100x4", tensor_parallel_size=4, **lora(2, 16)) == 2 * 16 * 32 * layer * 2


def test_the_stage_with_most_layers_has_the_most_buffers() -> None:
    """vLLM cuts 32 layers into 10, 11 and 11."""
    assert buffers("llama-3.1-8b", "h100x3", pipeline_parallel_size=3, **lora(1, 16)) == 16 * 11 * LAYER * 2


def test_every_expert_has_its_own() -> None:
    attention = (2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048)
    experts = 128 * (2 * (2048 + 768) + (768 + 2048))
    assert buffers("qwen3-30b-a3b", **lora(1, 16)) == 16 * 48 * (attention + experts) * 2


def test_the_defaults_are_those_of_the_engines() -> None:
    assert buffers("llama-3.1-8b", engine_settings={"max-lora-rank": "16"}) == buffers("llama-3.1-8b", **lora(1, 16))
    assert buffers("llama-3.1-8b", engine_settings={"max-loras": "2"}) == buffers("llama-3.1-8b", **lora(2, 16))
    assert buffers("llama-3.1-8b") == 0


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="max-loras"):
        buffers("llama-3.1-8b", engine_settings={"max-loras": "0"})
