"""Falcon, GPT-BigCode (StarCoder) and ChatGLM: they have their own keys for whether all heads share one K and V."""

from __future__ import annotations

from typing import Any

from kvcalc.model.families.decoder import read_row
from kvcalc.model.families.decoder_table import GPT2, RENAMED_KEYS, renamed, row
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

_FALCON_KEYS = frozenset("num_kv_heads multi_query".split())

_FALCON = row(
    keys=_FALCON_KEYS, kv_heads_key="", hidden=("hidden_size", "n_embed"), inner=("ffn_hidden_size",), inner_factor=4,
    bias="bias", mlp_bias="bias", norm_bias=True, mlp="plain", vocab_size=65024, tied=True,
    mlp_names=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    attention_names={"prefix": "self_attention", "fused": "query_key_value", "output": "dense"},
    prefix="transformer.h.{}.", embedding="transformer.word_embeddings", final_norms=("transformer.ln_f",),
)  # fmt: skip
_BIGCODE = renamed(GPT2, knows="multi_query", bias=True)
_CHATGLM = renamed(
    layers=("num_layers",), heads=("num_attention_heads",), hidden=("hidden_size",), positions=("seq_length",),
    head_dim_key="kv_channels", qkv_bias=True, is_remote=True,
    knows="kv_channels multi_query_attention multi_query_group_num",
)  # fmt: skip


def known_keys(model_type: str) -> frozenset[str]:
    """Return the keys that a config of this type may have, besides the common ones."""
    return _FALCON_KEYS if model_type == "falcon" else RENAMED_KEYS


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """If absent, multi_query is true (Falcon, StarCoder) and multi_query_attention is false (ChatGLM).

    Sources: FalconConfig, FalconAttention and GPTBigCodeConfig, Transformers 5.23.0; zai-org/chatglm3-6b's
    modeling_chatglm.py.
    """
    if model_type == "falcon":
        return read_row(config, model_type, _falcon(config))
    if model_type == "gpt_bigcode":
        shared = 1 if config.boolean("multi_query", default=True) else None
        return read_row(config, model_type, row(_BIGCODE, num_kv_heads=shared))
    groups = None
    if config.boolean("multi_query_attention", default=False):
        groups = config.integer("multi_query_group_num")
    return read_row(config, model_type, row(_CHATGLM, num_kv_heads=groups))


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
    return row(_FALCON, num_kv_heads=kv_heads, norms=norms, rotary=rotary)
