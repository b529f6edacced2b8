"""Plain decoders, one row each, in presets/types/decoders.yaml."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from kvcalc.model.experts import Experts
from kvcalc.model.families.window_patterns import Pattern, pattern_of
from kvcalc.model.presets import shipped_table


class Decoder:
    """The facts of a plain decoder. A bias is True or False, or the config key that sets it (no bias if absent).

    Keys: `layers`, `heads`, `hidden`, `inner` and `positions` list the config keys for one fact, the most common key
    first. `kv_heads_key` is empty if the family has no such key. `keys` are all keys that the family accepts besides
    the common ones (default: those of most decoders). `own_keys` are keys that may change the cache and that this
    family supports. `foreign_keys` are keys of other families that are refused here.

    Attention: `slides` is the pattern of layers with a window, if the config gives one; None means that a window is an
    error. `switch`: the window is used only with use_sliding_window. `has_layer_types`: the config may list the kinds
    of layers. If the config has `encoder_key` set to true, the model is an encoder, whose window is given for both
    directions together. `refused` maps unsupported keys to the reason. `grouped` is False if every query head has its
    own K and V. `states_kv_heads`: the config must give num_key_value_heads. `derives_head_dim`: the width of a head is
    always hidden_size / num_attention_heads. `floors_head_dim`: without a width of its own, that quotient is rounded
    down. `output_gate`: each output of the heads has a gate. `gate_key` is the key that says whether a gate has one row
    per head (true) or per output (per-element). `heads_by_layer` is the key that lists the query heads of every layer.
    `num_kv_heads` is set if the number is not the one under `kv_heads_key`.

    Weights: `vocab_size` is None if the family's weights are not counted. `tied` is the default of tie_word_embeddings.
    `qk_norm` is as in Projections; if `qk_norm_key` is set, it applies only if the config has that key set to true.
    `mlp` is gated, fused (gate and up in one matrix), plain (no gate), or xielu (no gate, an activation with two
    weights). `inner_factor` is the width of the MLP divided by that of the model, if the config does not give it.
    `halves_inner`: the config gives the width of gate and up together. `dense_inner` is the key for the width of layers
    without experts, if it is not that of the experts.
    `parallel_key`: if the config has this key set to true, attention and MLP share the first norm. `tables` are learned
    position tables: name, keys, default rows and additional rows. `vocab` lists the keys for the rows of the embedding,
    and `outputs_key` is that for the rows of the head, if it may have fewer.
    `uncounted` maps keys whose weights are not counted to the reason. `builds` are the sizes that the class has
    whatever the config says; weights of other sizes are not counted. `is_remote`: published with its own code, without
    a class in Transformers. If the config has another number under `narrow_key` than the width of the model, the
    embedding has this width, with a projection on each side. `computed` has formulas for fields, which may call the
    functions of layers.yaml and name the row's other fields.
    """

    layers: tuple[str, ...] = ("num_hidden_layers", "n_layer")
    heads: tuple[str, ...] = ("num_attention_heads", "n_head")
    hidden: tuple[str, ...] = ("hidden_size", "n_embed")
    inner: tuple[str, ...] = ("intermediate_size",)
    positions: tuple[str, ...] = ("max_position_embeddings",)
    kv_heads_key: str = "num_key_value_heads"
    head_dim_key: str = "head_dim"
    keys: frozenset[str] | None = None
    foreign_keys: tuple[str, ...] = ()
    own_keys: tuple[str, ...] = ()
    defaults: Mapping[str, object] = {}

    slides: Pattern | None = None
    switch: bool = False
    has_layer_types: bool = False
    encoder_key: str = ""
    refused: Mapping[str, str] = {}
    grouped: bool = True
    states_kv_heads: bool = False
    derives_head_dim: bool = False
    floors_head_dim: bool = False
    num_kv_heads: int | None = None
    rotary: bool = True
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    output_gate: bool = False
    gate_key: str = ""
    heads_by_layer: str = ""

    vocab_size: int | None = None
    vocab: tuple[str, ...] = ("vocab_size",)
    uncounted: Mapping[str, str] = {}
    tied: bool = False
    prefix: str = "model.layers.{}."
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    head_bias: bool | str = False
    attention_names: Mapping[str, Any] = {}
    qk_norm: str = ""
    qk_norm_key: str = ""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False
    final_norms: tuple[str, ...] = ("model.norm",)
    parallel_key: str = ""
    mlp: str = "gated"
    mlp_bias: bool | str = False
    mlp_names: tuple[str, str] = ("mlp.up_proj", "mlp.down_proj")
    inner_factor: int | None = None
    halves_inner: bool = False
    dense_inner: str = ""
    outputs_key: str = ""
    experts: Experts | None = None
    tables: tuple[Any, ...] = ()
    builds: Mapping[str, int] = {}
    is_remote: bool = False
    narrow_key: str = ""
    computed: Mapping[str, str] = {}

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.__dict__.update(facts)


# The fields of a row that are defaults of a config's keys.
_DEFAULTED = {
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "window": "sliding_window",
    "intermediate_size": "intermediate_size", "vocab_size": "vocab_size",
}  # fmt: skip
_MADE: dict[str, Callable[[Any], object]] = {
    "keys": frozenset, "experts": lambda found: Experts(**found), "slides": pattern_of
}  # fmt: skip


@cache
def rows() -> dict[str, dict[str, Any]]:
    """The rows as they are in the file."""
    return shipped_table("decoders")


@cache
def model_types() -> tuple[str, ...]:
    """The model types that are plain decoders."""
    return tuple(name for name in rows() if not name.startswith("_"))


def architectures() -> dict[str, str]:
    """The architectures of GGUF files, each with the model_type that it is."""
    return {name: model_type for model_type, stated in rows().items() for name in _listed(stated.get("gguf", []))}


@cache
def row(name: str) -> dict[str, Any]:
    """The facts of a row, with those of the rows that it is `like`: what a `Decoder` takes. KeyError for no row."""
    stated = rows()[name]
    facts: dict[str, Any] = {}
    defaults: dict[str, object] = {}
    for other in _listed(stated.get("like", [])):
        facts.update(row(other))
        defaults.update(row(other)["defaults"])
    defaults.update(stated.get("defaults", {}))
    defaults.update({key: stated[field] for field, key in _DEFAULTED.items() if stated.get(field) is not None})
    if "bias" in stated:
        facts.update({"qkv_bias": stated["bias"], "output_bias": stated["bias"]})
    for field, value in stated.items():
        if field in Decoder.__annotations__:
            frozen = _frozen(value)
            facts[field] = _MADE[field](frozen) if field in _MADE else frozen
    return {**facts, "defaults": defaults}


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _frozen(value: Any) -> Any:
    """The value with tuples for lists: parts of a model are compared and remembered."""
    if isinstance(value, dict):
        return {name: _frozen(item) for name, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
