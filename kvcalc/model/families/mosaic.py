"""MosaicML's decoders, MPT and DBRX: the attention keys are in a nested attn_config."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.mixers.attention import Attention, AttentionShape, Projections
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Weight, around, experts, linear, norm, plain_mlp, router

_PREFIX = "transformer.blocks.{}."


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V of every head (MPT), or of kv_n_heads heads in attn_config (DBRX, 1 if absent).

    MPT's training code has more kinds of attention than its published models and Transformers, so any attn_type other
    than multihead_attention is refused. Source: MptAttention and DbrxAttentionConfig, Transformers 5.23.0.
    """
    inner = config.nested("attn_config")
    num_layers = config.num_layers("n_layers", "num_hidden_layers")
    num_heads = config.integer("n_heads", "num_attention_heads")
    hidden_size = config.integer("d_model", "hidden_size")
    head_dim = config.head_dim(hidden_size, num_heads)
    is_mpt = model_type == "mpt"
    if is_mpt:
        if not inner.is_any("attn_type", None, "multihead_attention"):
            raise ModelError(f"{config.name}: attn_config.attn_type: only multihead_attention is supported")
        num_kv_heads = inner.optional_integer("kv_n_heads") or num_heads
        if num_kv_heads != num_heads or not inner.is_any("sliding_window_size", None, -1):
            raise ModelError(
                f"{config.name}: attn_config sets kv_n_heads or sliding_window_size: not supported for MPT"
            )
    else:
        num_kv_heads = config.check_groups(num_heads, inner.optional_integer("kv_n_heads") or 1)
    if config.optional_integer("num_key_value_heads") not in (None, num_kv_heads):
        raise ModelError(f"{config.name}: num_key_value_heads contradicts attn_config")
    bias = is_mpt and not config.boolean("no_bias", default=True)
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, hidden_size, qkv_bias=bias, output_bias=bias,
        rope_dim=0 if is_mpt else head_dim, rope_theta=inner.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    names = Projections("attn" if is_mpt else "norm_attn_norm.attn", fused="Wqkv", output="out_proj")
    return config.model(
        model_type,
        [(Attention(shape, names=names),)] * num_layers,
        lambda: (_mpt if is_mpt else _dbrx)(config, hidden_size, num_layers),
        positions=("max_seq_len", "max_position_embeddings"),
    )


def _mpt(config: ConfigReader, width: int, num_layers: int) -> Body:
    """Source: MptForCausalLM, Transformers 5.23.0, which ignores no_bias and expansion_ratio."""
    if not config.is_any("expansion_ratio", None, 4) or not config.boolean("no_bias", default=True):
        raise ModelError(f"{config.name}: weights with biases or an expansion_ratio other than 4 are not counted")
    mlp = plain_mlp("ffn.up_proj", "ffn.down_proj", width, 4 * width)
    return _body(config, width, [mlp] * num_layers, ("norm_1", "norm_2"), vocab=50368, tied=True)


def _dbrx(config: ConfigReader, width: int, num_layers: int) -> Body:
    """The sizes are in ffn_config. Source: DbrxBlock, DbrxConfig, Transformers 5.23.0."""
    ffn = config.nested("ffn_config").with_defaults({"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1})
    inner, count = ffn.integer("ffn_hidden_size"), ffn.integer("moe_num_experts")
    matrices = (
        linear("ffn.experts.mlp.w1", width, inner),
        linear("ffn.experts.mlp.v1", width, inner),
        linear("ffn.experts.mlp.w2", inner, width),
    )
    mlp = (
        router("ffn.router.layer", width, count),
        *experts(matrices, count, ffn.integer("moe_top_k", most=count)),
    )
    norms = ("norm_attn_norm.norm_1", "norm_attn_norm.norm_2")
    return _body(config, width, [mlp] * num_layers, norms, vocab=32000, tied=False)


def _body(
    config: ConfigReader, width: int, mlps: list[tuple[Weight, ...]], norms: tuple[str, ...], *, vocab: int, tied: bool
) -> Body:
    rows = config.with_defaults({"vocab_size": vocab}).integer("vocab_size")
    outer = around(
        rows, width, config.boolean("tie_word_embeddings", default=tied), norm("transformer.norm_f", width),
        embedding="transformer.wte", prefix=_PREFIX,
    )  # fmt: skip
    return Body(outer, mlps, tuple(norm(name, width) for name in norms))
