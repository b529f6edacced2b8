"""Gemma 4 and Gemma 3n: windows in most layers, and last layers which read an earlier layer's cache.

Gemma 4's layers that see all have wider heads, and in the larger models fewer of them.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.caches import Cache, FullAttention, SlidingWindowAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, group_layers

KEYS = frozenset(
    (
        "num_hidden_layers num_attention_heads num_key_value_heads num_global_key_value_heads hidden_size head_dim "
        "global_head_dim sliding_window layer_types num_kv_shared_layers attention_k_eq_v attention_bias "
        "rope_parameters rope_theta rope_local_base_freq rope_scaling use_bidirectional_attention "
        "hidden_size_per_layer_input vocab_size_per_layer_input enable_moe_block num_experts top_k_experts "
        "moe_intermediate_size activation_sparsity_pattern laurel_rank altup_num_inputs use_double_wide_mlp "
        "rms_norm_eps"
    ).split()
)

# Source: Gemma4TextConfig and Gemma3nTextConfig, Transformers 5.23.0.
_DEFAULTS: dict[str, dict[str, object]] = {
    "gemma4_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
        "sliding_window": 512, "num_kv_shared_layers": 0,
    },
    "gemma4_unified_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
        "sliding_window": 1024, "num_kv_shared_layers": 0,
    },
    "gemma3n_text": {
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
        "num_kv_shared_layers": 15,
    },
}  # fmt: skip
_PATTERN = {"gemma4_text": 6, "gemma4_unified_text": 6, "gemma3n_text": 5}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """The last num_kv_shared_layers layers keep nothing: they read the last earlier layer of their own kind."""
    config = config.with_defaults(_DEFAULTS[model_type])
    if config.config.get("use_bidirectional_attention") == "all":
        raise ModelError(
            f"{config.name}: use_bidirectional_attention: an encoder's window is cut in half; not modelled"
        )
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim")
    num_kv_heads = config.check_groups(num_heads, config.integer("num_key_value_heads"))
    windowed: tuple[Cache, ...] = (
        SlidingWindowAttention(config.integer("sliding_window"), num_kv_heads, head_dim, head_dim),
    )
    full = (_full(config, model_type, num_heads, num_kv_heads, head_dim),)
    kinds = layer_types(config, model_type, num_layers)
    own = num_layers - config.integer("num_kv_shared_layers", least=0, most=num_layers)
    if set(kinds[:own]) != set(kinds):
        raise ModelError(f"{config.name}: num_kv_shared_layers leaves no layer whose cache the shared ones could read")
    nothing: tuple[Cache, ...] = ()
    layers = [
        nothing if number >= own else windowed if kind == "sliding_attention" else full
        for number, kind in enumerate(kinds)
    ]
    bias = config.boolean("attention_bias", default=False)
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, config.optional_integer("hidden_size"), qkv_bias=bias,
        output_bias=bias, rope_dim=head_dim, rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    return config.model(model_type, attention, group_layers(layers))


def _full(config: ConfigReader, model_type: str, num_heads: int, num_kv_heads: int, head_dim: int) -> Cache:
    """The cache of a layer that sees all. num_global_key_value_heads counts only with attention_k_eq_v."""
    if model_type == "gemma3n_text":
        return FullAttention(num_kv_heads, head_dim, head_dim)
    heads = config.optional_integer("num_global_key_value_heads")
    if heads is None or not config.boolean("attention_k_eq_v", default=False):
        heads = num_kv_heads
    width = config.integer("global_head_dim")
    return FullAttention(config.check_groups(num_heads, heads), width, width)


def layer_types(config: ConfigReader, model_type: str, num_layers: int) -> list[str]:
    """The config's own list, else the family's pattern. Gemma 4's last layer sees all, whatever is written."""
    kinds = config.strings("layer_types", num_layers, ("full_attention", "sliding_attention"))
    pattern = _PATTERN[model_type]
    if kinds is None:
        kinds = ["sliding_attention" if (n + 1) % pattern else "full_attention" for n in range(num_layers)]
    return [*kinds[:-1], "full_attention"] if model_type != "gemma3n_text" else kinds
