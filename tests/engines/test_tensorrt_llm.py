"""TensorRT-LLM's blocks, computed by hand. A token of `plain()` takes 1,024 bytes."""

from __future__ import annotations

import pytest

from kvcalc.errors import ModelError, UsageError
from tests.documents import texts
from tests.engines.models import ask, gpt_oss, latent, lines, plain, sparse, total
from tests.engines.shapes import gemma4, nemotron_nas

TOKEN = 1024
V1 = "tensorrt-llm@1.2"  # with one pool for GPT-OSS too


def test_a_sequence_takes_whole_blocks() -> None:
    assert total(plain(), "tensorrt-llm", 100, 3) == 3 * 128 * TOKEN
    assert total(plain(), "tensorrt-llm", 100, settings={"tokens-per-block": "64"}) == 128 * TOKEN
    assert lines(plain(), "tensorrt-llm", 100) == {"stored": 100 * TOKEN, "blocks rounded up": 28 * TOKEN}


def test_heads_are_divided_and_replicated_and_the_latent_is_whole() -> None:
    assert ask(plain(), "tensorrt-llm", 32, tensor_parallel_size=8)["kv_cache"]["bytes_per_device"] == 32 * TOKEN // 2
    assert ask(latent(), "tensorrt-llm", 32, tensor_parallel_size=8)["kv_cache"]["bytes_per_device"] == 32 * 3 * 1152


def test_nvfp4_halves_a_byte_and_keeps_a_scale_for_16() -> None:
    # 512 elements per token take 256 bytes and 32 scales.
    assert total(plain(), "tensorrt-llm", 32, kv_dtype="nvfp4") == 32 * (256 + 32)


def test_sparse_attention_keeps_576_and_132() -> None:
    assert total(sparse(), "tensorrt-llm", 32, kv_dtype="fp8") == 32 * 3 * 708


def test_windows_are_kept_whole_and_said_so() -> None:
    answer = ask(gpt_oss(), V1, 1024)
    assert answer["kv_cache"]["total_bytes"] == 1024 * 24 * 2048
    assert lines(gpt_oss(), V1, 1024)["windows kept whole"] == 12 * 896 * 2048
    assert any("--max-attention-window" in warning for warning in texts(answer))


def test_windows_may_have_pools_that_share_the_memory_equally() -> None:
    # 12 layers of 128 tokens and 12 of 1,024, each 24,576 bytes per token. Half of the bytes of 4,000 tokens is 62
    # blocks.
    settings = {"max-attention-window": "128,4096"}
    found = ask(gpt_oss(), V1, 1024, settings=settings, kv_memory_bytes=4000 * 24576)["engine"]
    pool = {"num_layers": 12, "bytes_per_block": 32 * 24576, "num_gpu_blocks": 62}
    assert found["window_pools"] == [{"window": 128, **pool}, {"window": 1024, **pool}]
    assert (found["num_gpu_blocks"], found["max_concurrency"]) == (62, 62 / 32)
    # 128 + 1,024 tokens are not less than 1,152, so TensorRT-LLM would make the windows smaller.
    found = ask(gpt_oss(), V1, 1024, settings=settings, kv_memory_bytes=1152 * 24576)["engine"]
    assert found["num_gpu_blocks"] is None
    assert ask(gpt_oss(), V1, 100, settings=settings)["engine"]["window_pools"] is None


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({}, 31),  # 1,000 tokens are 31 blocks of 32
        ({"free-gpu-memory-fraction": "0.9"}, 28),  # 900 tokens
        ({"max-tokens": "500"}, 15),
        ({"max-tokens": "5000"}, 156),  # without a fraction, max-tokens decides
        ({"max-tokens": "5000", "free-gpu-memory-fraction": "0.9"}, 28),  # with a fraction, the smaller one decides
    ],
)
def test_blocks_of_the_memory(settings: dict[str, str], blocks: int) -> None:
    found = ask(plain(), "tensorrt-llm", 64, settings=settings, kv_memory_bytes=1000 * TOKEN)["engine"]
    assert (found["num_gpu_blocks"], found["kv_cache_tokens"]) == (blocks, 32 * blocks)
    assert found["max_concurrency"] == blocks / 2


def test_what_tensorrt_llm_refuses() -> None:
    with pytest.raises(ModelError, match=r"head dims that differ between layers \(KVCacheManagerV2\) is not modelled"):
        ask({**gemma4(), "model_type": "gemma4_unified_text"}, "tensorrt-llm", 32)
    with pytest.raises(UsageError, match="below 1"):
        ask(plain(), "tensorrt-llm", 32, settings={"free-gpu-memory-fraction": "1"})
    with pytest.raises(UsageError, match="MLA has one pool"):
        ask(latent(), "tensorrt-llm", 1024, settings={"max-attention-window": "128,1024"})
    with pytest.raises(UsageError, match="for nvfp4"):
        ask(gpt_oss(), V1, 1024, kv_dtype="nvfp4", settings={"max-attention-window": "128,1024"})
    with pytest.raises(UsageError, match="not a cache dtype of TensorRT-LLM"):
        ask(plain(), "tensorrt-llm", 32, kv_dtype="int8")


def test_nemotron_nas_has_heads_of_its_own_in_every_layer() -> None:
    # 2, 0 and 1 heads of 64: a block of 32 tokens takes 32 x 3 x 2 x 64 x 2 bytes, and 100 tokens take 4 blocks.
    assert total(nemotron_nas(4, None, 8), "tensorrt-llm", 100) == 4 * 32 * 3 * 256
    blocks = [{"attention": {"replace_with_linear": True}}, {"attention": {"n_heads_in_group": 4}}]
    linear = {**nemotron_nas(4, 4), "block_configs": blocks}
    assert total(linear, "tensorrt-llm", 32) == 32 * 2 * 256
