"""Gemma 3n and 4: per-layer embeddings, layers without keys and values of their own, and their extra matrices."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.families.gemma4 import layer_types
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.tensors import (
    LOOKUP,
    Block,
    ModelWeights,
    Weight,
    around,
    experts,
    gated_mlp,
    linear,
    norm,
    other,
    router,
)

# Source: Gemma4TextConfig and Gemma3nTextConfig, Transformers 5.23.0.
_DEFAULTS: dict[str, dict[str, object]] = {
    "gemma4_text": {
        "vocab_size": 262144, "intermediate_size": 9216, "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
    },
    "gemma3n_text": {
        "vocab_size": 262400, "intermediate_size": 16384, "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256, "laurel_rank": 64, "altup_num_inputs": 4,
    },
}  # fmt: skip
_PREFIX = "model.layers.{}."
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Attention by the kind of layer, an MLP (and experts), and what per-layer inputs add.

    Source: Gemma4TextDecoderLayer and Gemma3nTextDecoderLayer, Transformers 5.23.0.
    """
    config = config.with_defaults(_DEFAULTS[model_type])
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers")
    kinds = layer_types(config, model_type, num_layers)
    own = num_layers - config.integer("num_kv_shared_layers", least=0, most=num_layers)
    numbers = range(num_layers)
    blocks = [Block(_PREFIX, numbers, tuple(norm(name, width) for name in _NORMS))]
    for kind in sorted(set(kinds)):
        for shares in (False, True):
            layers = [n for n in numbers if kinds[n] == kind and (n >= own) == shares]
            if layers:
                blocks.append(Block(_PREFIX, layers, _attention(config, model_type, width, kind, shares)))
    blocks += _mlps(config, width, num_layers, own)
    if config.boolean("enable_moe_block", default=False):
        blocks.append(Block(_PREFIX, numbers, _experts(config, width)))
    outer: list[Weight] = [norm("model.norm", width)]
    per_layer = config.optional_integer("hidden_size_per_layer_input", least=0)
    if per_layer:
        blocks.append(Block(_PREFIX, numbers, _per_layer(width, per_layer)))
        rows = config.integer("vocab_size_per_layer_input")
        outer += [
            Weight("model.embed_tokens_per_layer", rows, num_layers * per_layer, LOOKUP),
            linear("model.per_layer_model_projection", width, num_layers * per_layer),
            norm("model.per_layer_projection_norm", per_layer),
        ]
    if model_type == "gemma3n_text":
        inputs = config.integer("altup_num_inputs")
        blocks.append(Block(_PREFIX, numbers, _altup(config, width, inputs)))
        names = ("altup_projections", "altup_unembed_projections")
        projections = [linear(f"model.{name}.0", width, width) for name in names]
        outer += [weight._replace(copies=inputs - 1, read=inputs - 1) for weight in projections]
    tied = config.boolean("tie_word_embeddings", default=True)
    embedding, ends = around(vocab, width, tied, *outer)
    return ModelWeights(embedding, tied, (*blocks, ends))


def _attention(config: ConfigReader, model_type: str, width: int, kind: str, shares: bool) -> tuple[Weight, ...]:
    """A layer that reads an earlier layer's cache has no key and value projections."""
    heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
    kv_heads = config.integer("num_key_value_heads")
    bias = config.boolean("attention_bias", default=False)
    is_wide = model_type == "gemma4_text" and kind == "full_attention"
    keys_are_values = is_wide and config.boolean("attention_k_eq_v", default=False)
    if is_wide:
        head_dim = config.integer("global_head_dim")
        if keys_are_values:
            kv_heads = config.optional_integer("num_global_key_value_heads") or kv_heads
    found = [
        linear("self_attn.q_proj", width, heads * head_dim, bias),
        linear("self_attn.o_proj", heads * head_dim, width, bias),
        norm("self_attn.q_norm", head_dim),
    ]
    if not shares:
        found += [linear("self_attn.k_proj", width, kv_heads * head_dim, bias), norm("self_attn.k_norm", head_dim)]
        if not keys_are_values:
            found.append(linear("self_attn.v_proj", width, kv_heads * head_dim, bias))
    return tuple(found)


def _mlps(config: ConfigReader, width: int, num_layers: int, own: int) -> list[Block]:
    """One width for all, a width for each (Gemma 3n), or twice the width where keys and values are shared (Gemma 4)."""
    listed = config.config.get("intermediate_size")
    if isinstance(listed, list):
        if len(listed) != num_layers or not all(type(n) is int and n > 0 for n in listed):
            raise ModelError(f"{config.name}: intermediate_size must give a width for each of {num_layers} layers")
        widths = listed
    else:
        inner = config.integer("intermediate_size")
        doubled = 2 if config.boolean("use_double_wide_mlp", default=False) else 1
        widths = [inner] * own + [doubled * inner] * (num_layers - own)
    layers: dict[int, list[int]] = {}
    for number, inner in enumerate(widths):
        layers.setdefault(inner, []).append(number)
    return [Block(_PREFIX, numbers, gated_mlp("mlp", width, inner)) for inner, numbers in layers.items()]


def _experts(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    """The experts beside the MLP of Gemma 4 26B-A4B."""
    count, inner = config.integer("num_experts"), config.integer("moe_intermediate_size")
    matrices = gated_mlp("experts.0", width, inner)
    return (
        router("router.proj", width, count),
        other("router.scale", width),
        other("router.per_expert_scale", count),
        *experts(matrices, count, config.integer("top_k_experts", most=count)),
        norm("post_feedforward_layernorm_1", width),
        norm("post_feedforward_layernorm_2", width),
        norm("pre_feedforward_layernorm_2", width),
    )


def _per_layer(width: int, per_layer: int) -> tuple[Weight, ...]:
    return (
        linear("per_layer_input_gate", width, per_layer),
        linear("per_layer_projection", per_layer, width),
        norm("post_per_layer_input_norm", width),
    )


def _altup(config: ConfigReader, width: int, inputs: int) -> tuple[Weight, ...]:
    """Gemma 3n's alternating updates and its low-rank residual. Source: Gemma3nTextAltUp, Gemma3nTextLaurelBlock."""
    rank = config.integer("laurel_rank")
    return (
        other("altup.correct_output_scale", width),
        linear("altup.correction_coefs", inputs, inputs),
        linear("altup.prediction_coefs", inputs, inputs * inputs),
        router("altup.modality_router", width, inputs),
        norm("altup.router_norm", width),
        linear("laurel.linear_left", width, rank),
        linear("laurel.linear_right", rank, width),
        norm("laurel.post_laurel_norm", width),
    )
