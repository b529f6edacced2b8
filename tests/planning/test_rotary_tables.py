"""vLLM's tables of cosines and sines, against "Model loading took" of public logs."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines.vllm.loading import rotary_tables
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate
from tests.engines.models import latent, plain

GIB = 2**30
MIB = 2**20


def fit(model: Any, gpu: str = "h100", engine: str = "vllm", **asked: Any) -> dict[str, Any]:
    found = kvcalc.load_model(model) if isinstance(model, str) else model
    answer: dict[str, Any] = estimate(found, devices=find_devices(gpu), engine=engine, **asked)["fit"]
    return answer


def tables(answer: dict[str, Any]) -> int | None:
    return {line["name"]: line["bytes"] for line in answer["lines"]}.get("rotary tables")


@pytest.mark.parametrize(
    ("model", "ranks", "loaded"),
    [
        ("llama-3.1-8b", 1, 14.99),
        ("llama-3.1-8b", 2, 7.51),  # every rank has the whole table
        ("llama-3.1-8b", 4, 3.77),
        ("qwen3-14b", 1, 27.52),
        ("qwen3-8b", 1, 15.27),
    ],
)
def test_the_weights_and_tables_are_those_that_vllm_loads(model: str, ranks: int, loaded: float) -> None:
    found = fit(model, f"h100x{ranks}", tensor_parallel_size=ranks)
    assert found["weights_bytes"] / GIB == pytest.approx(loaded, abs=0.006)


def test_a_table_has_a_row_for_every_position_that_the_model_has() -> None:
    # 10,485,760 positions of 128 dimensions in 16 bits, with a context of 4,096 tokens.
    answer = fit("llama-4-scout", "h100x8", tensor_parallel_size=8)
    assert tables(answer) == 2560 * MIB


def test_the_tables_of_a_rotation_in_parts_and_by_place() -> None:
    # A quarter of 256 dimensions. Those that rotate by the place in an image have four times the rows.
    assert tables(fit("qwen3-next-80b-a3b", "h100x4", tensor_parallel_size=4)) == 262144 * 64 * 2
    assert tables(fit("qwen3-vl-8b")) == 4 * 262144 * 128 * 2  # vllm-project/vllm#44738: 7/8 of it is 224 MiB
    # Gemma 4's sliding layers have heads of 256 dimensions, the others of 512; 7/8 of it is 336 MiB.
    assert tables(fit("gemma-4-31b")) == 262144 * (256 + 512) * 2
    assert tables(fit("deepseek-v3", "h200x8", tensor_parallel_size=8)) == 163840 * 64 * 2


@pytest.mark.parametrize(
    ("scaling", "rows"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "deepseek_yarn", "factor": 2.0}, 65536),
        ({"rope_type": "yarn", "original_max_position_embeddings": 4096}, 32768),
        ({"type": "linear", "factor": 2.0}, 65536),
        ({"type": "linear"}, 32768),
        ({"type": "dynamic", "factor": 2.0}, 65536),
        ({"type": "dynamic", "factor": 2.0, "alpha": 1000.0}, 32768),
        ({"rope_type": "longrope", "factor": 8.0}, 32768),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, 32768 + 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, 16384),
        (None, 32768),
    ],
)
def test_the_rows_follow_the_scaling_that_the_config_states(scaling: dict[str, Any] | None, rows: int) -> None:
    config = {
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 2048, "vocab_size": 1024,
        "max_position_embeddings": 32768, "rope_scaling": scaling,
    }  # fmt: skip
    assert tables(fit(kvcalc.read_config(config, "a model", "a test"))) == rows * 128 * 2


def small(model_type: str, **more: object) -> int:
    """The bytes of a table of 1,000 rows and 64 dimensions a head, by what the config of a small model says."""
    config = {
        **plain(), "model_type": model_type, "max_position_embeddings": 1000, "intermediate_size": 64, "vocab_size": 64,
        "num_key_value_heads": 8, **more,
    }  # fmt: skip
    return dict(rotary_tables(kvcalc.read_config(config, "a model", "a test"))).get("rotary tables", 0)


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "mamba_ssm_dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "more", "rotated"),
    [
        ("glm", {}, 32), ("glm4", {}, 32), ("glm4_moe", EXPERTS, 32), ("glm4v_moe_text", EXPERTS, 32),
        ("gpt_neox", {}, 16), ("nemotron", {}, 32), ("persimmon", {}, 32), ("phi", {}, 32), ("stablelm", {}, 16),
        ("qwen3_next", DELTA, 16), ("llama", {}, 64),
    ],
)  # fmt: skip
def test_a_type_rotates_its_own_part_of_a_head(model_type: str, more: dict[str, object], rotated: int) -> None:
    """The defaults of partial_rotary_factor and rotary_pct in the configs of Transformers 5.23.0."""
    assert small(model_type, **more) == 1000 * rotated * 2


@pytest.mark.parametrize(
    ("model_type", "stated", "rotated"),
    [
        ("llama", {"partial_rotary_factor": 0.25}, 16), ("gpt_neox", {"rotary_pct": 0.5}, 32),
        # The parameters of the rotation say it first. Nonsense changes nothing.
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.25}, 32),
        ("llama", {"partial_rotary_factor": 1}, 64), ("phi", {"partial_rotary_factor": 1.5}, 32),
        ("phi", {"partial_rotary_factor": 0}, 32), ("phi", {"partial_rotary_factor": None}, 32),
        # MiniMax-M2 says the number of its dimensions.
        ("minimax_m2", {"rotary_dim": 32}, 32), ("minimax_m2", {"rotary_dim": 64}, 64),
        ("minimax_m2", {"rotary_dim": 65}, 64), ("minimax_m2", {"rotary_dim": 0}, 64),
    ],
)  # fmt: skip
def test_a_config_says_which_part_of_a_head_is_rotated(
    model_type: str, stated: dict[str, object], rotated: int
) -> None:
    assert small(model_type, **stated) == 1000 * rotated * 2


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("qwen2_vl_text", {}), ("qwen2_5_vl_text", {}), ("qwen3_vl_text", {}), ("qwen3_vl_moe_text", EXPERTS),
        ("glm4v_text", {"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}),
        ("qwen3_5_text", DELTA), ("qwen3_5_moe_text", DELTA),
    ],
)  # fmt: skip
def test_models_that_rotate_by_the_place_in_an_image_have_four_times_the_rows(
    model_type: str, more: dict[str, object]
) -> None:
    """MRotaryEmbedding (layers/rotary_embedding/mrope.py, vLLM 0.33.0). Qwen3.5 rotates a quarter of a head."""
    rotated = 16 if model_type.startswith("qwen3_5") else 64
    assert small(model_type, **more) == 4 * 1000 * rotated * 2


def test_what_a_latent_and_gemma_4_state_does_not_make_their_tables_smaller() -> None:
    """The rotary key beside a latent is rotated as a whole. Gemma 4: gemma4_rope.py of vLLM 0.33.0."""
    both = {"max_position_embeddings": 1000, "intermediate_size": 64, "vocab_size": 64, "partial_rotary_factor": 0.5}
    latents = kvcalc.read_config({**latent(), **both}, "a model", "a test")
    assert dict(rotary_tables(latents)) == {"rotary tables": 1000 * 64 * 2}
    stated = small("gemma4_text", partial_rotary_factor=0.5)
    assert stated == small("gemma4_text") > 0


def test_a_model_that_states_no_length_has_no_table() -> None:
    assert small("llama", max_position_embeddings=None) == 0


def test_other_engines_and_models_without_rotation_have_no_tables() -> None:
    assert tables(fit("llama-3.1-8b", engine="sglang")) is None
    assert tables(fit("gpt2")) is None
