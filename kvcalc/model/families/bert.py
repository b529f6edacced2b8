"""BERT and similar models: multi-head attention with biases. They are encoders unless the config has is_decoder."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.mixers.attention import Attention, AttentionShape, Projections
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import around, linear, lookup, norm, plain_mlp
from kvcalc.model.type_tables import defaults_of

# Types that can also be decoders. Source: their configuration classes, Transformers 5.23.0. GIT is always a decoder: a
# BERT that reads the tokens of an image before those of the text.
_MAY_DECODE = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
).split()

# Types with BERT's weights.
_LIKE_BERT = ("bert", "camembert", "roberta", "xlm-roberta")


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Read the caches by the formula. `is_encoder` says that no engine keeps them after the forward pass.

    ALBERT's layers share their weights but not their K and V, so every layer counts.
    """
    config.refuse("add_cross_attention", "cross-attention caches of BERT decoders are not supported")
    num_layers = config.num_layers("num_hidden_layers", "n_layers", "n_layer")
    num_heads = config.integer("num_attention_heads", "n_heads", "n_head")
    hidden_size = config.integer("hidden_size", "dim", "n_embd")
    head_dim = config.head_dim(hidden_size, num_heads)
    decodes = config.boolean("is_decoder", default=False)
    if decodes and model_type not in (*_MAY_DECODE, "git"):
        raise ModelError(f"{config.name}: is_decoder is true, but {model_type} is not a decoder")
    rotary = model_type in ("nomic_bert", "roformer")
    bias = model_type != "nomic_bert"
    shape = AttentionShape(
        num_heads, num_heads, head_dim, head_dim, hidden_size, qkv_bias=bias, output_bias=bias,
        rope_dim=head_dim if rotary else 0,
    )  # fmt: skip
    names = Projections("attention", "self.query", "self.key", "self.value", "output.dense")
    return config.model(
        model_type,
        [(Attention(shape, names=names),)] * num_layers,
        (lambda: _bert(config, hidden_size, num_layers)) if model_type in _LIKE_BERT else None,
        positions=("max_position_embeddings", "n_positions"),
        is_encoder=model_type != "git" and not decodes,
    )


def _bert(config: ConfigReader, width: int, num_layers: int) -> Body:
    """The encoder and its pooler, without the heads for pretraining. Source: BertModel, Transformers 5.23.0."""
    config = config.with_defaults(defaults_of("bert"))
    mlp = plain_mlp("intermediate.dense", "output.dense", width, config.integer("intermediate_size"), bias=True)
    outer = (
        lookup("embeddings.position_embeddings", config.integer("max_position_embeddings"), width),
        lookup("embeddings.token_type_embeddings", config.integer("type_vocab_size"), width),
        norm("embeddings.LayerNorm", width, bias=True),
        linear("pooler.dense", width, width, bias=True),
    )
    # There is no output head. `tied` is set to True only so that `around` does not add one.
    outside = around(
        config.integer("vocab_size"), width, True, *outer, embedding="embeddings.word_embeddings",
        prefix="encoder.layer.{}.",
    )  # fmt: skip
    norms = ("attention.output.LayerNorm", "output.LayerNorm")
    return Body(outside._replace(tied=False), [mlp] * num_layers, tuple(norm(n, width, bias=True) for n in norms))
