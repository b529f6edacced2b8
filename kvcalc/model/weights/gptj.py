"""GPT-J and CodeGen, StarCoder's GPT-BigCode, and OPT: biases and shifted norms under key names of their own."""

from __future__ import annotations

from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.tensors import (
    LOOKUP,
    Block,
    ModelWeights,
    Weight,
    around,
    linear,
    norm,
    other,
    plain_mlp,
)


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """The weights of one of the families below."""
    if model_type == "opt":
        return _opt(config)
    return _gpt_bigcode(config) if model_type == "gpt_bigcode" else _gptj(config, model_type)


def _gptj(config: ConfigReader, model_type: str) -> ModelWeights:
    """One norm a layer for attention and MLP, a head with a bias. Source: GPTJForCausalLM, CodeGenForCausalLM."""
    config = config.with_defaults({"vocab_size": 50400})
    width, vocab = config.integer("n_embd", "hidden_size"), config.integer("vocab_size")
    if model_type == "codegen":
        inputs: tuple[Weight, ...] = (linear("attn.qkv_proj", width, 3 * width),)
    else:
        inputs = tuple(linear(f"attn.{name}_proj", width, width) for name in "qkv")
    layer = (
        norm("ln_1", width, bias=True),
        *inputs,
        linear("attn.out_proj", width, width),
        *plain_mlp("mlp.fc_in", "mlp.fc_out", width, config.optional_integer("n_inner") or 4 * width, bias=True),
    )
    tied = config.boolean("tie_word_embeddings", default=False)
    outer = (norm("transformer.ln_f", width, bias=True), *((other("lm_head.bias", vocab),) if tied else ()))
    embedding, ends = around(vocab, width, tied, *outer, embedding="transformer.wte", head_bias=True)
    layers = range(config.num_layers("n_layer", "num_hidden_layers"))
    return ModelWeights(embedding, tied, (Block("transformer.h.{}.", layers, layer), ends))


def _gpt_bigcode(config: ConfigReader) -> ModelWeights:
    """GPT-2 with, unless it says otherwise, one key and value for all heads. Source: GPTBigCodeForCausalLM."""
    config = config.with_defaults({"vocab_size": 50257})
    width, vocab = config.integer("n_embd", "hidden_size"), config.integer("vocab_size")
    heads = config.integer("n_head", "num_attention_heads")
    head_dim = config.head_dim(width, heads)
    keys = head_dim if config.boolean("multi_query", default=True) else width
    layer = (
        norm("ln_1", width, bias=True),
        linear("attn.c_attn", width, width + 2 * keys, bias=True),
        linear("attn.c_proj", width, width, bias=True),
        norm("ln_2", width, bias=True),
        *plain_mlp("mlp.c_fc", "mlp.c_proj", width, config.optional_integer("n_inner") or 4 * width, bias=True),
    )
    tied = config.boolean("tie_word_embeddings", default=True)
    positions = config.optional_integer("n_positions", "max_position_embeddings") or 1024
    outer = (Weight("transformer.wpe", positions, width, LOOKUP), norm("transformer.ln_f", width, bias=True))
    embedding, ends = around(vocab, width, tied, *outer, embedding="transformer.wte")
    layers = range(config.num_layers("n_layer", "num_hidden_layers"))
    return ModelWeights(embedding, tied, (Block("transformer.h.{}.", layers, layer), ends))


def _opt(config: ConfigReader) -> ModelWeights:
    """The embedding may be narrower than the model, with projections in and out. Source: OPTDecoder."""
    config = config.with_defaults({"vocab_size": 50272, "ffn_dim": 3072, "max_position_embeddings": 2048})
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    narrow = config.optional_integer("word_embed_proj_dim") or width
    bias = config.boolean("enable_bias", default=True)
    has_norms = config.boolean("layer_norm_elementwise_affine", default=True)
    norms = tuple(norm(name, width, bias=True) for name in ("self_attn_layer_norm", "final_layer_norm"))
    layer = (
        *(linear(f"self_attn.{name}_proj", width, width, bias) for name in ("q", "k", "v", "out")),
        *plain_mlp("fc1", "fc2", width, config.integer("ffn_dim"), bias),
        *(norms if has_norms else ()),
    )
    # Two positions more than the context: the offset of the padding.
    outer = [Weight("model.decoder.embed_positions", config.integer("max_position_embeddings") + 2, width, LOOKUP)]
    if narrow != width:
        outer += [linear("model.decoder.project_in", narrow, width), linear("model.decoder.project_out", width, narrow)]
    is_normed_first = config.boolean("do_layer_norm_before", default=True)
    if has_norms and is_normed_first and not config.boolean("_remove_final_layer_norm", default=False):
        outer.append(norm("model.decoder.final_layer_norm", width, bias=True))
    tied = config.boolean("tie_word_embeddings", default=True)
    embedding, ends = around(vocab, narrow, tied, *outer, embedding="model.decoder.embed_tokens")
    layers = range(config.num_layers("num_hidden_layers"))
    return ModelWeights(embedding, tied, (Block("model.decoder.layers.{}.", layers, layer), ends))
