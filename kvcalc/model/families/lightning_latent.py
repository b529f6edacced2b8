"""Ling 2.5 and 2.6: lightning attention in most layers, and MLA in the others."""

from __future__ import annotations

from kvcalc.model.caches import RecurrentState
from kvcalc.model.experts import Experts, choose, moe, sparse_layers, with_defaults
from kvcalc.model.families.common import decoder_body, latent_shape
from kvcalc.model.families.gated_delta import layer_types
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Weight, gated_mlp, linear, norm
from kvcalc.model.type_tables import defaults_of


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Every layer_group_size-th layer keeps a latent and a rotary key.

    The others keep head_dim x head_dim elements per head, in the model's dtype, without a convolution. Source:
    BailingMoeV25DecoderLayer (bailing_moe_linear.py) and BailingMoELinearAttention, vLLM 0.33.0.
    """
    config = with_defaults(config, defaults_of("bailing_moe_v2_5"))
    num_layers, shape = config.num_layers("num_hidden_layers"), latent_shape(config)
    kept: dict[str, tuple[Mixer, ...]] = {
        "full_attention": (Attention(shape),), "linear_attention": (_lightning(config, shape.hidden_size or 0),),
    }  # fmt: skip
    mixers = [kept[kind] for kind in layer_types(config, num_layers, interval="layer_group_size")]
    return config.model("bailing_moe_v2_5", mixers, lambda: _body(config, num_layers), attention=shape)


def _lightning(config: ConfigReader, width: int) -> Recurrence:
    heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
    inner, bias = heads * head_dim, config.boolean("use_bias", default=False)
    weights: tuple[Weight, ...] = (
        linear("self_attn.query_key_value", width, 3 * inner, bias or config.boolean("use_qkv_bias", default=False)),
        linear("self_attn.g_proj", width, inner),
        linear("self_attn.dense", inner, width, bias),
        norm("self_attn.g_norm", inner),
    )
    if config.boolean("use_qk_norm", default=False):
        weights += tuple(norm(f"self_attn.{name}_layernorm", head_dim) for name in ("query", "key"))
    state = RecurrentState(0, 1, inner * head_dim, state_dtype=None, num_heads=heads)
    return Recurrence(state, weights=weights)


def _body(config: ConfigReader, num_layers: int) -> Body:
    width = config.integer("hidden_size")
    rule = Experts("num_experts", layers="first_dense", shared=True, shared_inner="moe_shared_expert_intermediate_size")
    dense = gated_mlp("mlp", width, config.integer("intermediate_size"))
    sized = config.with_defaults({"moe_shared_expert_intermediate_size": config.integer("moe_intermediate_size")})
    mlps = choose(num_layers, sparse_layers(config, rule, num_layers), moe(sized, rule, width), dense)
    return decoder_body(config, mlps, embedding="model.word_embeddings")
