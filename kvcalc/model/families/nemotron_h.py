"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, or an MLP or experts, which keep nothing."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.experts import with_defaults
from kvcalc.model.families.common import decoder_body
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, AttentionShape, Projections
from kvcalc.model.mixers.recurrent import mamba2
from kvcalc.model.reader import MAX_LAYERS, Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Weight, experts, plain_mlp, router
from kvcalc.model.type_tables import defaults_of

# The keys that decide what a layer keeps. In a Puzzle model, a layer may state others of its own.
_OF_ALL_LAYERS = (
    "num_attention_heads num_key_value_heads head_dim mamba_num_heads mamba_head_dim n_groups ssm_state_size "
    "conv_kernel"
).split()
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """hybrid_override_pattern has one letter per layer: M is Mamba-2, * attention, - an MLP, E experts.

    The convolution of Mamba-2 runs over its inner width and both group matrices. Its state is heads x head_dim x
    ssm_state_size, in fp32; engines keep it in mamba_ssm_cache_dtype. Attention has no biases. Source:
    NemotronHMamba2Mixer and NemotronHAttention, Transformers 5.23.0.

    The layers of a Puzzle model have numbers of experts of their own (block_configs), so its weights are not counted.
    Source: NemotronHPuzzleConfig (srt/configs/nemotron_h.py), SGLang 0.5.23.
    """
    for block in config.objects("block_configs"):
        for key in _OF_ALL_LAYERS:
            block.refuse(key, "of a single layer is not supported")
    config = config.with_defaults(config.shares({"attention_head_dim": "head_dim"}))
    config = with_defaults(config, defaults_of("nemotron_h"))
    config.refuse("sliding_window", "windows are not supported for this family")
    config.refuse_other("mamba_ssm_cache_dtype", "float32", "float16", "bfloat16")
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", "attention_head_dim")
    num_kv_heads = config.check_groups(num_heads, config.integer("num_key_value_heads"))
    hidden_size = config.integer("hidden_size")
    heads = config.integer("mamba_num_heads")
    mamba = mamba2(
        heads * config.integer("mamba_head_dim"), heads, config.integer("n_groups"), config.integer("ssm_state_size"),
        config.integer("conv_kernel"), hidden_size, "mixer", bias=config.boolean("use_bias", default=False),
        conv_bias=config.boolean("use_conv_bias", default=True),
    )  # fmt: skip
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, head_dim, hidden_size)
    kept: dict[str, tuple[Mixer, ...]] = {
        "mamba": (mamba,),
        "attention": (Attention(shape, names=Projections("mixer")),),
        "mlp": (),
        "moe": (),
    }
    kinds = _layer_kinds(config)
    body = None if model_type == "nemotron_h_puzzle" else lambda: _body(config, kinds)
    return config.model("nemotron_h", [kept[kind] for kind in kinds], body, attention=shape)


def _body(config: ConfigReader, kinds: list[str]) -> Body:
    """Source: NemotronHMoE and NemotronHMLP, Transformers 5.23.0."""
    width = config.integer("hidden_size")
    mlps: dict[str, tuple[Weight, ...]] = {"mamba": (), "attention": ()}
    if "mlp" in kinds:
        bias = config.boolean("mlp_bias", default=False)
        mlps["mlp"] = plain_mlp("mixer.up_proj", "mixer.down_proj", width, config.integer("intermediate_size"), bias)
    if "moe" in kinds:
        mlps["moe"] = _moe(config, width)
    return decoder_body(
        config, [mlps[kind] for kind in kinds], norms=("norm",), last="backbone.norm_f",
        embedding="backbone.embeddings", prefix="backbone.layers.{}.",
    )  # fmt: skip


def _moe(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    """Experts without a gate. Those of Nemotron 3 Super and Ultra work in a narrower width (moe_latent_size)."""
    count, inner = config.integer("n_routed_experts", "num_local_experts"), config.integer("moe_intermediate_size")
    bias = config.boolean("mlp_bias", default=False)
    latent = config.optional_integer("moe_latent_size")
    matrices = plain_mlp("mixer.experts.0.up_proj", "mixer.experts.0.down_proj", latent or width, inner)
    found = (
        router("mixer.gate", width, count),
        *experts(matrices, count, config.integer("num_experts_per_tok", most=count)),
        *plain_mlp(
            "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj", width,
            config.integer("moe_shared_expert_intermediate_size"), bias,
        ),
    )  # fmt: skip
    if latent is not None:
        found += plain_mlp("mixer.fc1_latent_proj", "mixer.fc2_latent_proj", width, latent, bias)
    return found


def _layer_kinds(config: ConfigReader) -> list[str]:
    """Return the kind of every layer. Their number must match num_hidden_layers if the config has it."""
    pattern = config.chosen("hybrid_override_pattern", _LETTERS, f"may contain only {', '.join(_LETTERS)}")
    if pattern is None:
        listed = len(config.items("layers_block_type"))
        num_layers = config.optional_integer("num_hidden_layers", most=MAX_LAYERS) or listed
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        stated = config.strings("layers_block_type", num_layers, (*_LETTERS.values(), *names))
        if stated is None:
            raise ModelError(f"{config.name}: hybrid_override_pattern is missing")
        return [names.get(kind, kind) for kind in stated]
    if not pattern:
        raise config.error("hybrid_override_pattern is empty")
    if config.optional_integer("num_hidden_layers") not in (None, len(pattern)):
        raise ModelError(f"{config.name}: hybrid_override_pattern has {len(pattern)} layers: num_hidden_layers differs")
    return pattern
