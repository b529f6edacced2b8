"""T5, mT5 and umT5: encoder and decoder without biases, positions by a bias of the scores."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.tensors import OTHER, Block, ModelWeights, Weight, around, linear, norm, unread

# Source: T5Config, MT5Config and UMT5Config, Transformers 5.23.0.
_MT5 = {"vocab_size": 250112, "d_ff": 1024, "relative_attention_num_buckets": 32, "feed_forward_proj": "gated-gelu"}
_DEFAULTS: dict[str, dict[str, object]] = {
    "t5": {"vocab_size": 32128, "d_ff": 2048, "relative_attention_num_buckets": 32, "feed_forward_proj": "relu"},
    "mt5": {**_MT5},
    "umt5": {**_MT5},
}


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """A decode step reads the decoder alone, but for the projections of the encoder's output, which ran before.

    Where the config unties the head, as T5 1.1 was published, Transformers ties it nonetheless: not counted. Source:
    T5ForConditionalGeneration and UMT5ForConditionalGeneration, Transformers 5.23.0.
    """
    config = config.with_defaults(_DEFAULTS[model_type])
    if config.config.get("tie_word_embeddings") is False:
        raise ModelError(f"{config.name}: tie_word_embeddings is false, and Transformers ties them: no count is given")
    width, vocab = config.integer("d_model", "hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("num_layers", "num_hidden_layers")
    decoder_layers = config.optional_integer("num_decoder_layers", most=100_000) or num_layers
    heads = config.integer("num_heads", "num_attention_heads")
    positions = Weight("relative_attention_bias", config.integer("relative_attention_num_buckets"), heads, OTHER)
    mlp = _mlp(config, width)
    own = _attention(config, "layer.0.SelfAttention", width, heads)
    cross = _attention(config, "layer.1.EncDecAttention", width, heads)
    encoder = (*own, norm("layer.0.layer_norm", width), *mlp, norm("layer.1.layer_norm", width))
    decoder = (
        *own,
        norm("layer.0.layer_norm", width),
        *(weight._replace(read=0) if weight.name.endswith((".k", ".v")) else weight for weight in cross),
        norm("layer.1.layer_norm", width),
        *mlp,
        norm("layer.2.layer_norm", width),
    )
    # umT5 has a table of positions in every layer, the others in the first of each stack.
    every = model_type == "umt5"
    blocks = (
        unread(Block("encoder.block.{}.", range(num_layers), encoder)),
        unread(Block("encoder.block.{}.", range(num_layers if every else 1), (positions,))),
        unread(Block("encoder.", (0,), (norm("final_layer_norm", width),))),
        Block("decoder.block.{}.", range(decoder_layers), decoder),
        Block("decoder.block.{}.", range(decoder_layers if every else 1), (positions,)),
    )
    embedding, ends = around(vocab, width, True, norm("decoder.final_layer_norm", width), embedding="shared")
    return ModelWeights(embedding, True, (*blocks, ends))


def _attention(config: ConfigReader, prefix: str, width: int, heads: int) -> tuple[Weight, ...]:
    inner = heads * config.integer("d_kv")
    return (
        linear(f"{prefix}.q", width, inner),
        linear(f"{prefix}.k", width, inner),
        linear(f"{prefix}.v", width, inner),
        linear(f"{prefix}.o", inner, width),
    )


def _mlp(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    inner = config.integer("d_ff")
    names = ("wi_0", "wi_1") if config.text("feed_forward_proj").startswith("gated-") else ("wi",)
    ups = (linear(f"DenseReluDense.{name}", width, inner) for name in names)
    return (*ups, linear("DenseReluDense.wo", inner, width))
