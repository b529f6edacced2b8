"""The first families: biases and shifted norms throughout, queries, keys and values mostly in one matrix."""

from __future__ import annotations

from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.tensors import LOOKUP, Block, ModelWeights, Weight, around, linear, norm, plain_mlp


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """The weights of one of the families below."""
    return _FAMILIES[model_type](config)


def _gpt2(config: ConfigReader) -> ModelWeights:
    """Source: GPT2LMHeadModel, Transformers 5.23.0."""
    config = config.with_defaults({"vocab_size": 50257})
    width, vocab = config.integer("n_embd", "hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("n_layer", "num_hidden_layers")
    layer = (
        norm("ln_1", width, bias=True),
        linear("attn.c_attn", width, 3 * width, bias=True),
        linear("attn.c_proj", width, width, bias=True),
        norm("ln_2", width, bias=True),
        *plain_mlp("mlp.c_fc", "mlp.c_proj", width, config.optional_integer("n_inner") or 4 * width, bias=True),
    )
    tied = config.boolean("tie_word_embeddings", default=True)
    positions = config.optional_integer("n_positions", "max_position_embeddings") or 1024
    outer = (Weight("transformer.wpe", positions, width, LOOKUP), norm("transformer.ln_f", width, bias=True))
    embedding, ends = around(vocab, width, tied, *outer, embedding="transformer.wte")
    return ModelWeights(embedding, tied, (Block("transformer.h.{}.", range(num_layers), layer), ends))


def _bloom(config: ConfigReader) -> ModelWeights:
    """Positions are a bias of the scores (ALiBi). Source: BloomForCausalLM, Transformers 5.23.0."""
    config = config.with_defaults({"vocab_size": 250880})
    width, vocab = config.integer("hidden_size", "n_embed"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers", "n_layer")
    layer = (
        norm("input_layernorm", width, bias=True),
        linear("self_attention.query_key_value", width, 3 * width, bias=True),
        linear("self_attention.dense", width, width, bias=True),
        norm("post_attention_layernorm", width, bias=True),
        *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", width, 4 * width, bias=True),
    )
    tied = config.boolean("tie_word_embeddings", default=True)
    outer = (norm("transformer.word_embeddings_layernorm", width, True), norm("transformer.ln_f", width, True))
    embedding, ends = around(vocab, width, tied, *outer, embedding="transformer.word_embeddings")
    return ModelWeights(embedding, tied, (Block("transformer.h.{}.", range(num_layers), layer), ends))


def _gpt_neox(config: ConfigReader) -> ModelWeights:
    """Source: GPTNeoXForCausalLM, Transformers 5.23.0."""
    config = config.with_defaults({"vocab_size": 50432, "intermediate_size": 24576, "attention_bias": True})
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    bias = config.boolean("attention_bias", default=True)
    layer = (
        norm("input_layernorm", width, bias=True),
        linear("attention.query_key_value", width, 3 * width, bias),
        linear("attention.dense", width, width, bias),
        norm("post_attention_layernorm", width, bias=True),
        *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", width, config.integer("intermediate_size"), bias=True),
    )
    tied = config.boolean("tie_word_embeddings", default=False)
    outer = norm("gpt_neox.final_layer_norm", width, bias=True)
    embedding, ends = around(vocab, width, tied, outer, embedding="gpt_neox.embed_in", head="embed_out")
    layers = range(config.num_layers("num_hidden_layers"))
    return ModelWeights(embedding, tied, (Block("gpt_neox.layers.{}.", layers, layer), ends))


def _bert(config: ConfigReader) -> ModelWeights:
    """The encoder and its pooler, without the heads of pretraining. Source: BertModel, Transformers 5.23.0."""
    defaults = {
        "vocab_size": 30522, "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2,
    }  # fmt: skip
    config = config.with_defaults(defaults)
    width, inner = config.integer("hidden_size"), config.integer("intermediate_size")
    layer = (
        *(linear(f"attention.self.{name}", width, width, bias=True) for name in ("query", "key", "value")),
        linear("attention.output.dense", width, width, bias=True),
        norm("attention.output.LayerNorm", width, bias=True),
        *plain_mlp("intermediate.dense", "output.dense", width, inner, bias=True),
        norm("output.LayerNorm", width, bias=True),
    )
    outer = (
        Weight("embeddings.position_embeddings", config.integer("max_position_embeddings"), width, LOOKUP),
        Weight("embeddings.token_type_embeddings", config.integer("type_vocab_size"), width, LOOKUP),
        norm("embeddings.LayerNorm", width, bias=True),
        linear("pooler.dense", width, width, bias=True),
    )
    name = "embeddings.word_embeddings"
    # Nothing is tied: there is no output head. Said to be so, none is counted.
    embedding, ends = around(config.integer("vocab_size"), width, True, *outer, embedding=name)
    layers = range(config.num_layers("num_hidden_layers"))
    return ModelWeights(embedding, False, (Block("encoder.layer.{}.", layers, layer), ends))


_FAMILIES = {"gpt2": _gpt2, "bloom": _bloom, "gpt_neox": _gpt_neox, "bert": _bert}
