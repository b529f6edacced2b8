"""Configs of families that the tests of several engines use."""

from __future__ import annotations

from tests.engines.models import plain

STEP = ["full_attention", *["sliding_attention"] * 3]


def renamed(model_type: str, **keys: object) -> dict[str, object]:
    """A config of a family that has its own key names."""
    return {"model_type": model_type, "torch_dtype": "bfloat16", **keys}


def windowed(kind: str, layers: int, **more: object) -> dict[str, object]:
    """2 KV heads of 64: a row of 256 elements, 512 bytes."""
    return {**plain(layers), "model_type": kind, "sliding_window": 512, **more}


def minimax_m3(layers: int = 4, dense: int = 1, **more: object) -> dict[str, object]:
    """4 KV heads of 128, and an indexer of 128 in all layers except the leading dense layers."""
    frequency = [int(number >= dense) for number in range(layers)]
    sparse = {
        "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_block_size": 128, "sparse_topk_blocks": 16,
        "sparse_attention_freq": frequency, "sparse_disable_index_value": frequency,
    }  # fmt: skip
    config = {**plain(layers, 64, 4, 128), "model_type": "minimax_m3", "moe_layer_freq": frequency}
    return {**config, "sparse_attention_config": sparse, **more}


def t5(layers: int = 6, decoder_layers: int = 6) -> dict[str, object]:
    """8 heads of 64."""
    return renamed(
        "t5", num_layers=layers, num_decoder_layers=decoder_layers, num_heads=8, d_model=512, d_kv=64, d_ff=2048
    )


def gemma4(layers: int = 12, shared: int = 4) -> dict[str, object]:
    """Every sixth layer has full attention with a head of 512; the others have a window and 2 heads of 256."""
    return renamed(
        "gemma4_text", num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, hidden_size=2048,
        head_dim=256, global_head_dim=512, sliding_window=512, num_kv_shared_layers=shared,
    )  # fmt: skip


def nemotron_nas(*groups: int | None) -> dict[str, object]:
    """8 heads of 64. One layer per argument, which is the number of heads in a group, or None for no attention."""
    blocks = [{"attention": {"no_op": group is None, "n_heads_in_group": group}} for group in groups]
    return renamed(
        "nemotron-nas", num_hidden_layers=len(groups), num_attention_heads=8, hidden_size=512, block_configs=blocks
    )
