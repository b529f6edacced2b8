"""Figures that engines printed in public start-up logs, in start_up_logs.yaml, must follow from the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import kvcalc
from kvcalc.model.drafting import Speculation
from tests.documents import audit, estimate

ROWS = yaml.safe_load((Path(__file__).parent / "start_up_logs.yaml").read_text(encoding="utf-8"))


def lines_of(row: dict[str, Any]) -> list[str]:
    """The log's lines after the line in which the engine names its settings."""
    settings = row.get("settings", "")
    if row["engine"].startswith("vllm"):
        found = [f"Initializing a V1 LLM engine with config: {settings}"]
        found += [f"Setting attention block size to {row['block']} tokens"] if "block" in row else []
        found += [f"Available KV cache memory: {row['memory']} GiB"] if "memory" in row else []
        found += [f"GPU KV cache size: {row['tokens']} tokens"] if "tokens" in row else []
        if "requests" in row:
            found.append(f"Maximum concurrency for {row['length']} tokens per request: {row['requests']:.2f}x")
        return [*found, *row.get("lines", [])]
    return [*([f"server_args=ServerArgs({settings})"] if settings else []), *row["lines"]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_what_the_engine_printed_follows_from_the_model(row: dict[str, Any]) -> None:
    text = "\n".join(lines_of(row)) + "\n"
    found = audit(text, "log", model=kvcalc.load_model(row["model"]), engine=row["engine"], **row.get("given", {}))
    wrong = [
        f"{one['name']}: {one['printed']}, not {one['computed']}"
        for one in found["figures"]
        if one["verdict"] == "unexplained"
    ]
    assert not wrong
    assert found["equal"] > 0


def test_a_dflash_heads_layers_are_a_group_of_their_own() -> None:
    """Qwen3.6-35B-A3B-DFlash under vLLM 0.22 on GB10: 8 layers and 6 tokens. 71.59 GiB are 4,250 blocks of 1,104.

    The log pads 10 layers of attention by 6 and 30 of states by 2, to groups of 8, and prints 1,470,588 tokens, 7.35x.
    """
    config = {
        "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "hidden_size": 2048, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "vocab_size": 248_320, "dflash_config": {"target_layer_ids": [1, 10, 19, 28, 37]}, "torch_dtype": "bfloat16",
    }  # fmt: skip
    head = kvcalc.read_config(config, "head", "test")
    found = estimate(
        kvcalc.load_model("qwen3.6-35b-a3b"), context_tokens=200_000, engine="vllm@0.22.0",
        kv_memory_bytes=4250 * 1104 * 2048 * 8, speculative=Speculation("dflash", 6, None, head),
        engine_settings={"enable-prefix-caching": True, "max-num-batched-tokens": "32768"},
    )["engine"]  # fmt: skip
    assert (found["block_size"], found["num_gpu_blocks"], found["kv_cache_tokens"]) == (1104, 4250, 1_470_588)
    assert round(4250 * 1104 * 2048 * 8 / 2**30, 2) == 71.59


@pytest.mark.parametrize(
    ("kv_dtype", "context", "memory", "tokens", "requests"),
    [("fp8", 147_456, 11.15, 451_603, 3.06), ("bf16", 65_536, 11.15, 214_135, 3.27),
     ("bf16", 204_800, 16.01, 374_847, 1.83)],
)  # fmt: skip
def test_a_dflash2_head_keeps_a_window(
    kv_dtype: str, context: int, memory: float, tokens: int, requests: float
) -> None:
    """Qwen3.8-27B-DFlash2 under vLLM 0.27.1 on two cards: 5 layers with a window of 2,048 tokens, and 7 tokens.

    Source: noonghunna/club-3090#1084, #1085 and #1086.
    """
    config = {
        "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "hidden_size": 5120, "num_hidden_layers": 5,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 17_408,
        "vocab_size": 248_320, "dflash_config": {"target_layer_ids": [5, 19, 33, 47, 61]}, "torch_dtype": "bfloat16",
        "sliding_window": 2048, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 5,
    }  # fmt: skip
    head = kvcalc.read_config(config, "head", "test")
    found = estimate(
        kvcalc.load_model("qwen3.8-27b"), context_tokens=context, engine="vllm@0.27.1", tensor_parallel_size=2,
        kv_dtype=kv_dtype, kv_memory_bytes=int(memory * 2**30), speculative=Speculation("dflash", 7, None, head),
        engine_settings={"enable-prefix-caching": True, "max-num-batched-tokens": "8192"},
    )["engine"]  # fmt: skip
    assert (found["kv_cache_tokens"], round(found["max_concurrency"], 2)) == (tokens, requests)


def test_the_states_of_ling_3_tiny() -> None:
    """Under its branch of SGLang (inclusionAI/ling-cookbook). 36 of 42 layers keep a state, of 8 heads of 128."""
    config = {
        "model_type": "bailing_hybrid", "hidden_size": 1536, "num_hidden_layers": 42, "layer_group_size": 7,
        "num_attention_heads": 8, "head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_experts": 128,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    lines = (
        "Mamba Cache is allocated. max_mamba_cache_size: 614, conv_state size: 0.38GB, ssm_state size: 10.81GB",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1933682, KV size: 12.45 GB",
    )
    found = audit("\n".join(lines) + "\n", "log", model=kvcalc.read_config(config, "tiny", "test"), engine="sglang")
    assert {one["name"]: one["verdict"] for one in found["figures"]} == {
        "max_mamba_cache_size": "input", "conv_state_bytes": "equal", "ssm_state_bytes": "equal", "tokens": "input",
        "kv_bytes": "equal",
    }  # fmt: skip
