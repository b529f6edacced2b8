"""Plain decoders: embedding, layers of grouped attention and an MLP or experts, head."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.decoder_layouts import LAYOUTS, Experts, Layout
from kvcalc.model.weights.tensors import (
    Block,
    ModelWeights,
    Weight,
    around,
    experts,
    gated_mlp,
    grouped_attention,
    linear,
    norm,
    other,
    plain_mlp,
    remaining,
    router,
)

# The number of experts under all its names. Source: attribute_map of the configuration classes, Transformers 5.23.0.
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def with_defaults(config: ConfigReader, defaults: Mapping[str, object]) -> ConfigReader:
    """`config` with a family's defaults; not that of the number of experts where it stands under another name."""
    if any(config.config.get(key) is not None for key in _EXPERT_KEYS):
        defaults = {key: value for key, value in defaults.items() if key not in _EXPERT_KEYS}
    return config.with_defaults(defaults)


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """The weights of a family in `LAYOUTS`."""
    layout = Layout(LAYOUTS[model_type])
    defaults = {"vocab_size": layout.vocab_size, "intermediate_size": layout.intermediate_size, **layout.defaults}
    config = with_defaults(config, defaults)
    if model_type == "llava":
        _check_flat_llava(config)
    width = config.integer("hidden_size")
    num_layers = config.num_layers("num_hidden_layers")
    common = (*_attention(config, layout, width), *_norms(config, layout, width))
    numbers = range(num_layers)
    if layout.experts is None:
        blocks = [Block("model.layers.{}.", numbers, (*common, *_mlp(config, layout, width)))]
    else:
        sparse = sparse_layers(config, layout.experts, num_layers)
        dense = remaining(num_layers, sparse)
        blocks = [
            Block("model.layers.{}.", numbers, common),
            Block("model.layers.{}.", sparse, moe(config, layout.experts, width)),
        ]
        if dense:
            blocks.append(Block("model.layers.{}.", dense, _mlp(config, layout, width)))
    outer = (norm(layout.final_norm, width, layout.norm_bias),) if layout.final_norm else ()
    tied = config.boolean("tie_word_embeddings", default=layout.tied)
    head_bias = _flag(config, layout.head_bias)
    if tied and head_bias:
        outer = (*outer, other("lm_head.bias", config.integer("vocab_size")))
    embedding, ends = around(config.integer("vocab_size"), width, tied, *outer, head_bias=head_bias)
    return ModelWeights(embedding, tied, (*blocks, ends))


def _check_flat_llava(config: ConfigReader) -> None:
    """Refuse sizes Transformers would not build: of LLaVA's own flat config it reads none and takes LLaMA-7B's."""
    built = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    for key, value in {**built, "vocab_size": 32000}.items():
        if config.integer(key) != value:
            raise ModelError(
                f"{config.name}: {key}: LLaVA's flat config means another model to Transformers; no count is given"
            )


def sparse_layers(config: ConfigReader, rule: Experts, num_layers: int) -> range | list[int]:
    """The layers which have experts."""
    if rule.layers == "first_dense":
        return range(min(config.integer("first_k_dense_replace", least=0), num_layers), num_layers)
    if rule.layers == "step":
        step = config.optional_integer("decoder_sparse_step", least=1) or 1
        dense = [number for number in config.items("mlp_only_layers") if type(number) is int]
        return [number for number in remaining(num_layers, dense) if (number + 1) % step == 0]
    return range(num_layers)


def moe(config: ConfigReader, rule: Experts, width: int) -> tuple[Weight, ...]:
    """Router, experts and, where the family has them, shared experts of one layer."""
    count, inner = config.integer(rule.number, *_EXPERT_KEYS), config.integer(rule.inner)
    read = config.integer("num_experts_per_tok")
    if read > count:
        raise ModelError(f"{config.name}: num_experts_per_tok {read} is more than {rule.number} {count}")
    one = f"{rule.prefix}.experts.0"
    gate, up, down = rule.names
    matrices = (
        linear(f"{one}.{gate}", width, inner, rule.bias),
        linear(f"{one}.{up}", width, inner, rule.bias),
        linear(f"{one}.{down}", inner, width, rule.bias),
    )
    found = (router(f"{rule.prefix}.{rule.router}", width, count, rule.bias), *experts(matrices, count, read))
    if rule.shared:
        shared = config.integer("n_shared_experts", least=0)
        found += gated_mlp(f"{rule.prefix}.shared_experts", width, inner * shared) if shared else ()
    if rule.gated_shared:
        wide = config.integer("shared_expert_intermediate_size")
        found += gated_mlp(f"{rule.prefix}.shared_expert", width, wide)
        found += (router(f"{rule.prefix}.shared_expert_gate", width, 1),)
    return found


def _attention(config: ConfigReader, layout: Layout, width: int) -> tuple[Weight, ...]:
    num_heads = config.integer("num_attention_heads")
    head_dim = config.head_dim(width, num_heads)
    num_kv_heads = config.optional_integer("num_key_value_heads") or num_heads
    found = grouped_attention(
        "self_attn", width, num_heads, num_kv_heads, head_dim,
        _flag(config, layout.qkv_bias), _flag(config, layout.output_bias),
    )  # fmt: skip
    if layout.fused_qkv:
        rows = sum(weight.rows for weight in found[:3])
        found = (linear("self_attn.qkv_proj", width, rows), found[3])
    if layout.output_name != "o_proj":
        found = (*found[:3], found[3]._replace(name=f"self_attn.{layout.output_name}"))
    if layout.sinks:
        found += (other("self_attn.sinks", num_heads),)
    if layout.qk_norm and (not layout.qk_norm_key or config.boolean(layout.qk_norm_key, default=False)):
        widths = (num_heads * head_dim, num_kv_heads * head_dim) if layout.qk_norm == "width" else (head_dim, head_dim)
        found += tuple(
            norm(f"self_attn.{name}", elements, layout.qk_norm == "head_bias")
            for name, elements in zip(layout.qk_norm_names, widths)
        )
    return found


def _norms(config: ConfigReader, layout: Layout, width: int) -> tuple[Weight, ...]:
    is_parallel = bool(layout.parallel_key) and config.boolean(layout.parallel_key, default=False)
    names = layout.norms[:1] if is_parallel else layout.norms
    return tuple(norm(name, width, layout.norm_bias) for name in names)


def _mlp(config: ConfigReader, layout: Layout, width: int) -> tuple[Weight, ...]:
    inner = config.integer("intermediate_size")
    bias = _flag(config, layout.mlp_bias)
    if layout.mlp == "gated":
        return gated_mlp("mlp", width, inner, bias)
    if layout.mlp == "fused":
        return (linear("mlp.gate_up_proj", width, 2 * inner, bias), linear("mlp.down_proj", inner, width, bias))
    up, down = layout.mlp_names
    found = plain_mlp(f"mlp.{up}", f"mlp.{down}", width, inner, bias)
    if layout.mlp == "xielu":
        found += (other("mlp.act_fn.alpha_p", 1), other("mlp.act_fn.alpha_n", 1))
    return found


def _flag(config: ConfigReader, rule: bool | str) -> bool:
    return config.boolean(rule, default=False) if isinstance(rule, str) else rule
