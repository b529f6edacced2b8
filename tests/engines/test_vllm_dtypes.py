"""vLLM's own cache types, computed by hand. A layer of `plain()` has 2 heads of 64 in K and in V."""

from __future__ import annotations

import pytest

from kvcalc.errors import KvcalcError, UsageError
from tests.engines.models import ask, gated_delta, latent, lines, plain, sparse, total
from tests.engines.shapes import gemma4, minimax_m3


@pytest.mark.parametrize(
    ("dtype", "token_bytes"),
    [
        # 2 layers x 2 heads of 128 elements and two fp32 scales.
        ("int8_per_token_head", 2 * 2 * (128 + 8)),
        ("fp8_per_token_head", 2 * 2 * (128 + 8)),
        ("int4_per_token_head", 2 * 2 * (64 + 8)),
        # 32 bytes and 4 scales for K and for V of each head.
        ("nvfp4", 2 * 2 * 2 * 36),
        ("nvfp4_4over6", 2 * 2 * 2 * 36),
        ("fp8_e4m3", 2 * 2 * 128),
        ("fp8_e5m2", 2 * 2 * 128),
        ("fp8_inc", 2 * 2 * 128),
        ("float16", 2 * 2 * 256),
    ],
)
def test_a_token_of_plain_heads(dtype: str, token_bytes: int) -> None:
    assert total(plain(), "vllm", 64, kv_dtype=dtype) == 64 * token_bytes


def test_scales_stand_beside_what_is_stored() -> None:
    answer = ask(plain(), "vllm", 64, kv_dtype="INT8_PER_TOKEN_HEAD")
    assert answer["kv_cache"]["dtype"] == "int8_per_token_head"
    assert lines(plain(), "vllm", 64, kv_dtype="int8_per_token_head") == {
        "stored": 64 * 512, "different layout or dtype": 64 * 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "token_bytes"), [("fp8", 656), ("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352), ("bf16", 1152)]
)
def test_a_token_of_sparse_attention(dtype: str, token_bytes: int) -> None:
    # The indexer's key always takes 128 + 4 bytes.
    assert total(sparse(), "vllm", 64, kv_dtype=dtype) == 64 * 3 * (token_bytes + 132)


def test_a_checkpoints_nvfp4_cache_is_followed() -> None:
    config = plain(quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"})
    assert total(config, "vllm", 64) == 64 * 2 * 2 * 2 * 36


def test_a_block_grows_until_it_holds_a_state() -> None:
    # 2 heads x (512 + 8) = 1,040 bytes; a state of 8,192 x 3 x 2 + 32 x 128 x 128 x 4 = 2,146,304 needs 2,064 of them.
    settings = {"no-enable-prefix-caching": ""}
    found = ask(gated_delta(), "vllm", 4096, kv_dtype="int8_per_token_head", settings=settings)["engine"]
    assert found["block_size"] == 2064
    # 10 attention layers, so groups have 10 layers: 2 blocks for attention, and one for each of 3 groups of states.
    assert found["request_bytes"] == (2 + 3) * 10 * 2064 * 1040


def test_minimax_m3_keeps_index_keys_in_bf16_and_blocks_of_128() -> None:
    # 200 tokens take 2 blocks. 4 layers of 2 x 4 x 128 elements, and 3 index keys of 256 bytes.
    assert total(minimax_m3(), "vllm", 200) == 256 * (4 * 2048 + 3 * 256)
    assert total(minimax_m3(), "vllm", 200, kv_dtype="fp8") == 256 * (4 * 1024 + 3 * 256)
    assert total(minimax_m3(), "vllm", 200, kv_dtype="nvfp4") == 256 * (4 * 8 * 72 + 3 * 256)
    assert ask(minimax_m3(), "vllm", 200)["engine"]["block_size"] == 128
    assert total(minimax_m3(), "vllm", 200, settings={"block-size": "256"}) == 256 * (4 * 2048 + 3 * 256)
    for options in ({"settings": {"block-size": "16"}}, {"kv_dtype": "int8_per_token_head"}):
        with pytest.raises(UsageError, match=r"need multiples of 128|MiniMax-M3"):
            ask(minimax_m3(), "vllm", 200, **options)


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        (plain(), "octave_k3v4", "octave_k3v4: this vLLM type is not modelled"),
        (plain(), "octave_k3v4", "octave_k3v4: this vLLM type"),
        (plain(), "ultraquant_4bit", "ultraquant_4bit: this vLLM type"),
        (plain(), "fp8_ds_mla", "only for sparse attention with MLA"),
        (latent(), "fp8_ds_mla", "does not support it for the latent"),
        (latent(), "nvfp4", "nvfp4: vLLM does not support it for the latent"),
        (sparse(), "nvfp4", "the latent of sparse attention"),
        (sparse(), "int8_per_token_head", "the latent of sparse attention"),
        (plain(head_dim=72), "nvfp4", "a multiple of 16"),
        (plain(), "int8", "int8: not a supported cache dtype of vLLM"),
        (plain(), "q8_0", "q8_0: not a supported cache dtype of vLLM"),
        (plain(), "int8_per_token", "not a dtype"),
    ],
)
def test_what_vllm_does_not_keep_a_cache_in(config: dict[str, object], dtype: str, message: str) -> None:
    with pytest.raises(KvcalcError, match=message) as caught:
        ask(config, "vllm", 64, kv_dtype=dtype)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("dtype", "first", "before", "row", "now"),
    [
        # Two layers of two heads of 64.
        ("nvfp4", "0.20", "0.19", 288, 64), ("int8_per_token_head", "0.20", "0.19", 4 * (2 * 64 + 8), 64),
        ("int4_per_token_head", "0.25", "0.24", 4 * (2 * 32 + 8), 64),
        # TurboQuant skips up to half of the layers at each end, here both. Blocks have 32 tokens since 0.25.
        ("turboquant_k8v4", "0.20", "0.19", 2 * 512, 64),
    ],
)  # fmt: skip
def test_the_first_release_with_a_type(dtype: str, first: str, before: str, row: int, now: int) -> None:
    assert total(plain(), f"vllm@{first}", 64, kv_dtype=dtype) == 64 * row
    assert total(plain(), "vllm@0.33", 64, kv_dtype=dtype) == now * row
    with pytest.raises(UsageError, match="this release of vLLM does not have it"):
        ask(plain(), f"vllm@{before}", 64, kv_dtype=dtype)


def test_windows_in_nvfp4_since_0_26() -> None:
    config = gemma4(shared=0)
    assert ask(config, "vllm@0.26", 512, kv_dtype="nvfp4")["engine"]["bytes_per_block"]
    with pytest.raises(UsageError, match=r"0\.26 and later"):
        ask(config, "vllm@0.25", 512, kv_dtype="nvfp4")


def test_windows_have_pages_of_the_same_type() -> None:
    # A token takes 2 heads x (2 x 256 + 8) bytes in a windowed layer, and 2 x (2 x 512 + 8) bytes in a full layer.
    # Neither divides the other, so pages are padded to the larger size.
    found = ask(gemma4(shared=0), "vllm", 512, kv_dtype="int8_per_token_head", settings={"no-async-scheduling": ""})
    assert found["engine"]["bytes_per_block"] == 2 * 16 * 2 * 1032
