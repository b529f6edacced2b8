"""Figures that engines printed, from public threads. Geometry and flags are those stated in the thread."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import kvcalc
from kvcalc.engines import load_engine, resolve_kv_dtype
from kvcalc.memory.workload import bind_workload, resolve_workload
from tests.engines.models import ask, gated_delta, gpt_oss, latent, plain, sparse

MIB, GIB = 2**20, 2**30


class Case(NamedTuple):
    """One run and the figure it printed. `source` is the thread."""

    source: str
    config: dict[str, object]
    engine: str
    tokens: int
    printed: float
    options: Mapping[str, Any] = MappingProxyType({})


# Engines print two decimals, so the tolerance is half of the last one: 0.005 MiB or GiB.
SIZES_MIB = [
    Case("ggml-org/llama.cpp#14307", plain(48, 32, 4, 128), "llama.cpp", 4096, 384.0),
    Case("ggml-org/llama.cpp#9436", plain(28, 28, 4, 128), "llama.cpp", 8192, 448.0),
    Case("ggml-org/llama.cpp, command-r at q8_0 and f16", plain(40, 64, 64, 128), "llama.cpp", 512, 490.0,
         {"settings": {"cache-type-k": "q8_0"}}),
    Case("ggml-org/llama.cpp, Llama-3.1-405B at q4_0", plain(126, 128, 8, 128), "llama.cpp", 131072, 18144.0,
         {"kv_dtype": "q4_0"}),
    # DeepSeek-V2-Lite before MLA, with expanded heads.
    Case("ggml-org/llama.cpp, build 4887", latent(27), "llama.cpp", 4096, 1080.0,
         {"settings": {"before-pull": "12801"}}),
    Case("ggml-org/llama.cpp#14201", latent(61), "llama.cpp", 32768, 4148.0, {"settings": {"before-pull": "19067"}}),
    # 40,100 tokens in 40,128 cells.
    Case("ggml-org/llama.cpp, build 4404", plain(28, 24, 8, 128), "llama.cpp", 40100, 4389.0,
         {"settings": {"before-pull": "16812"}}),
]  # fmt: skip

SIZES_GIB = [
    Case("sgl-project/sglang#4094", plain(28, 28, 4, 128), "sglang", 372945, 2 * 9.96),
    Case("sgl-project/sglang#7847", latent(61), "sglang", 131072, 8.58, {"tensor_parallel_size": 16}),
    # K and V of one head per rank, on 4 ranks.
    Case("vllm-project/vllm#21348", plain(94, 64, 4, 128), "sglang", 367404, 2 * 8.23, {"tensor_parallel_size": 4}),
    Case("Dynamo's TensorRT-LLM documents", plain(32, 32, 8, 128), "tensorrt-llm", 220480, 26.91),
    Case("vllm-project/vllm#27508", gpt_oss(36), "vllm", 131072, 4.54,
         {"settings": {"max-num-batched-tokens": "1024", "no-async-scheduling": ""}}),
    Case("vllm-project/vllm, DeepSeek-V2-Lite", latent(27), "vllm", 32768, 0.95),
]  # fmt: skip


@pytest.mark.parametrize("case", SIZES_MIB, ids=lambda case: case.source)
def test_mebibytes_printed(case: Case) -> None:
    held = ask(case.config, case.engine, case.tokens, **case.options)["kv_cache"]["bytes_per_device"]
    assert held / MIB == pytest.approx(case.printed, abs=0.005)


@pytest.mark.parametrize("case", SIZES_GIB, ids=lambda case: case.source)
def test_gibibytes_printed(case: Case) -> None:
    held = ask(case.config, case.engine, case.tokens, **case.options)["kv_cache"]["bytes_per_device"]
    # SGLang prints K and V separately, so there are two roundings.
    assert held / GIB == pytest.approx(case.printed, abs=0.01)


def by_kind(config: dict[str, object], tokens: int, **settings: str) -> dict[str, float]:
    """MiB of llama.cpp's caches by kind. llama.cpp prints each kind separately."""
    spec = kvcalc.read_config(config, "log", "log")
    spec = bind_workload(spec, resolve_workload(spec, tokens))
    dtype, _ = resolve_kv_dtype("llama.cpp", spec, "auto", settings)
    assert not isinstance(dtype, str)
    engine = load_engine("llama.cpp", spec, settings)
    held: dict[str, float] = {}
    for group in spec.layers:
        for cache in group.caches:
            one = engine.cache_bytes(cache, tokens, dtype) / MIB
            held[cache.kind] = held.get(cache.kind, 0) + group.num_layers * one
    return held


def test_gemma_3_with_two_slots_in_one_stream() -> None:
    """ggml-org/llama.cpp#14097: 10 layers of 32,768 cells, 52 of 2,560, in q8_0."""
    config = plain(62, 32, 16, 128, model_type="gemma3_text", sliding_window=1024, sliding_window_pattern=6)
    types = {"cache-type-k": "q8_0", "cache-type-v": "q8_0"}
    held = by_kind(config, 32768, **types, **{"parallel": "2", "kv-unified": ""})
    assert held == {"full_attention": 1360.0, "sliding_window_attention": 552.5}


def test_qwen_3_6_beside_its_states() -> None:
    """ggml-org/llama.cpp#25721: 2.81 + 60.00 MiB of states in addition to a cache in q4_0."""
    held = by_kind(gated_delta(), 262144, **{"cache-type-k": "q4_0", "cache-type-v": "q4_0", "parallel": "1"})
    assert held == {"full_attention": 1440.0, "recurrent_state": 62.8125}


