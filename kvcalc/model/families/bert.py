"""BERT and the encoders of its make: multi-head attention with biases; encoders, unless the config says is_decoder."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.caches import FullAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, uniform_layers

KEYS = frozenset(
    (
        "num_hidden_layers n_layers n_layer num_attention_heads n_heads n_head hidden_size dim n_embd head_dim "
        "hidden_dim n_inner n_positions is_decoder add_cross_attention cross_attention_hidden_size type_vocab_size "
        "position_embedding_type layer_norm_eps num_hidden_groups inner_group_num relative_attention pos_att_type "
        "position_biased_input embedding_size vision_config rotary_emb_fraction qkv_proj_bias conv_kernel_size conv_act"
    ).split()
)

# May be built as decoders. Source: their configuration classes, Transformers 5.23.0. GIT is nothing else: a BERT that
# reads an image's tokens before the text's.
_MAY_DECODE = (
    "bert bert-generation camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm "
    "roformer xlm-roberta xlm-roberta-xl xmod"
).split()


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """The formula's cache of every layer; `is_encoder` says that no engine keeps it after the forward pass.

    ALBERT's layers share their weights, not what each computes from them: every layer counts.
    """
    config.refuse("add_cross_attention", "cross-attention caches of BERT decoders are not modelled")
    num_layers = config.num_layers("num_hidden_layers", "n_layers", "n_layer")
    num_heads = config.integer("num_attention_heads", "n_heads", "n_head")
    hidden_size = config.integer("hidden_size", "dim", "n_embd")
    head_dim = config.head_dim(hidden_size, num_heads)
    decodes = config.boolean("is_decoder", default=False)
    if decodes and model_type not in (*_MAY_DECODE, "git"):
        raise ModelError(f"{config.name}: is_decoder is true: {model_type} does not decode")
    rotary = model_type in ("nomic_bert", "roformer")
    attention = AttentionShape(
        num_heads, num_heads, head_dim, head_dim, hidden_size, qkv_bias=model_type != "nomic_bert",
        output_bias=model_type != "nomic_bert", rope_dim=head_dim if rotary else 0,
    )  # fmt: skip
    layers = uniform_layers(num_layers, FullAttention(num_heads, head_dim, head_dim))
    positions = ("max_position_embeddings", "n_positions")
    is_encoder = model_type != "git" and not decodes
    return config.model(model_type, attention, layers, positions=positions, is_encoder=is_encoder)
