"""The Llamas that are not plain decoders: Llama 3.2 Vision and Llama 4."""

from __future__ import annotations

from kvcalc.model.experts import choose
from kvcalc.model.families.common import decoder_body, grouped_shape
from kvcalc.model.mixers.attention import Attention, Projections
from kvcalc.model.reader import MAX_LAYERS, Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import around, experts, gated_mlp, norm, other, router
from kvcalc.model.type_tables import defaults_of

# The embedding has rows for the image tokens. The head does not.
_MORE_ROWS = 8
_CROSS = Projections("cross_attn", qk_norm="head")


def read_mllama(config: ConfigReader, model_type: str) -> ModelSpec:
    """Llama 3.2 Vision: a Llama with layers of cross-attention to an image. Without one, these layers keep nothing.

    The layers in cross_attention_layers keep only K and V of the image's tokens.

    Entries of cross_attention_layers beyond the last layer are ignored. Source: MllamaTextModel, Transformers 5.23.0.
    MOSS-VL is a Qwen3 with such layers (MossVLTextModel, SGLang 0.5.23). Its weights are not counted.
    """
    config = config.with_defaults(defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    # The projections have no biases, whatever attention_bias says.
    shape = shape._replace(qkv_bias=False, output_bias=False)
    full, cross = (Attention(shape),), (Attention(shape, is_cross=True, names=_CROSS),)
    crossing = frozenset(config.integers("cross_attention_layers", most=MAX_LAYERS))

    def body() -> Body:
        """Source: MllamaSelfAttentionDecoderLayer, MllamaCrossAttentionDecoderLayer, Transformers 5.23.0."""
        config.refuse(
            "tie_word_embeddings", "the embedding has more rows than the head, so tied weights are not counted"
        )
        width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
        mlp = gated_mlp("mlp", width, config.integer("intermediate_size"))
        gated = (*mlp, other("cross_attn_attn_gate", 1), other("cross_attn_mlp_gate", 1))
        outer = around(vocab, width, False, norm("model.norm", width))
        outer = outer._replace(embedding=outer.embedding._replace(rows=vocab + _MORE_ROWS))
        norms = (norm("input_layernorm", width), norm("post_attention_layernorm", width))
        return Body(outer, [gated if number in crossing else mlp for number in range(num_layers)], norms)

    mixers = [cross if number in crossing else full for number in range(num_layers)]
    return config.model(model_type, mixers, body if model_type == "mllama_text_model" else None, encoder_tokens=0)


def read_llama4(config: ConfigReader, model_type: str) -> ModelSpec:
    """Llama 4: chunked attention, except in every fourth layer, which attends to all tokens without rotary positions.

    Layers with rotary positions (1 in no_rope_layers) have chunked attention. The others keep all tokens."""
    config = config.with_defaults(defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    shape, width = grouped_shape(config, rope_theta=500_000.0), config.integer("hidden_size")
    chunk = config.optional_integer("attention_chunk_size")
    full, chunked = (Attention(shape),), (Attention(shape, chunk=chunk),)
    mixers = [chunked if is_chunked else full for is_chunked in _chunked_layers(config, num_layers)]
    return config.model(model_type, mixers, lambda: _body(config, width, num_layers), attention=shape)


def _chunked_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    stated = config.strings("layer_types", num_layers, ("full_attention", "chunked_attention"))
    if stated is not None:
        return [kind == "chunked_attention" for kind in stated]
    if config.is_set("no_rope_layers"):
        return config.flags("no_rope_layers", num_layers)
    interval = config.integer("no_rope_layer_interval")
    return [(number + 1) % interval != 0 for number in range(num_layers)]


def _body(config: ConfigReader, width: int, num_layers: int) -> Body:
    """Experts with one shared expert. The norms of queries and keys have no weights.

    Source: Llama4TextDecoderLayer, Transformers 5.23.0.
    """
    inner, count = config.integer("intermediate_size"), config.integer("num_local_experts")
    moe = (
        router("feed_forward.router", width, count),
        *experts(
            gated_mlp("feed_forward.experts.0", width, inner), count, config.integer("num_experts_per_tok", most=count)
        ),
        *gated_mlp("feed_forward.shared_expert", width, inner),
    )
    dense = gated_mlp("feed_forward", width, config.integer("intermediate_size_mlp"))
    return decoder_body(config, choose(num_layers, _sparse_layers(config, num_layers), moe, dense))


def _sparse_layers(config: ConfigReader, num_layers: int) -> list[int]:
    if not config.has("moe_layers"):
        step = config.integer("interleave_moe_layer_step")
        return [*range(step - 1, num_layers, step)]
    return config.integers("moe_layers", most=num_layers - 1)
