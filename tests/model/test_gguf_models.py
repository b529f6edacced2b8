"""GGUF files with the dimensions of real models give the same layers and bytes as the config of the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import ModelError
from kvcalc.model.spec import ModelSpec, cache_runs

pytest.importorskip("gguf", reason="the extra `gguf`")

from kvcalc.notes import sentence
from tests.documents import estimate
from tests.model.gguf_writing import Pairs, base, config_of, mla, ssm, tensors_of, write
from tests.rows import every_row

Config = dict[str, Any]

# Every model fits on this device.
H200 = kvcalc.find_devices("h200")
HUGE = H200._replace(gpu=H200.gpu._replace(memory_bytes=10**13))

KEY_LENGTHS = ("attention.key_length", "attention.value_length")


def plain(config: Config) -> Pairs:
    return base(config)


def adding(*keys: str, make: Callable[[Config], Pairs] = plain, **more: Any) -> Callable[[Config], Pairs]:
    """Return the pairs of `make`, the window if `keys` names it, and `more`, in which two underscores mean a dot."""

    def build(config: Config) -> Pairs:
        pairs = make(config)
        if "window" in keys:
            pairs["attention.sliding_window"] = config.get("sliding_window") or 4096
        return {**pairs, **{key.replace("__", "."): value for key, value in more.items()}}

    return build


def by_layer(kinds: list[str], attends: str, heads: int) -> list[int]:
    return [heads if kind == attends else 0 for kind in kinds]


def gemma4(config: Config) -> Pairs:
    kinds = config.get("layer_types") or [
        "sliding_attention" if (n + 1) % 6 else "full_attention" for n in range(config["num_hidden_layers"])
    ]
    slides = [kind == "sliding_attention" for kind in kinds]
    pairs = {
        **base(config), "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"], "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"], "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides, "attention.shared_kv_layers": config.get("num_kv_shared_layers", 0),
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
    }  # fmt: skip
    if config.get("use_double_wide_mlp"):
        shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
        pairs["feed_forward_length"] = [inner] * (len(slides) - shared) + [2 * inner] * shared
    full = config.get("num_global_key_value_heads")
    if full:
        pairs["attention.head_count_kv"] = [config["num_key_value_heads"] if s else full for s in slides]
    return pairs


def llama4(config: Config) -> Pairs:
    step = config.get("interleave_moe_layer_step", 1)
    return {
        **base(config), "feed_forward_length": config["intermediate_size_mlp"], "interleave_moe_layer_step": step,
        "expert_feed_forward_length": config["intermediate_size"],
    }  # fmt: skip


def mixer(inner: int, rank: int) -> Pairs:
    """Return the keys of Mamba, which has no groups."""
    return {"ssm.inner_size": inner, "ssm.time_step_rank": rank, "ssm.state_size": 16, "ssm.conv_kernel": 4}


def mamba(config: Config) -> Pairs:
    inner = config.get("intermediate_size") or 2 * config["hidden_size"]
    return {**base(config), "attention.head_count": 0, "feed_forward_length": 0, **mixer(inner, 160)}


def mamba2(config: Config) -> Pairs:
    heads, width = config["num_heads"], config["head_dim"]
    pairs = {key: value for key, value in base(config).items() if key not in KEY_LENGTHS}
    pairs |= {"context_length": 2**20, "attention.head_count": 0, "feed_forward_length": 0}
    return {**pairs, **ssm(heads * width, heads, config["state_size"], config["n_groups"])}


def jamba(config: Config) -> Pairs:
    heads = [
        config["num_key_value_heads"] if n % config["attn_layer_period"] == config["attn_layer_offset"] else 0
        for n in range(config["num_hidden_layers"])
    ]
    return {**base(config), "attention.head_count_kv": heads, **mixer(2 * config["hidden_size"], 256)}


def granite(config: Config) -> Pairs:
    heads = by_layer(config["layer_types"], "attention", config["num_key_value_heads"])
    mixer = ssm(2 * config["hidden_size"], config["mamba_n_heads"], config["mamba_d_state"], config["mamba_n_groups"])
    return {**base(config), "attention.head_count_kv": heads, **mixer}


def falcon_h1(config: Config) -> Pairs:
    inner = config.get("mamba_d_ssm") or 2 * config["hidden_size"]
    return {**base(config), **ssm(inner, config["mamba_n_heads"], config["mamba_d_state"], config["mamba_n_groups"])}


def nemotron(config: Config) -> Pairs:
    kinds = config.get("hybrid_override_pattern") or [
        {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}[kind] for kind in config["layers_block_type"]
    ]
    width = config.get("attention_head_dim") or config.get("head_dim") or 128
    heads, mixer = config["mamba_num_heads"], config["mamba_num_heads"] * config["mamba_head_dim"]
    inner = config["moe_intermediate_size"] if "E" in kinds else config["intermediate_size"]
    return {
        **base(config), "block_count": len(kinds), "attention.key_length": width, "attention.value_length": width,
        "attention.head_count": [config["num_attention_heads"] if kind == "*" else 0 for kind in kinds],
        "attention.head_count_kv": [config["num_key_value_heads"] if kind == "*" else 0 for kind in kinds],
        "feed_forward_length": [inner if kind in "-E" else 0 for kind in kinds],
        **ssm(mixer, heads, config["ssm_state_size"], config["n_groups"]),
    }  # fmt: skip


def lfm2(config: Config) -> Pairs:
    heads = by_layer(config["layer_types"], "full_attention", config["num_key_value_heads"])
    return {
        **base(config),
        "attention.head_count_kv": heads,
        "shortconv.l_cache": config["conv_L_cache"],
        "vocab_size": 9,
    }


def delta(config: Config) -> Pairs:
    heads = config["linear_num_value_heads"]
    inner = heads * config["linear_value_head_dim"]
    return {
        **base(config), **ssm(inner, heads, config["linear_key_head_dim"], config["linear_num_key_heads"]),
        "full_attention_interval": 4,
    }  # fmt: skip


def kimi(config: Config) -> Pairs:
    full = config["linear_attn_config"]["full_attn_layers"]
    heads = [config["num_attention_heads"] if n + 1 in full else 0 for n in range(config["num_hidden_layers"])]
    return {**mla(config), "attention.head_count_kv": heads, "kda.head_dim": 128, "ssm.conv_kernel": 4}


def indexed(config: Config) -> Pairs:
    return {
        **mla(config), "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"], "attention.indexer.top_k": config["index_topk"],
    }  # fmt: skip


def ahead(config: Config) -> Pairs:
    """Add a layer for multi-token prediction after the others."""
    return {**base(config), "block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}


def glm(config: Config) -> Pairs:
    return {**indexed(config), "block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}


def v4(config: Config) -> Pairs:
    return {
        **base(config), "attention.sliding_window": config["sliding_window"], "rope.dimension_count": 64,
        "attention.q_lora_rank": config["q_lora_rank"], "attention.key_length": 512, "attention.value_length": 512,
        "attention.compress_ratios": config["compress_ratios"], "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128, "attention.indexer.top_k": config["index_topk"], "hash_layer_count": 3,
        "hyper_connection.count": 4,
    }  # fmt: skip


def m3(config: Config) -> Pairs:
    return {
        **base(config), "leading_dense_block_count": 3, "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 128, "attention.indexer.top_k": 16, "attention.indexer.block_size": 128,
        "attention.indexer.local_blocks": 1,
    }  # fmt: skip


def deci(config: Config) -> Pairs:
    """Heads are 0 if a layer has no attention. A layer with a linear map instead has query heads but no KV heads."""
    heads, kv, inner = [], [], []
    for block in config["block_configs"]:
        wide = int(2 * block["ffn"].get("ffn_mult", 0) * config["hidden_size"] / 3)
        inner.append(-(-wide // 256) * 256)
        attention = block["attention"]
        group = attention.get("n_heads_in_group")
        heads.append(0 if attention.get("no_op") else config["num_attention_heads"])
        kv.append(config["num_attention_heads"] // group if group else 0)
    width = config["hidden_size"] // config["num_attention_heads"]
    return {
        **base(config), "attention.head_count": heads, "attention.head_count_kv": kv, "rope.dimension_count": width,
        "attention.key_length": width, "attention.value_length": width, "feed_forward_length": inner,
    }  # fmt: skip


def t5(config: Config) -> Pairs:
    return {
        **base({**config, "num_hidden_layers": config["num_layers"], "num_attention_heads": config["num_heads"]}),
        "attention.key_length": config["d_kv"], "attention.value_length": config["d_kv"],
        "decoder_block_count": config.get("num_decoder_layers") or config["num_layers"],
        "attention.relative_buckets_count": 32, "decoder_start_token_id": 0,
    }  # fmt: skip


def falcon(config: Config) -> Pairs:
    heads = config["num_attention_heads"]
    kv = config.get("num_kv_heads") if config.get("new_decoder_architecture") else 1
    return {**base(config), "attention.head_count_kv": kv or heads}


MODELS: list[tuple[str, str, Callable[[Config], Pairs]]] = [
    ("llama-7b", "llama", plain),
    ("llama-3-70b", "llama", plain),
    ("llama-3.2-1b", "llama", adding(rope__dimension_count=64, vocab_size=128256)),
    ("mixtral-8x7b", "llama", plain),
    ("mistral-nemo", "llama", plain),
    ("qwen2.5-7b", "qwen2", plain),
    ("qwen2.5-vl-7b", "qwen2vl", plain),
    ("qwen3-0.6b", "qwen3", plain),
    ("qwen3-30b-a3b", "qwen3moe", plain),
    ("qwen3-vl-2b", "qwen3vl", adding(n_deepstack_layers=3)),
    ("gemma-2b", "gemma", plain),
    ("gemma-2-9b", "gemma2", adding("window")),
    ("gemma-3-1b", "gemma3", adding("window")),
    ("gemma-3-27b", "gemma3", adding("window")),
    ("gemma-3n-e4b", "gemma3n", adding("window", attention__shared_kv_layers=15, altup__num_inputs=4)),
    ("gemma-3n-e4b", "gemma3n", adding("window")),
    ("gemma-4-31b", "gemma4", gemma4),
    ("gemma-4-e4b", "gemma4", gemma4),
    ("gemma-4-e2b", "gemma4", gemma4),
    ("gemma-4-26b-a4b", "gemma4", gemma4),
    ("gpt-oss-120b", "gpt-oss", adding("window")),
    ("gpt-oss-20b", "gpt-oss", adding("window")),
    ("phi-2", "phi2", plain),
    ("phi-3-mini-4k", "phi3", adding("window")),
    ("falcon-7b", "falcon", falcon),
    ("falcon-40b", "falcon", falcon),
    ("gpt2", "gpt2", plain),
    ("bloom-176b", "bloom", plain),
    ("command-r", "command-r", plain),
    ("olmo-2-32b", "olmo2", plain),
    ("olmo-3-7b", "olmo2", adding("window")),
    ("glm-4.5", "glm4moe", ahead),
    ("minimax-m2.5", "minimax-m2", plain),
    ("smollm3-3b", "smollm3", plain),
    ("llama-4-scout", "llama4", llama4),
    ("deepseek-v3", "deepseek2", mla),
    ("deepseek-v2-lite", "deepseek2", mla),
    ("kimi-k2", "deepseek2", mla),
    ("glm-4.7-flash", "deepseek2", mla),
    ("deepseek-v3.2", "deepseek32", indexed),
    ("glm-5", "glm-dsa", glm),
    ("glm-5.2", "glm-dsa", glm),
    ("minicpm3-4b", "minicpm3", lambda config: mla(config, old=True)),
    ("deepseek-v4-flash", "deepseek4", v4),
    ("mamba-2.8b", "mamba", mamba),
    ("mamba2-780m", "mamba2", mamba2),
    ("jamba-v0.1", "jamba", jamba),
    ("granite-4.0-h-small", "granitehybrid", granite),
    ("falcon-h1-tiny-90m", "falcon-h1", falcon_h1),
    ("nemotron-h-56b", "nemotron_h", nemotron),
    ("nemotron-3-nano-30b-a3b", "nemotron_h_moe", nemotron),
    ("lfm2-8b-a1b", "lfm2moe", lfm2),
    ("qwen3-next-80b-a3b", "qwen3next", delta),
    ("qwen3.5-27b", "qwen35", delta),
    ("qwen3.5-35b-a3b", "qwen35moe", delta),
    ("kimi-linear-48b", "kimi-linear", kimi),
    ("kimi-k3", "kimi-k3", kimi),
    ("minimax-m3", "minimax-m3", m3),
    ("nemotron-super-49b", "deci", deci),
    ("t5-small", "t5", t5),
    ("bert-base", "bert", adding(attention__causal=False, pooling_type=2)),
]


def kept(spec: ModelSpec) -> list[tuple[int, int, list[tuple[str, Any]]]]:
    """Return the layers with their caches, without the types of states: a float has 16 bits in both cases."""
    return [(first, last, [(type(c).__name__, c) for c in caches]) for first, last, caches in cache_runs(spec)]


@every_row("preset, arch, pairs", MODELS)
def test_a_file_keeps_what_the_config_of_the_same_model_keeps(
    preset: str, arch: str, pairs: Callable[[Config], Pairs], tmp_path: Path
) -> None:
    config = kvcalc.load_model(preset)
    file = kvcalc.load_model(str(write(tmp_path / "model.gguf", arch, pairs(config_of(preset)))))
    assert kept(file) == kept(config)
    assert file.is_encoder is config.is_encoder
    for name in ("num_heads", "num_kv_heads", "qk_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"):
        assert getattr(file.attention, name) == getattr(config.attention, name), name
    for engine in ("logical", "llama.cpp"):
        question: dict[str, Any] = {"context_tokens": 5000, "batch_size": 2, "kv_dtype": "fp16", "engine": engine}
        assert answer(file, question) == answer(config, question), engine


# The converter leaves out that the output gate of Kimi K3 has full rank, and an encoder decodes nothing.
WITHOUT_SPEED = {"kimi-k3": "parameters active per token", "bert-base": "encoder"}


@every_row("preset, arch, pairs", MODELS)
def test_a_file_is_as_fast_as_the_model_in_its_type(
    preset: str, arch: str, pairs: Callable[[Config], Pairs], tmp_path: Path
) -> None:
    config = kvcalc.load_model(preset)
    tensors = tensors_of(config, arch, "F16")
    file = kvcalc.load_model(str(write(tmp_path / "model.gguf", arch, pairs(config_of(preset)), tensors, file_type=1)))
    question: dict[str, Any] = {"context_tokens": 500, "engine": "llama.cpp", "kv_dtype": "fp16", "devices": HUGE}
    found = estimate(file, **question)
    if preset in WITHOUT_SPEED:
        assert found["throughput"] is None
        assert any(WITHOUT_SPEED[preset] in sentence(warning) for warning in found["warnings"])
        return
    expected = estimate(config, dtype="fp16", **question)
    for figure in ("decode_tokens_per_second", "prefill_seconds"):
        assert found["throughput"][figure] == pytest.approx(expected["throughput"][figure], rel=0.02), figure


def answer(spec: ModelSpec, question: dict[str, Any]) -> Any:
    """Return the cache of a model, except for MiniCPM3 in llama.cpp, which is refused in both cases."""
    try:
        found = estimate(spec, **question)["kv_cache"]
    except ModelError as error:
        return error.message.removeprefix(f"{spec.name}: ")
    return {key: found[key] for key in ("stored_bytes", "total_bytes", "bytes_per_token", "fixed_bytes_per_sequence")}
