"""The padding of experts in MXFP4, against the weights that public logs of vLLM and TensorRT-LLM print."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate

GIB = 2**30


def fit(model: str, gpu: str, engine: str = "vllm", **asked: Any) -> dict[str, Any]:
    found: dict[str, Any] = estimate(kvcalc.load_model(model), devices=find_devices(gpu), engine=engine, **asked)["fit"]
    return found


def padding(answer: dict[str, Any]) -> int | None:
    return {line["name"]: line["bytes"] for line in answer["lines"]}.get("padding of the experts")


@pytest.mark.parametrize(
    ("model", "gpu", "loaded"),
    [
        ("gpt-oss-20b", "a100", 13.7153),  # Marlin; vLLM 0.19 on an A100 prints 13.72
        ("gpt-oss-120b", "a100", 65.9651),  # Marlin, as in vllm-project/vllm#23278
        ("gpt-oss-120b", "h100", 64.38),  # Triton; vllm-project/vllm#33155
    ],
)
def test_the_weights_are_those_that_vllm_loads(model: str, gpu: str, loaded: float) -> None:
    # Biases and workspaces of the kernels are not counted.
    assert 0 < loaded - fit(model, gpu)["weights_bytes"] / GIB < 0.1


def test_only_mxfp4_experts_of_vllm_are_padded() -> None:
    matrices = 24 * 32 * 3
    assert padding(fit("gpt-oss-20b", "a100")) == matrices * (3072 * 2944 - 2880**2) * 17 // 32
    # Each of two ranks has 1,440 rows of a matrix, which become 1,536.
    halves = fit("gpt-oss-20b", "a100", tensor_parallel_size=2)
    assert padding(halves) == matrices * (3072 * 1536 - 2880 * 1440) * 17 // 32
    # AMD's kernels pad both to 256, and Triton's on Hopper so pad the inputs of the values only.
    assert padding(fit("gpt-oss-20b", "mi300x")) == matrices * (3072**2 - 2880**2) * 17 // 32
    assert padding(fit("gpt-oss-20b", "h100")) == matrices * 2880 * (3072 - 2880) // 2
    # Each of eight ranks has 360 of the intermediate values: the inputs of one of three matrices, which become 512.
    eighths = fit("gpt-oss-20b", "h100", tensor_parallel_size=8)
    assert padding(eighths) == 24 * 32 * (2 * 360 * (3072 - 2880) + 2880 * (512 - 360)) // 2
    assert padding(fit("gpt-oss-20b", "a100", "sglang")) is None
    assert padding(fit("gpt-oss-20b", "a100", dtype="bf16")) is None
    assert padding(fit("qwen3-8b", "a100")) is None


def test_shared_experts_in_fp8_are_padded_to_whole_blocks() -> None:
    """DeepSeek-V4-Pro's has 24 blocks of 128, of which each of 16 ranks has two: three matrices of 61 layers.

    192 outputs or inputs of a rank become 256. 16 of down_proj's scales are added too. Eight ranks have whole blocks.
    """

    def padded(gpu: str, ranks: int, **asked: Any) -> int | None:
        lines = fit("deepseek-v4-pro", gpu, tensor_parallel_size=ranks, **asked)["lines"]
        return {line["name"]: line["bytes"] for line in lines}.get("padding of fp8 blocks")

    layer = 3 * (256 - 192) * 7168 + 16 * 4
    assert padded("h20x16", 16) == 61 * layer
    assert padded("h20x32", 16, pipeline_parallel_size=2) == 31 * layer
    assert padded("h20x16", 16, dtype="bf16") is None
    assert padded("h20x8", 8) is None


def test_nothing_is_added_on_a_device_whose_kernels_are_not_known() -> None:
    devices = find_devices("a100")
    unknown = devices._replace(gpu=devices.gpu._replace(device_class=None))
    found = estimate(kvcalc.load_model("gpt-oss-20b"), devices=unknown, engine="vllm")["fit"]
    assert padding(found) is None


# "Memory used after loading model weights (inside torch)", with biases, tables and workspaces: gpt-oss-120b on a GB10
# (December 2025), and on GB200 in NVIDIA's own tests.
@pytest.mark.parametrize(("gpu", "ranks", "loaded"), [("gb10", 1, 63.52), ("gb200x2", 2, 34.08), ("gb200x4", 4, 17.11)])
def test_the_weights_are_those_that_tensorrt_llm_loads(gpu: str, ranks: int, loaded: float) -> None:
    found = fit("gpt-oss-120b", gpu, "tensorrt-llm", tensor_parallel_size=ranks)
    assert 0.1 < loaded - found["weights_bytes"] / GIB < 0.4


def test_tensorrt_llms_kernels_round_the_input_alone_to_512() -> None:
    matrices = 24 * 32
    added = 2 * (3072 * 2944 - 2880**2) + 2944**2 - 2880**2
    assert padding(fit("gpt-oss-20b", "b200", "tensorrt-llm")) == matrices * added * 17 // 32
    halves = fit("gpt-oss-20b", "b200", "tensorrt-llm", tensor_parallel_size=2)
    added = 2 * (3072 * 1536 - 2880 * 1440) + 2944 * 1536 - 2880 * 1440
    assert padding(halves) == matrices * added * 17 // 32
    # Triton's layout on Hopper is not known.
    assert padding(fit("gpt-oss-20b", "h100", "tensorrt-llm")) is None