def test_gemma_4_in_llama_servers_own_slots() -> None:
    """b9849, Gemma-4-12B with --ctx-size 8192 --ubatch-size 2048: 128 and 1,920 MiB, 6,144 cells, 4 slots."""
    config = {
        "model_type": "gemma4_text", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "head_dim": 256, "global_head_dim": 512,
        "hidden_size": 3840, "sliding_window": 1024, "num_kv_shared_layers": 0, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert by_kind(config, 8192, **{"ubatch-size": "2048"}) == {
        "full_attention": 128.0, "sliding_window_attention": 1920.0,
    }  # fmt: skip


def test_sglangs_sparse_records_and_indexer() -> None:
    """sgl-project/sglang#11309: 975,424 tokens of DeepSeek-V3.2 in fp8 take 43.67 GiB at 788 bytes per layer."""
    answer = ask(sparse(61), "sglang", 975424, kv_dtype="fp8")["kv_cache"]
    assert answer["total_bytes"] / GIB == pytest.approx(43.67, abs=0.005)


def test_sglangs_states() -> None:
    """Qwen3.5-9B, tp 2: 327,310 tokens take 2.50 GiB for K and the same for V; 186 states take 0.10 + 4.38 GiB."""
    config = gated_delta(num_hidden_layers=32, num_key_value_heads=4)
    settings = {"max-mamba-cache-size": "186"}
    cache = ask(config, "sglang", 327310, tensor_parallel_size=2, settings=settings)["kv_cache"]
    assert cache["bytes_per_device"] / GIB == pytest.approx(2 * 2.50 + 0.10 + 4.38, abs=0.015)


def test_sglangs_request_table() -> None:
    """sgl-project/sglang#735, chatglm3-6b: 21,048 rows of 8,192 + 4 indices take 0.64 GiB; the cache takes 8.99."""
    settings = {"max-running-requests": "21048", "context-length": "8192"}
    answer = ask(plain(28, 32, 2, 128), "sglang", 1, 336793, settings=settings)["engine"]
    table = next(line["bytes"] for line in answer["pool_lines"] if line["name"] == "request table")
    assert table / GIB == pytest.approx(0.64, abs=0.005)


def test_tensorrt_llms_bytes_to_the_byte() -> None:
    """NVIDIA/TensorRT-LLM#1400: 69,524,783,104 bytes for 132,608 tokens of Llama-2-7B. #12683: 45,312 bytes per token
    for 61 + 3 layers in fp8. #224: 10,718 tokens are rounded up to 10,720."""
    config = plain(32, 32, 32, 128)
    assert ask(config, "tensorrt-llm", 132608)["kv_cache"]["total_bytes"] == 69_524_783_104
    assert ask(sparse(64), "tensorrt-llm", 4096, kv_dtype="fp8")["kv_cache"]["bytes_per_token"] == 45_312
    answer = ask(config, "tensorrt-llm", 10718, settings={"tokens-per-block": "16"})
    assert answer["kv_cache"]["total_bytes"] == 10_720 * 524_288


@pytest.mark.parametrize(
    ("gib", "blocks", "tokens"), [(5.98, 299, 567_978), (6.01, 300, 569_878)], ids=["club-3090#612", "club-3090#652"]
)
def test_vllms_hybrid_blocks_to_the_token(gib: float, blocks: int, tokens: int) -> None:
    """Qwen3.6-35B-A3B with an fp8 cache and prefix caching on an RTX 3090: blocks of 2,096 tokens."""
    settings = {"enable-prefix-caching": "", "gdn-prefill-backend": "triton"}
    found = ask(gated_delta(), "vllm", 131072, kv_dtype="fp8", settings=settings,
                kv_memory_bytes=int(gib * GIB))["engine"]  # fmt: skip
    assert (found["block_size"], found["num_gpu_blocks"], found["kv_cache_tokens"]) == (2096, blocks, tokens)


def test_vllms_hybrid_with_drafts() -> None:
    """club-3090#294, Qwen3.6-27B, fp8, tp 2, three drafted tokens: blocks of 1,600 tokens, 179 blocks per request."""
    config = gated_delta(
        num_hidden_layers=64, num_key_value_heads=4, linear_num_value_heads=48, mtp_num_hidden_layers=1
    )
    settings = {"enable-prefix-caching": "", "gdn-prefill-backend": "triton", "num-speculative-tokens": "3"}
    found = ask(config, "vllm", 262144, kv_dtype="fp8", tensor_parallel_size=2, settings=settings)["engine"]
    assert (found["block_size"], found["request_bytes"] // found["bytes_per_block"]) == (1600, 179)


@pytest.mark.parametrize(
    ("config", "tp", "blocks"),
    [(plain(80, 64, 8, 128), 2, 1638), (plain(12, 12, 12, 64), 1, 7281), (plain(88, 96, 8, 128), 4, 2978)],
    ids=["Llama-3.1-70B", "opt-125m", "Mistral-Large-2407"],
)
def test_vllms_blocks_in_4_gib(config: dict[str, object], tp: int, blocks: int) -> None:
    """The number that vLLM printed as "# CPU blocks": the blocks in its swap space of 4 GiB."""
    found = ask(config, "vllm", 2048, tensor_parallel_size=tp, kv_memory_bytes=4 * GIB)["engine"]
    assert found["num_gpu_blocks"] == blocks
