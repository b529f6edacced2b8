"""MosaicML's MPT and Databricks' DBRX: no biases, scales alone in their norms."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.tensors import Block, ModelWeights, around, experts, linear, norm, plain_mlp, router


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """The weights of one of the families below."""
    return _dbrx(config) if model_type == "dbrx" else _mpt(config)


def _mpt(config: ConfigReader) -> ModelWeights:
    """Source: MptForCausalLM, Transformers 5.23.0, which reads neither no_bias nor expansion_ratio."""
    config = config.with_defaults({"vocab_size": 50368})
    width, vocab = config.integer("d_model", "hidden_size"), config.integer("vocab_size")
    if config.config.get("expansion_ratio") not in (None, 4) or config.config.get("no_bias") is False:
        raise ModelError(f"{config.name}: expansion_ratio other than 4 and biases are not counted")
    layer = (
        norm("norm_1", width),
        linear("attn.Wqkv", width, 3 * width),
        linear("attn.out_proj", width, width),
        norm("norm_2", width),
        *plain_mlp("ffn.up_proj", "ffn.down_proj", width, 4 * width),
    )
    tied = config.boolean("tie_word_embeddings", default=True)
    embedding, ends = around(vocab, width, tied, norm("transformer.norm_f", width), embedding="transformer.wte")
    layers = range(config.num_layers("n_layers", "num_hidden_layers"))
    return ModelWeights(embedding, tied, (Block("transformer.blocks.{}.", layers, layer), ends))


def _dbrx(config: ConfigReader) -> ModelWeights:
    """Sizes stand in attn_config and ffn_config. Source: DbrxBlock, DbrxConfig, Transformers 5.23.0."""
    config = config.with_defaults({"vocab_size": 32000})
    width, vocab = config.integer("d_model", "hidden_size"), config.integer("vocab_size")
    heads = config.integer("n_heads", "num_attention_heads")
    head_dim = config.head_dim(width, heads)
    attention = _nested(config, "attn_config").with_defaults({"kv_n_heads": 1})
    ffn = _nested(config, "ffn_config").with_defaults({"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1})
    inner, count = ffn.integer("ffn_hidden_size"), ffn.integer("moe_num_experts")
    matrices = (
        linear("ffn.experts.mlp.w1", width, inner),
        linear("ffn.experts.mlp.v1", width, inner),
        linear("ffn.experts.mlp.w2", inner, width),
    )
    layer = (
        norm("norm_attn_norm.norm_1", width),
        linear("norm_attn_norm.attn.Wqkv", width, width + 2 * attention.integer("kv_n_heads") * head_dim),
        linear("norm_attn_norm.attn.out_proj", width, width),
        norm("norm_attn_norm.norm_2", width),
        router("ffn.router.layer", width, count),
        *experts(matrices, count, ffn.integer("moe_top_k", most=count)),
    )
    tied = config.boolean("tie_word_embeddings", default=False)
    embedding, ends = around(vocab, width, tied, norm("transformer.norm_f", width), embedding="transformer.wte")
    layers = range(config.num_layers("n_layers", "num_hidden_layers"))
    return ModelWeights(embedding, tied, (Block("transformer.blocks.{}.", layers, layer), ends))


def _nested(config: ConfigReader, key: str) -> ConfigReader:
    inner = config.config.get(key)
    if inner is None:
        inner = {}
    if not isinstance(inner, Mapping):
        raise ModelError(f"{config.name}: {key} must be an object")
    return ConfigReader(inner, f"{config.name}: {key}", config.source)
