"""Hybrids that are published with code of their own: AliceAI, GigaChat 3.5, Jet-Nemotron and MiniCPM-SALA.

Their weights are not counted.
"""

from __future__ import annotations

from kvcalc.model.caches import RecurrentState
from kvcalc.model.families.common import grouped_shape, latent_shape
from kvcalc.model.families.delta_latent import delta_attention
from kvcalc.model.families.gated_delta import gated_delta_net, layer_types
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.type_tables import defaults_of


def read_alice_ai(config: ConfigReader, model_type: str) -> ModelSpec:
    """AliceAI: Kimi delta attention, and attention whose queries also give a gate.

    Source: AliceAIDecoderBlock, vLLM 0.33.0, which takes Kimi's layer with as many value heads as key heads.
    """
    config = config.with_defaults(defaults_of(model_type))
    for key in ("linear_num_{}_heads", "linear_{}_head_dim"):
        if config.integer(key.format("key")) != config.integer(key.format("value")):
            raise config.error(f"{key.format('key')} and {key.format('value')} must be the same")
    sized = config.with_values({
        "linear_num_heads": config.integer("linear_num_key_heads"),
        "linear_head_dim": config.integer("linear_key_head_dim"),
    })  # fmt: skip
    shape = grouped_shape(config, output_gate=True)
    return _mixed(config, model_type, (Attention(shape),), (delta_attention(sized, shape.hidden_size or 0),))


def read_gigachat(config: ConfigReader, model_type: str) -> ModelSpec:
    """GigaChat 3.5: gated delta nets, and MLA in the layers of layer_types or full_attention_layers.

    Source: GigaChat35Config, SGLang 0.5.23.
    """
    config = config.with_defaults(defaults_of(model_type))
    config.refuse_other("mamba_ssm_dtype", "float32")
    num_layers, shape = config.num_layers("num_hidden_layers"), latent_shape(config)
    if not config.has("layer_types"):
        full = config.integers("full_attention_layers", most=num_layers - 1)
        kinds = ["full_attention" if number in full else "linear_attention" for number in range(num_layers)]
        config = config.with_values({"layer_types": kinds})
    delta = gated_delta_net(config, model_type, shape.hidden_size or 0)
    return _mixed(config, model_type, (Attention(shape),), (delta,))


def _mixed(
    config: ConfigReader, model_type: str, full: tuple[Attention, ...], linear: tuple[Recurrence, ...]
) -> ModelSpec:
    kept: dict[str, tuple[Mixer, ...]] = {"full_attention": full, "linear_attention": linear}
    kinds = layer_types(config, config.num_layers("num_hidden_layers"))
    return config.model(model_type, [kept[kind] for kind in kinds], attention=full[0].shape)


def read_jet_nemotron(config: ConfigReader, model_type: str) -> ModelSpec:
    """Jet-Nemotron: layers with JetBlock, with a window, or with full attention.

    JetBlock keeps a state in fp32, and the inputs of convolutions over queries, keys and values. Source:
    JetNemotronConfig, SGLang 0.5.23.
    """
    num_layers, shape = config.num_layers("num_hidden_layers"), grouped_shape(config)
    efficient = config.nested("efficient_attention_config")
    jet = efficient.nested("jet")
    heads, key = jet.integer("num_heads"), jet.integer("head_dim")
    value = int(key * jet.number("expand_v", default=1.0))
    state = RecurrentState(
        heads * (2 * key + value), jet.integer("conv_size"), heads * key * value, num_heads=heads
    )  # fmt: skip
    kept: dict[str, tuple[Mixer, ...]] = {
        "attn": (Attention(shape),), "jet": (Recurrence(state, "delta", heads, heads, key, value),),
    }  # fmt: skip
    kinds = config.strings("layer_types", num_layers, ("attn", "jet", "swa"))
    if kinds is None:
        raise config.error("layer_types is missing")
    if "swa" in kinds:
        kept["swa"] = (Attention(shape, efficient.nested("swa").integer("window_size")),)
    return config.model(model_type, [kept[kind] for kind in kinds], attention=shape)


def read_minicpm_sala(config: ConfigReader, model_type: str) -> ModelSpec:
    """MiniCPM-SALA: lightning attention, which keeps a state in fp32, and attention in the other layers.

    mixer_types repeats until it names every layer. Source: MiniCPMHybridConfig, SGLang 0.5.23.
    """
    num_layers, shape = config.num_layers("num_hidden_layers"), grouped_shape(config)
    heads = config.optional_integer("lightning_nkv") or shape.num_kv_heads
    width = config.optional_integer("lightning_head_dim") or shape.qk_head_dim
    if (config.optional_integer("lightning_nh") or shape.num_heads) != heads:
        raise config.error("lightning_nh and lightning_nkv must be the same")
    lightning = Recurrence(RecurrentState(0, 1, heads * width * width, num_heads=heads))
    listed = [str(kind) for kind in (config.items("mixer_types") if config.is_set("mixer_types") else ["minicpm4"])]
    if len(listed) > num_layers or not {"minicpm4", "lightning-attn"}.issuperset(listed):
        raise config.error("mixer_types must name minicpm4 or lightning-attn for each layer at most once")
    kept: dict[str, tuple[Mixer, ...]] = {"minicpm4": (Attention(shape),), "lightning-attn": (lightning,)}
    return config.model(
        model_type, [kept[listed[number % len(listed)]] for number in range(num_layers)], attention=shape
    )
