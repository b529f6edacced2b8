"""Falcon, GPT-BigCode (StarCoder) and ChatGLM: they have their own keys for whether all heads share one K and V."""

from __future__ import annotations

from typing import Any

from kvcalc.model.families.decoder import read_row
from kvcalc.model.families.decoder_table import row
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

_ROWS = {"falcon": "_falcon", "gpt_bigcode": "_bigcode", "chatglm": "_chatglm"}


def known_keys(model_type: str) -> frozenset[str]:
    """Return the keys that a config of this type may have, besides the common ones."""
    keys: frozenset[str] = row(_ROWS[model_type])["keys"]
    return keys


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """If absent, multi_query is true (Falcon, StarCoder) and multi_query_attention is false (ChatGLM).

    Sources: FalconConfig, FalconAttention and GPTBigCodeConfig, Transformers 5.23.0; zai-org/chatglm3-6b's
    modeling_chatglm.py.
    """
    if model_type == "falcon":
        return read_row(config, model_type, _falcon(config))
    if model_type == "gpt_bigcode":
        shared = 1 if config.boolean("multi_query", default=True) else None
        return read_row(config, model_type, {**row("_bigcode"), "num_kv_heads": shared})
    groups = None
    if config.boolean("multi_query_attention", default=False):
        groups = config.integer("multi_query_group_num")
    return read_row(config, model_type, {**row("_chatglm"), "num_kv_heads": groups})


def _falcon(config: ConfigReader) -> dict[str, Any]:
    """multi_query applies only to the first architecture (7B), num_kv_heads only to the new one (40B, 180B).

    For the new architecture, Transformers repeats K and V for all heads (see the engine's module).
    """
    is_new = config.boolean("new_decoder_architecture", default=False)
    if is_new:
        kv_heads = config.optional_integer("num_kv_heads", "n_head_kv")
    else:
        kv_heads = 1 if config.boolean("multi_query", default=True) else None
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    if config.boolean("parallel_attn", default=True):
        count = config.optional_integer("num_ln_in_parallel_attn") or (2 if is_new else 1)
        norms = ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)
    rotary = not config.boolean("alibi", default=False)
    return {**row("_falcon"), "num_kv_heads": kv_heads, "norms": norms, "rotary": rotary}
