"""The longest context and the largest batch are the same limits wherever they are named."""

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.throughput.hardware import Devices, find_devices
from tests.documents import estimate

GPU = find_devices("h100").gpu


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        # The encoder's input follows the context, so the layers of each device are laid out again for every length.
        ("t5-small", {"engine": "llama.cpp", "devices": Devices(GPU, 3)}),
        ("t5-small", {"engine": "llama.cpp", "devices": Devices(GPU, 4), "batch_size": 8}),
        # These releases start only if each stage has memory for a request in all layers.
        ("bart-large", {"engine": "vllm@0.15", "pipeline_parallel_size": 2, "kv_memory_bytes": 2**30}),
        # Compressors empty their buffers, so the cache of 256 tokens is smaller than that of 255.
        ("deepseek-v4-flash", {"kv_memory_bytes": 13_000_000}),
        ("llama-3-8b", {"engine": "vllm@0.15", "pipeline_parallel_size": 2, "kv_memory_bytes": 2**30}),
    ],
)
def test_the_longest_context_fits_and_one_more_token_does_not(model: str, asked: dict[str, Any]) -> None:
    def fit(tokens: int) -> dict[str, Any]:
        found: dict[str, Any] = estimate(kvcalc.load_model(model), context_tokens=tokens, **asked)["fit"]
        return found

    longest = fit(100)["memory_context_tokens"]
    assert [fit(longest + more)["fits"] for more in (0, 1, 2)] == [True, False, False]


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("logical", {}), ("vllm", {}), ("sglang", {}), ("sglang", {"page-size": "64"}), ("transformers", {}),
        ("mlx", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", ["llama-3-8b", "gpt-oss-20b"])
def test_the_largest_batch_fits_in_just_its_bytes(model: str, engine: str, settings: dict[str, str]) -> None:
    """A byte less holds a sequence less, also beside what the first sequence takes alone (SGLang's dummy page)."""
    spec, asked = kvcalc.load_model(model), {"context_tokens": 2000, "engine": engine, "engine_settings": settings}
    for batch in (1, 2, 7, 40):
        size = estimate(spec, batch_size=batch, **asked)["kv_cache"]["bytes_per_device"]
        for memory, most in ((size, batch), (size - 1, batch - 1)):
            assert estimate(spec, kv_memory_bytes=memory, **asked)["fit"]["max_batch_size"] == most


def test_no_request_runs_in_a_stage_that_does_not_start() -> None:
    """A request takes 512 MiB of each stage, but vLLM 0.14 to 0.16 ask each for the 1 GiB of all layers."""
    asked = {"context_tokens": 8192, "engine": "vllm@0.15", "pipeline_parallel_size": 2}
    model = kvcalc.load_model("llama-3-8b")
    fit = estimate(model, **asked, kv_memory_bytes=700_000_000)["fit"]
    assert (fit["fits"], fit["max_batch_size"], fit["kv_cache_bytes"]) == (False, 0, 2**29)
    (row,) = kvcalc.sweep(
        model, contexts=[8192], engines=["vllm@0.15"], pipeline_parallel_size=2, kv_memory_bytes=700_000_000
    )["points"]
    assert row["fits"] is False


@pytest.mark.parametrize(
    ("model", "engine", "gpu", "settings"),
    [
        ("starcoder2-7b", "vllm", "h100", {"max-num-seqs": "8"}),
        ("qwen3.6-35b-a3b", "sglang", "h200", {"max-mamba-cache-size": "40"}),
        ("llama-3.1-8b", "tensorrt-llm", "h100", {"max-batch-size": "8"}),
    ],
)
def test_a_sweep_runs_no_more_requests_than_the_engine(
    model: str, engine: str, gpu: str, settings: dict[str, str]
) -> None:
    """The memory has room for 64 requests, but the engine's setting does not allow them."""
    spec, devices = kvcalc.load_model(model), find_devices(gpu)
    points = kvcalc.sweep(
        spec, contexts=[1024], batches=[8, 9, 64], engines=[engine], gpus=[gpu], engine_settings=settings
    )["points"]
    asked = {"engine": engine, "devices": devices, "engine_settings": settings, "context_tokens": 1024}
    single = [estimate(spec, batch_size=batch, **asked)["fit"]["fits"] for batch in (8, 9, 64)]
    assert [point["fits"] for point in points] == single == [True, False, False]


@pytest.mark.parametrize(("model", "kv_dtype"), [("deepseek-v2-lite", "auto"), ("gpt-oss-20b", "nvfp4")])
def test_a_sweep_refuses_the_windows_that_an_estimate_refuses(model: str, kv_dtype: str) -> None:
    asked: dict[str, Any] = {"engine_settings": {"max-attention-window": "128,1024"}}
    with pytest.raises(UsageError, match="--max-attention-window"):
        estimate(kvcalc.load_model(model), engine="tensorrt-llm@1.2", kv_dtype=kv_dtype, context_tokens=1024, **asked)
    with pytest.raises(UsageError, match="--max-attention-window"):
        kvcalc.sweep(model, contexts=[1024], engines=["tensorrt-llm@1.2"], kv_dtypes=[kv_dtype], **asked)
