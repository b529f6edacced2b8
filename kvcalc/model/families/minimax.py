"""MiniMax-Text-01 and MiniMax-M1: lightning attention, and full attention in some layers."""

from __future__ import annotations

from kvcalc.model.caches import RecurrentState
from kvcalc.model.experts import Experts, moe, with_defaults
from kvcalc.model.families.common import decoder_body, grouped_shape
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import linear, norm

KEYS = frozenset(
    (
        "num_key_value_heads head_dim layer_types sliding_window linear_attn_alpha_factor linear_attn_beta_factor "
        "attn_type_list"
    ).split()
)

# Source: MiniMaxConfig, Transformers 5.23.0.
_DEFAULTS = {
    "num_key_value_heads": 8, "vocab_size": 32000, "intermediate_size": 14336, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
_EXPERTS = Experts(inner="intermediate_size", prefix="block_sparse_moe", names=("w1", "w3", "w2"))


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Lightning attention keeps head_dim x head_dim elements per head in the model's dtype. It has no convolution.

    Without layer_types, layers of full attention and of lightning attention alternate. Source: MiniMaxConfig and
    MiniMaxLightningAttention, Transformers 5.23.0. The published configs (minimax_text_01 and minimax_m1) have ones for
    full attention in attn_type_list instead.
    """
    config = with_defaults(config, _DEFAULTS)
    config.refuse("sliding_window", "windows are not supported for this family")
    num_layers = config.num_layers("num_hidden_layers")
    # The projections have no biases, whatever attention_bias says.
    shape = grouped_shape(config)._replace(qkv_bias=False, output_bias=False)
    kept: dict[str, tuple[Mixer, ...]] = {
        "full_attention": (Attention(shape),), "linear_attention": (_lightning(shape),),
    }  # fmt: skip
    mixers = [kept[kind] for kind in _layer_types(config, num_layers)]
    return config.model("minimax", mixers, lambda: _body(config, num_layers), attention=shape)


def _lightning(shape: AttentionShape) -> Recurrence:
    width, inner = shape.hidden_size or 0, shape.num_heads * shape.qk_head_dim
    state = RecurrentState(0, 1, inner * shape.qk_head_dim, state_dtype=None, num_heads=shape.num_heads)
    weights = (
        linear("self_attn.qkv_proj", width, 3 * inner),
        linear("self_attn.output_gate", width, inner),
        linear("self_attn.out_proj", inner, width),
        norm("self_attn.norm", inner),
    )
    return Recurrence(state, weights=weights)


def _body(config: ConfigReader, num_layers: int) -> Body:
    """Source: MiniMaxDecoderLayer, Transformers 5.23.0."""
    if config.optional_integer("shared_intermediate_size", least=0):
        raise config.error("shared_intermediate_size: shared experts of this family are not counted")
    return decoder_body(config, [moe(config, _EXPERTS, config.integer("hidden_size"))] * num_layers)


def _layer_types(config: ConfigReader, num_layers: int) -> list[str]:
    """Return the config's list, else alternate full attention and lightning attention."""
    kinds = config.strings("layer_types", num_layers, ("full_attention", "linear_attention"))
    if kinds is not None:
        return kinds
    if config.config.get("attn_type_list") is not None:
        flags = config.flags("attn_type_list", num_layers)
        return ["full_attention" if flag else "linear_attention" for flag in flags]
    return ["linear_attention" if number % 2 else "full_attention" for number in range(num_layers)]
