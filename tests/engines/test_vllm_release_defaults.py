"""What vLLM does without flags, release by release. Every figure was read in the source of that release's wheel."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines.place import Place
from kvcalc.engines.vllm.defaults import check_block, default_block, default_cache, device_settings
from kvcalc.errors import LayoutError
from kvcalc.releases import release_of
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate

GIB = 1 << 30


def started(release: str, model: str, device: str, **options: Any) -> dict[str, Any]:
    devices, engine = find_devices(device), f"vllm@{release}"
    document = estimate(kvcalc.load_model(model), context_tokens=131_072, engine=engine, devices=devices, **options)
    return dict(document["engine"])


# get_batch_defaults and _set_default_args of engine/arg_utils.py: tokens in a step and requests of the API server.
@pytest.mark.parametrize(
    ("device", "release", "tokens", "requests"),
    [
        ("b200", "0.33", 16384, 1024),
        ("b200", "0.28", 16384, 1024),
        ("b200", "0.27", 8192, 1024),
        ("mi300x", "0.12", 8192, 1024),
        ("h200", "0.33", 8192, 1024),
        ("gb10", "0.33", 2048, 256),
        ("gb10", "0.32", 2048, 256), ("gb10", "0.12", 2048, 256), ("gb10", "0.8.5", 2048, 256),
        ("a100-80gb", "0.33", 2048, 256),
        ("a800", "0.33", 8192, 1024),  # its name has no "a100"
        ("a100-80gb", "0.9.0", 2048, 256),
        ("a100-80gb", "0.8.5", 8192, 1024),
        ("a100-80gb", "0.8.4", 2048, 256),
        ("a100-80gb", "0.8.3", 2048, 1024),
        ("h100", "0.8.0", 8192, 1024),
        ("h100-nvl", "0.8.4", 8192, 1024),
        ("h200", "0.8.4", 8192, 1024),
        ("gh200-96gb", "0.8.0", 8192, 1024),
        ("mi300x", "0.8.4", 2048, 256),
        ("mi300x", "0.8.0", 2048, 1024),
        ("l40s", "0.8.5", 2048, 256),
    ],
)  # fmt: skip
def test_a_step_has_the_tokens_of_the_release(device: str, release: str, tokens: int, requests: int) -> None:
    engine = started(release, "llama-3-8b", device)
    assert (engine["max_num_batched_tokens"], engine["max_num_seqs"]) == (tokens, requests)


@pytest.mark.parametrize(
    ("release", "steps"),
    [
        ("0.33", {0: (2048, 256), 70: (8192, 1024), 160: (16384, 1024)}),
        ("0.28", {0: (2048, 256), 70: (8192, 1024), 160: (16384, 1024)}),
        ("0.27", {0: (2048, 256), 70: (8192, 1024), 200: (8192, 1024)}),
        ("0.8.5", {0: (2048, 256), 70: (8192, 1024), 200: (8192, 1024)}),
        ("0.8.4", {0: (2048, 256), 200: (2048, 256)}),
        ("0.8.3", {0: (2048, 1024), 200: (2048, 1024)}),
        ("0.7.3", {0: (2048, 256), 200: (2048, 256)}),
    ],
)
def test_a_step_follows_the_memory_from_each_border_on(release: str, steps: dict[int, tuple[int, int]]) -> None:
    def defaults(memory: int) -> tuple[int, int]:
        found = device_settings(memory, "rtx-6000", "blackwell", release_of(f"vllm@{release}"), {})
        return int(found["max-num-batched-tokens"]), int(found["max-num-seqs"])

    before = None
    for gib, expected in steps.items():
        assert defaults(gib * GIB) == expected
        assert before is None or defaults(gib * GIB - 1) == before
        before = expected


# _set_default_max_num_seqs_and_batched_tokens_args (engine/arg_utils.py) and get_mm_max_tokens_per_item (gemma4_mm.py).
@pytest.mark.parametrize(
    ("model", "release", "device", "tokens"),
    [
        ("gemma-4-31b", "0.33", "l40s", 2496), ("gemma-4-31b", "0.22", "l40s", 2496),
        ("gemma-4-31b", "0.21", "l40s", 2048), ("gemma-4-31b", "0.33", "h100", 8192),
        ("gemma-4-e2b", "0.33", "l40s", 2048), ("gemma-3-27b", "0.33", "l40s", 2048),
    ],
)  # fmt: skip
def test_a_step_holds_a_whole_video_of_gemma_4(model: str, release: str, device: str, tokens: int) -> None:
    # Two devices hold the model. The smaller models of the family let images be divided.
    assert started(release, model, f"{device}x2")["max_num_batched_tokens"] == tokens
    asked = {"language-model-only": True}
    alone = started(release, model, f"{device}x2", engine_settings=asked)["max_num_batched_tokens"]
    assert alone == (8192 if device == "h100" else 2048)


# gpu_memory_utilization (config/cache.py) and VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS (envs.py).
@pytest.mark.parametrize(("release", "share", "graphs"), [("0.19.1", 0.9, False), ("0.20.0", 0.92, True)])
def test_the_share_of_the_memory_is_that_of_the_release(release: str, share: float, graphs: bool) -> None:
    found = estimate(kvcalc.load_model("llama-3-8b"), engine=f"vllm@{release}", devices=find_devices("h100"))
    assert found["engine"]["gpu_memory_utilization"] == share
    assert any(line["name"] == "CUDA graphs" for line in found["fit"]["lines"]) == graphs


# default_prefix_caching (engine/arg_utils.py) and is_prefix_caching_supported (config/model.py): no hybrids up to 0.27.
@pytest.mark.parametrize(("release", "caches"), [("0.25", False), ("0.26", False), ("0.27", False), ("0.28", True)])
def test_models_with_states_cache_prefixes_by_default_since_0_28(release: str, caches: bool) -> None:
    assert started(release, "qwen3.6-27b", "h200")["enable_prefix_caching"] == caches
    assert started(release, "llama-3-8b", "h200")["enable_prefix_caching"]


def test_a_started_hybrid_prints_the_logged_tokens() -> None:
    """vLLM 0.26.0 on an L40S, no flag for prefixes: 8.82 GiB are 184 blocks, 141,036 tokens and 1.08x of 131,072."""
    model = kvcalc.load_model("qwen3.6-27b")
    found = estimate(model, context_tokens=131_072, engine="vllm@0.26.0", kv_memory_bytes=int(8.82 * GIB))["engine"]
    assert (found["block_size"], found["num_gpu_blocks"], found["kv_cache_tokens"]) == (784, 184, 141_036)
    # With --max-num-seqs 16, 9.75 GiB were left.
    found = estimate(model, context_tokens=131_072, engine="vllm@0.26.0", kv_memory_bytes=int(9.75 * GIB))["engine"]
    assert (found["kv_cache_tokens"], round(found["max_concurrency"], 2)) == (155_600, 1.19)


# MambaModelConfig (model_executor/models/config.py): Qwen's delta nets keep states for prefixes since 0.15 (mode align)
# and Mamba-2 since 0.12 (mode all). Nothing did in 0.11.
@pytest.mark.parametrize(
    ("model", "release", "caches", "mode"),
    [
        ("qwen3-next-80b-a3b", "0.14", False, "none"),
        ("qwen3-next-80b-a3b", "0.15", True, "align"),
        ("falcon-h1-34b", "0.11", False, "none"),
        ("falcon-h1-34b", "0.12", True, "all"),
        ("falcon-h1-34b", "0.27", True, "all"),
        ("falcon-h1-34b", "0.28", True, "align"),
    ],
)
def test_the_flag_for_prefixes_does_what_the_release_can(model: str, release: str, caches: bool, mode: str) -> None:
    asked = {"enable-prefix-caching": True}
    engine = started(release, model, "h200", engine_settings=asked)
    assert (engine["enable_prefix_caching"], engine["mamba_cache_mode"]) == (caches, mode)


# validate_block_size (config/vllm.py): "In Mamba cache align mode, block_size must be <= max_num_batched_tokens".
@pytest.mark.parametrize(
    ("release", "settings", "starts"),
    [
        ("0.16", {}, True), ("0.17", {}, False), ("0.26", {}, False), ("0.27", {}, True),
        ("0.26", {"max-num-batched-tokens": "544"}, True), ("0.26", {"enable-prefix-caching": None}, True),
    ],
)  # fmt: skip
def test_a_step_holds_a_block_whose_state_is_kept(release: str, settings: dict[str, Any], starts: bool) -> None:
    given = {"max-num-batched-tokens": "512", "max-num-seqs": "8", "enable-prefix-caching": True, **settings}
    asked = {name: value for name, value in given.items() if value is not None}
    on = "qwen3-next-80b-a3b", "h200x2"
    if starts:
        assert started(release, *on, engine_settings=asked, tensor_parallel_size=2)["block_size"] == 544
        return
    with pytest.raises(LayoutError, match="a block of 544 tokens") as refused:
        started(release, *on, engine_settings=asked, tensor_parallel_size=2)
    assert "--max-num-batched-tokens 544" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("model", "kv_type", "device_class", "blocks"),
    [
        # FlashInfer with heads of 256 beside states: multiples of 32 in 0.12 to 0.17, on B200 alone.
        ("qwen3-next-80b-a3b", "bf16", "blackwell", {"0.11.2": 16, "0.12": 32, "0.17": 32, "0.18": 16}),
        ("qwen3-next-80b-a3b", "bf16", "hopper", {"0.12": 16}),
        ("nemotron-3-nano-30b-a3b", "bf16", "blackwell", {"0.12": 16}),
        ("gemma-3-27b", "bf16", "blackwell", {"0.12": 16}),
        # FlashAttention 4 with heads of 512 in fp8 on Hopper.
        ("gemma-4-31b", "fp8", "hopper", {"0.30": 16, "0.31": 64, "0.33": 64}),
        ("gemma-4-31b", "bf16", "hopper", {"0.33": 16}), ("gemma-4-31b", "fp8", "blackwell", {"0.33": 16}),
        ("gemma-3-27b", "fp8", "hopper", {"0.33": 16}),
        # Sparse attention's indexer, on AMD's GPUs and others.
        ("deepseek-v3.2", "bf16", "hopper", {"0.11": 64, "0.33": 64}),
        ("deepseek-v3.2", "bf16", "cdna2", {"0.17": 1, "0.18": 16}),
        ("deepseek-v3.2", "bf16", "cdna3", {"0.17": 1, "0.18": 16}),
        ("deepseek-v3.2", "bf16", "cdna4", {"0.17": 1, "0.18": 16}),
        ("glm-5.3-flash", "bf16", "cdna3", {"0.33": 128}),
        # DeepSeek-V4.1's own kernel reads 128 on B200.
        ("deepseek-v4.1-flash", "fp8", "hopper", {"0.33": 64}),
        ("deepseek-v4.1-flash", "fp8", "blackwell", {"0.33": 128}),
        # MLA in all layers: CUTLASS, FlashMLA, FlashInfer; FlashMLA on Hopper until FlashAttention reads 16 bits.
        ("deepseek-v3", "bf16", "blackwell", {"0.14": 128, "0.15": 64, "0.17": 64, "0.18": 32}),
        ("deepseek-v3", "bf16", "hopper", {"0.17": 64, "0.18": 16}), ("deepseek-v3", "fp8", "hopper", {"0.18": 64}),
        ("deepseek-v3", "bf16", "ampere", {"0.17": 16, "0.33": 16}), ("deepseek-v3", "fp8", "ada", {"0.33": 16}),
    ],
)  # fmt: skip
def test_the_block_of_a_kernel(model: str, kv_type: str, device_class: str, blocks: dict[str, int]) -> None:
    """platforms/cuda.py of 0.11.2 to 0.16.0, get_supported_kernel_block_sizes of each kernel in 0.18.0 to 0.33.0."""
    spec = kvcalc.load_model(model)
    found = {name: default_block(spec, kv_type, Place(release_of(f"vllm@{name}"), device_class)) for name in blocks}
    assert found == blocks
    assert default_block(spec, kv_type, Place(None, device_class)) == list(blocks.values())[-1]


@pytest.mark.parametrize(
    ("model", "device_class", "types"),
    [
        ("deepseek-v4-flash", "hopper", {"0.33": "fp8"}),
        ("glm-5.2", "blackwell", {"0.31": None, "0.32": "fp8", "0.33": "fp8"}), ("glm-5.2", "hopper", {"0.33": None}),
        ("deepseek-v3.2", "blackwell-rtx", {"0.27": None, "0.28": "fp8", "0.33": "fp8"}),
        ("deepseek-v3.2", "hopper", {"0.11.0": "fp8", "0.11.1": None, "0.11.2": None, "0.33": None}),
        ("deepseek-v3.2", "blackwell", {"0.33": None}),
        ("deepseek-v3", "blackwell-rtx", {"0.11.0": None, "0.33": None}),
    ],
)  # fmt: skip
def test_the_type_of_a_cache_that_auto_means(model: str, device_class: str, types: dict[str, str | None]) -> None:
    """0.11.0 had fp8 for DeepSeek-V3.2 everywhere, and 0.32 has it for GLM-5 on B200 (`default_cache`)."""
    spec = kvcalc.load_model(model)
    for name, expected in types.items():
        found = default_cache(spec, Place(release_of(f"vllm@{name}"), device_class))
        assert (found and found[0]) == expected, name
    newest = default_cache(spec, Place(None, device_class))
    assert (newest and newest[0]) == [*types.values()][-1]


@pytest.mark.parametrize(
    ("model", "multiple", "device_class", "size", "starts"),
    [
        ("llama-3.1-8b", 16, "hopper", 24, False), ("llama-3.1-8b", 16, "hopper", 48, True),
        ("llama-3.1-8b", 16, "cdna3", 24, False), ("deepseek-v4-flash", 256, "hopper", 128, False),
        # AITER's kernels for latents read blocks of any size.
        ("deepseek-v3", 16, "cdna2", 1, True), ("deepseek-v3", 16, "cdna3", 1, True),
        ("deepseek-v3.2", 16, "cdna4", 1, True), ("deepseek-v3", 16, None, 1, True),
        ("deepseek-v3", 16, "hopper", 1, False),
        ("glm-5.3-flash", 128, "cdna3", 64, False), ("glm-5.3-flash", 128, "hopper", 256, True),
        ("deepseek-v4.1-flash", 64, "hopper", 32, False),
    ],
)  # fmt: skip
def test_the_sizes_of_blocks_that_kernels_read(
    model: str, multiple: int, device_class: str | None, size: int, starts: bool
) -> None:
    spec = kvcalc.load_model(model)
    if starts:
        check_block(spec, size, device_class)
        return
    with pytest.raises(LayoutError, match=f"need multiples of {multiple}") as refused:
        check_block(spec, size, device_class)
    assert refused.value.hint == f"use --block-size {multiple}"
