"""Dots3-Note and Mistral Large 4: MLA with an indexer, whose latents differ between the layers."""

from __future__ import annotations

from kvcalc.model.experts import Experts, choose, moe, sparse_layers
from kvcalc.model.families.common import decoder_body, latent_shape
from kvcalc.model.families.indexers import has_indexer, indexer
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import gated_mlp, norm
from kvcalc.model.type_tables import defaults_of


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """A layer keeps one latent and one rotary key per token, and the indexer's key if it has an indexer."""
    config = config.with_defaults(defaults_of(model_type))
    return _read_dots(config, model_type) if model_type == "dots3_note_text" else _read_mistral(config, model_type)


def _read_dots(config: ConfigReader, model_type: str) -> ModelSpec:
    """Three of four layers have a window and a wider latent, and no indexer. All other layers have an indexer.

    The first two layers have no window. Source: Dots3NoteTextConfig, Transformers 5.23.0.
    """
    num_layers = config.num_layers("num_hidden_layers")
    full = "indexed_attention" if config.boolean("use_dsa", default=True) else "full_attention"
    slides = config.boolean("use_sliding_window", default=True)
    kinds = config.strings("layer_types", num_layers, ("full_attention", "indexed_attention", "sliding_attention"))
    if kinds is None:
        kinds = [
            full if not slides or number < 2 or number % 4 == 1 else "sliding_attention" for number in range(num_layers)
        ]
    kinds = [kind if kind == "sliding_attention" else full for kind in kinds]
    shape = latent_shape(config)._replace(head_gate=True)
    narrow = _window_shape(config, kinds)._replace(head_gate=True)
    window = config.integer("sliding_window") if config.is_set("sliding_window") else None
    kept: dict[str, tuple[Mixer, ...]] = {
        "full_attention": (Attention(shape),),
        "indexed_attention": (_indexed(config, shape),),
        "sliding_attention": (Attention(narrow, window or config.integer("sliding_window_size")),),
    }
    mixers = [kept[kind] for kind in kinds]
    spec = config.model(model_type, mixers, lambda: _body_of_dots(config, num_layers), attention=shape)
    return spec._replace(draft_mixers=kept[_draft_kind(config, spec.num_draft_layers or 0, full)])


def _body_of_dots(config: ConfigReader, num_layers: int) -> Body:
    """The rotary key has a norm of its own. Source: Dots3NoteDecoderLayer, Transformers 5.23.0."""
    width = config.integer("hidden_size")
    rule = Experts("n_routed_experts", layers="listed", shared=True, shared_inner="shared_experts_intermediate_size")
    dense = gated_mlp("mlp", width, config.integer("intermediate_size"))
    mlps = choose(num_layers, sparse_layers(config, rule, num_layers), moe(config, rule, width), dense)
    body = decoder_body(config, mlps)
    rope = config.integer("qk_rope_head_dim")
    return body._replace(norms=(*body.norms, norm("self_attn.k_rope_only_layernorm", rope)))


def _draft_kind(config: ConfigReader, num_layers: int, full: str) -> str:
    """Return the kind of the layers that draft: with a window, unless mtp_layer_types says otherwise.

    Source: SpeculativeConfig (config/speculative.py), vLLM 0.33.0.
    """
    stated = config.strings("mtp_layer_types", num_layers, ("full_attention", "indexed_attention", "sliding_attention"))
    kinds = set(stated or ["sliding_attention"])
    if len(kinds) > 1:
        raise config.error("mtp_layer_types: all layers must be alike")
    return "sliding_attention" if kinds == {"sliding_attention"} else full


def _window_shape(config: ConfigReader, kinds: list[str]) -> AttentionShape:
    """Return the shape of a layer with a window: from per_layer_config, which Transformers saves, or the swa_ keys."""
    stated, defaults = config.per_layer(len(kinds)), defaults_of("_dots3_note_window")
    if stated is None:
        own = {**defaults, **config.shares({f"swa_{key}": key for key in defaults})}
        rope = config.optional_integer("swa_qk_rope_head_dim")
    else:
        layers = [layer for layer, kind in zip(stated, kinds) if kind == "sliding_attention"]
        if any(layer != layers[0] for layer in layers):
            raise config.error("per_layer_config: all layers with a window must be alike")
        own = {**defaults, **config.shares({key: key for key in defaults}), **(layers[0] if layers else {})}
        rope = ConfigReader(own, config.name, config.source).optional_integer("qk_rope_head_dim")
    merged = config.with_values(own)
    width = rope or merged.integer("head_dim") - merged.integer("qk_nope_head_dim")
    return latent_shape(merged.without("qk_rope_head_dim").with_defaults({"qk_rope_head_dim": width}))


def _read_mistral(config: ConfigReader, model_type: str) -> ModelSpec:
    """Every fourth layer has no rotary key. A layer may read the latent of an earlier one (kv_source_layers).

    If it has an indexer, the indexer still keeps its keys. Source: MistralLarge4TextConfig and
    MistralLarge4TextAttention, Transformers 5.23.0.
    """
    num_layers = config.num_layers("num_hidden_layers")
    if any(kind != "indexed_attention" for kind in config.items("layer_types")):
        raise config.error("layer_types: every layer must have indexed_attention")
    shape = latent_shape(config)
    bare = shape._replace(qk_rope_head_dim=0, rope_dim=0)
    if config.has("no_rope_layers"):
        rotary = config.flags("no_rope_layers", num_layers)
    else:
        interval = config.integer("no_rope_layer_interval")
        rotary = [(number + 1) % interval != 0 for number in range(num_layers)]
    sources = config.integers("kv_source_layers", most=num_layers - 1) or [*range(num_layers)]
    if len(sources) != num_layers:
        raise config.error(f"kv_source_layers must have one number for each of {num_layers} layers")
    made: dict[tuple[bool, bool, bool], tuple[Mixer, ...]] = {}
    mixers = []
    for number, has in enumerate(has_indexer(config, model_type, num_layers)):
        key = (rotary[number], sources[number] == number, has)
        if key not in made:
            own = _indexed(config, shape if key[0] else bare)
            made[key] = (own._replace(keeps=key[1], indexer=own.indexer if has else None),)
        mixers.append(made[key])
    return config.model(model_type, mixers, attention=shape)


def _indexed(config: ConfigReader, shape: AttentionShape) -> Attention:
    return Attention(shape, most_read_tokens=config.integer("index_topk"), indexer=indexer(config, shape))
