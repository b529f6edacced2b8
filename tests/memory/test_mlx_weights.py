"""The bytes of weights in MLX's types: counted by hand, and compared with published conversions."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import MLX_TYPES, parse_dtype, parse_weight_dtype
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.server.weights import describe_weights

# Per layer: q and o 512 x 512, k and v 128 x 512, gate, up and down 1024 x 512. Embedding and head 1000 x 512.
LAYER, TABLE, NORMS = 2 * 512 * 512 + 2 * 128 * 512 + 3 * 1024 * 512, 1000 * 512, 5 * 512
DENSE: dict[str, object] = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, object] = {
    **DENSE, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [],
}  # fmt: skip


def weights_of(spec: ModelSpec, dtype: str | None = None) -> Any:
    notes: list[Note] = []
    return describe_weights(spec, spec, dtype, parse_dtype(spec.torch_dtype or "bf16", "torch_dtype"), notes)


def config_bytes(config: dict[str, object], dtype: str | None = None) -> int:
    found: int = weights_of(kvcalc.read_config(config, "test", "test"), dtype)["bytes"]
    return found


@pytest.mark.parametrize(
    ("dtype", "bits_per_weight"),
    [
        ("mlx-2bit", 2.5), ("mlx-3bit", 3.5), ("mlx-4bit", 4.5), ("mlx-5bit", 5.5), ("mlx-6bit", 6.5),
        ("mlx-8bit", 8.5), ("mlx-4bit-g32", 5.0), ("mlx-4bit-g128", 4.25), ("mlx-mxfp4", 4.25), ("mlx-mxfp8", 8.25),
        ("mlx-nvfp4", 4.5), ("4bit", 4.5), ("8BIT", 8.5),
    ],
)  # fmt: skip
def test_every_matrix_and_the_embedding_are_quantized(dtype: str, bits_per_weight: float) -> None:
    quantized = 2 * LAYER + 2 * TABLE
    assert config_bytes(DENSE, dtype) == quantized * bits_per_weight / 8 + 2 * NORMS


def test_a_tied_embedding_is_read_as_the_head() -> None:
    spec = kvcalc.read_config({**DENSE, "tie_word_embeddings": True}, "test", "test")
    found = weights_of(spec, "mlx-4bit")
    assert found["active_bytes_per_token"] == found["bytes"] == (2 * LAYER + TABLE) * 9 // 16 + 2 * NORMS


def test_a_matrix_that_groups_do_not_divide_is_not_quantized() -> None:
    # down_proj has 1,000 columns, which 64 does not divide. gate_proj and up_proj have 1,000 rows.
    narrow = config_bytes({**DENSE, "intermediate_size": 1000}, "mlx-4bit")
    attention = 2 * (2 * 512 * 512 + 2 * 128 * 512)
    up = 2 * 2 * 1000 * 512
    assert narrow == (attention + up + 2 * TABLE) * 9 // 16 + 2 * (2 * 1000 * 512) + 2 * NORMS


@pytest.mark.parametrize(
    ("model_type", "bytes_per_weight"), [("qwen3_moe", 8.5 / 8), ("mixtral", 4.5 / 8), ("dots1", 2.0)]
)
def test_a_router_has_8_bits_or_16_where_the_class_says_so(model_type: str, bytes_per_weight: float) -> None:
    config = {**EXPERTS, "model_type": model_type}
    if model_type == "mixtral":
        config = {**DENSE, "model_type": "mixtral", "intermediate_size": 128, "num_local_experts": 8}
    if model_type == "dots1":
        config = {
            **DENSE, "model_type": "dots1", "moe_intermediate_size": 128, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "n_shared_experts": 0, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
        }  # fmt: skip
    attention, experts, router = 2 * 512 * 512 + 2 * 128 * 512, 8 * 3 * 128 * 512, 8 * 512
    linear = 2 * (attention + experts) + 2 * TABLE
    norms = config_bytes(config, "bf16") - 2 * (linear + 2 * router)
    assert 0 < norms < 20_000
    assert config_bytes(config, "mlx-4bit") == linear * 9 // 16 + 2 * router * bytes_per_weight + norms


# total_size of model.safetensors.index.json of mlx-community's repositories.
@pytest.mark.parametrize(
    ("name", "dtype", "total"),
    [
        ("llama-3.1-8b", "mlx-4bit", 4_517_404_672),  # Llama-3.1-8B-Instruct-4bit
        ("llama-3.2-3b", "mlx-4bit", 1_807_423_488),  # Llama-3.2-3B-Instruct-4bit
    ],
)
def test_the_size_is_that_of_a_published_conversion(name: str, dtype: str, total: int) -> None:
    assert weights_of(kvcalc.load_model(name), dtype)["bytes"] == total


# Sizes in exo-explore/exo's model cards. These models keep a bias per expert in fp32, which is not counted as a weight.
@pytest.mark.parametrize(
    ("name", "dtype", "total"),
    [("glm-5", "mlx-8bit", 790_517_400_864), ("minimax-m2.5", "mlx-6bit", 185_826_705_408)],
)
def test_a_model_with_experts_has_the_size_of_a_published_conversion(name: str, dtype: str, total: int) -> None:
    assert weights_of(kvcalc.load_model(name), dtype)["bytes"] == pytest.approx(total, rel=2e-5)


def test_a_converted_config_names_its_type() -> None:
    stated = {"group_size": 64, "bits": 4, "mode": "affine"}
    for key in ("quantization_config", "quantization"):
        spec = kvcalc.read_config({**DENSE, key: stated}, "test", "test")
        found = weights_of(spec)
        assert (found["dtype"], found["bytes"]) == ("mlx-4bit", config_bytes(DENSE, "mlx-4bit"))


def test_modules_that_differ_are_counted_with_their_own_bits() -> None:
    config = {**EXPERTS, "model_type": "qwen3_moe"}
    plain = config_bytes(config, "mlx-4bit")
    eight = {"group_size": 64, "bits": 8}
    stated: dict[str, object] = {
        "group_size": 64, "bits": 4, "model.layers.0.mlp.gate": eight, "model.layers.1.mlp.gate": eight,
        "model.layers.1.mlp.switch_mlp.down_proj": {"group_size": 32, "bits": 6}, "lm_head": False,
    }  # fmt: skip
    down, head = 8 * 512 * 128, TABLE
    # 6 bits in groups of 32 are 7 bits per weight.
    expected = plain + down * (7 - 4.5) / 8 + head * (16 - 4.5) / 8
    assert config_bytes({**config, "quantization": stated}) == expected


def test_gpt_oss_with_8_bits_around_its_experts_has_the_size_of_a_published_conversion() -> None:
    # mlx-community/gpt-oss-20b-MXFP4-Q8. Biases, norms and sinks stay in 16 bits.
    spec = kvcalc.load_model("gpt-oss-20b")
    eight = {"group_size": 64, "bits": 8, "mode": "affine"}
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.router")
    modules = {f"model.layers.{layer}.{part}": eight for layer in range(spec.num_layers) for part in parts}
    stated = {"group_size": 32, "bits": 4, "mode": "mxfp4", "model.embed_tokens": eight, "lm_head": eight, **modules}
    assert weights_of(spec._replace(quantization=stated))["bytes"] == 12_076_119_168


@pytest.mark.parametrize(
    "stated",
    [{"group_size": 64, "bits": 7}, {"group_size": 16, "bits": 4}, {"group_size": 32, "bits": 4, "mode": "exl3"}],
)
def test_an_unknown_mode_is_not_counted(stated: dict[str, object]) -> None:
    found = weights_of(kvcalc.read_config({**DENSE, "quantization_config": stated}, "test", "test"))
    assert found["bytes"] is None


def test_a_cache_has_no_mlx_type_by_name() -> None:
    for name in MLX_TYPES:
        assert parse_weight_dtype(name.upper()) == MLX_TYPES[name]
        with pytest.raises(UsageError):
            parse_dtype(name, "--kv-dtype")
