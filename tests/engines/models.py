"""Small configs and helper functions that the engine tests share."""

from __future__ import annotations

from typing import Any

import kvcalc
from tests.documents import estimate


def plain(layers: int = 2, heads: int = 8, kv_heads: int = 2, head_dim: int = 64, **more: object) -> dict[str, object]:
    """A decoder without windows."""
    return {
        "model_type": "llama", "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": heads * head_dim,
        "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


def latent(layers: int = 3, model_type: str = "deepseek_v3", **more: object) -> dict[str, object]:
    """DeepSeek's MLA: a latent of 512 and a rotary key of 64."""
    return {
        "model_type": model_type, "num_hidden_layers": layers, "num_attention_heads": 16, "hidden_size": 1024,
        "kv_lora_rank": 512, "q_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


def sparse(layers: int = 3) -> dict[str, object]:
    """`latent` with an indexer of 128 in every layer."""
    return latent(layers, "deepseek_v32", index_head_dim=128, index_n_heads=4, index_topk=2048)


def gated_delta(**more: object) -> dict[str, object]:
    """Qwen3.6-35B-A3B: 40 layers. Every fourth layer has attention with 2 KV heads of 256; the others keep a state."""
    return {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "torch_dtype": "bfloat16",
        "mamba_ssm_dtype": "float32", **more,
    }  # fmt: skip


def gpt_oss(layers: int = 24) -> dict[str, object]:
    """Windows of 128 in every other layer. 24 layers is gpt-oss-20b, 36 layers is gpt-oss-120b."""
    return {
        "model_type": "gpt_oss", "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "hidden_size": 2880, "sliding_window": 128, "torch_dtype": "bfloat16",
    }  # fmt: skip


def ask(config: dict[str, object], engine: str, tokens: int, batch: int = 1, **options: Any) -> dict[str, Any]:
    """The estimate of a config. `settings` are the engine's own settings."""
    spec = kvcalc.read_config(config, "test", "test")
    settings = options.pop("settings", {})
    return estimate(spec, context_tokens=tokens, batch_size=batch, engine=engine, engine_settings=settings, **options)


def total(config: dict[str, object], engine: str, tokens: int, batch: int = 1, **options: Any) -> int:
    """The total bytes of a config. Checks that the lines add up to them on one device."""
    answer = ask(config, engine, tokens, batch, **options)
    found, cache = answer["engine"], answer["kv_cache"]
    if "pool_lines" in found:
        assert sum(line["bytes"] for line in found["pool_lines"]) == cache["bytes_per_device"]
    elif "request_lines" in found:
        assert batch * sum(line["bytes"] for line in found["request_lines"]) == cache["bytes_per_device"]
    return int(cache["total_bytes"])


def lines(config: dict[str, object], engine: str, tokens: int, batch: int = 1, **options: Any) -> dict[str, int]:
    """The lines of the account, by name."""
    found = ask(config, engine, tokens, batch, **options)["engine"]
    return {line["name"]: line["bytes"] for line in found.get("pool_lines") or found["request_lines"]}
