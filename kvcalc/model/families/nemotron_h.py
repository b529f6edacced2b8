"""Nemotron-H and Nemotron 3: layers of Mamba-2, of attention, and of an MLP or experts which keep nothing."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.caches import Cache, FullAttention
from kvcalc.model.families.mamba_state import mamba2_state
from kvcalc.model.reader import MAX_LAYERS, ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, group_layers

KEYS = frozenset(
    (
        "num_hidden_layers num_attention_heads num_key_value_heads hidden_size head_dim attention_head_dim "
        "hybrid_override_pattern layers_block_type mtp_hybrid_override_pattern mtp_layers_block_type sliding_window "
        "ssm_state_size mamba_num_heads mamba_head_dim n_groups conv_kernel expand use_conv_bias "
        "mamba_ssm_cache_dtype use_mamba_kernels mamba_hidden_act mamba_proj_bias attention_bias mlp_bias use_bias "
        "rope_theta moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok "
        "moe_shared_expert_intermediate_size moe_latent_size norm_topk_prob rms_norm_eps"
    ).split()
)

# Source: NemotronHConfig, Transformers 5.23.0.
_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "n_groups": 8, "conv_kernel": 4, "ssm_state_size": 128}
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """hybrid_override_pattern names every layer: M Mamba-2, * attention, - an MLP, E experts.

    Mamba-2's convolution runs over its inner width and both its group matrices; its state is heads x head_dim x
    ssm_state_size, in mamba_ssm_cache_dtype (fp32). Source: NemotronHMamba2Mixer, Transformers 5.23.0.
    """
    if "attention_head_dim" in config.config:
        config = config.with_defaults({"head_dim": config.config["attention_head_dim"]})
    config = config.with_defaults(_DEFAULTS)
    config.refuse("sliding_window", "windows of this family are not modelled")
    if config.config.get("mamba_ssm_cache_dtype") not in (None, "float32"):
        raise ModelError(f"{config.name}: mamba_ssm_cache_dtype: only float32 is known")
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", "attention_head_dim")
    num_kv_heads = config.check_groups(num_heads, config.integer("num_key_value_heads"))
    groups, width = config.integer("n_groups"), config.integer("ssm_state_size")
    heads = config.integer("mamba_num_heads")
    inner = heads * config.integer("mamba_head_dim")
    kept: dict[str, tuple[Cache, ...]] = {
        "mamba": (mamba2_state(inner, heads, groups, width, config.integer("conv_kernel")),),
        "attention": (FullAttention(num_kv_heads, head_dim, head_dim),),
        "mlp": (),
        "moe": (),
    }
    bias = config.boolean("attention_bias", default=False)
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, config.integer("hidden_size"), qkv_bias=bias, output_bias=bias
    )
    return config.model(model_type, attention, group_layers(kept[kind] for kind in layer_kinds(config)))


def layer_kinds(config: ConfigReader) -> list[str]:
    """The kind of every layer, as many as num_hidden_layers says where it does."""
    pattern = config.config.get("hybrid_override_pattern")
    if pattern is None:
        listed = len(config.items("layers_block_type"))
        num_layers = config.optional_integer("num_hidden_layers", most=MAX_LAYERS) or listed
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        stated = config.strings("layers_block_type", num_layers, (*_LETTERS.values(), *names))
        if stated is None:
            raise ModelError(f"{config.name}: hybrid_override_pattern is missing")
        return [names.get(kind, kind) for kind in stated]
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_LETTERS):
        raise ModelError(f"{config.name}: hybrid_override_pattern may hold {', '.join(_LETTERS)} alone")
    if config.optional_integer("num_hidden_layers") not in (None, len(pattern)):
        raise ModelError(f"{config.name}: hybrid_override_pattern names {len(pattern)} layers, not num_hidden_layers")
    return [_LETTERS[letter] for letter in pattern]
