"""The indexers of MLA: what each has, and which layers have one."""

from __future__ import annotations

from kvcalc.model.mixers.attention import AttentionShape, Indexer
from kvcalc.model.reader import ConfigReader
from kvcalc.model.tensors import norm, other, replicated


def indexer(config: ConfigReader, shape: AttentionShape) -> Indexer:
    """Return the indexer.

    Every rank holds its projections (ReplicatedLinear, DeepseekV2MLAAttention of vLLM 0.33.0), because all heads share
    its keys. Source: DeepseekV32Indexer, Transformers 5.23.0.
    """
    heads, head_dim = config.optional_integer("index_n_heads") or 1, config.integer("index_head_dim")
    width = shape.hidden_size or 0
    weights = (
        replicated("self_attn.indexer.wq_b", shape.q_lora_rank, heads * head_dim),
        replicated("self_attn.indexer.wk", width, head_dim),
        norm("self_attn.indexer.k_norm", head_dim, bias=True),
        # Published in 16 or 32 bits, although the other weights of the layer have 8 bits.
        other("self_attn.indexer.weights_proj", heads, width),
    )
    return Indexer(heads, head_dim, weights)


def has_indexer(config: ConfigReader, model_type: str, num_layers: int) -> list[bool]:
    """Return for each layer whether it has its own indexer. The others reuse the tokens picked by the last indexer.

    GLM-5.2 states this as a list (indexer_types), as a string of F and S (index_topk_pattern), or as a step
    (index_topk_freq) with an offset. Hunyuan 4 states a list; without one, the first layer and then every fourth layer
    from the second on have an indexer. Source: GlmMoeDsaConfig and HYV4Config, Transformers 5.23.0.
    """
    if model_type not in ("glm5_next_text", "glm_moe_dsa", "hy_v4", "mistral_large4_text"):
        return [True] * num_layers
    kinds = config.strings("indexer_types", num_layers, ("full", "shared"))
    if kinds is not None:
        return [kind == "full" for kind in kinds]
    if model_type == "hy_v4":
        return [number == 0 or number % 4 == 1 for number in range(num_layers)]
    must = f"must give F or S for each of {num_layers} layers"
    pattern = config.chosen("index_topk_pattern", {"F": True, "S": False, "full": True, "shared": False}, must)
    if pattern is not None:
        if len(pattern) != num_layers:
            raise config.error(f"index_topk_pattern {must}")
        return pattern
    step = max(config.optional_integer("index_topk_freq", least=0) or 1, 1)
    offset = config.optional_integer("index_skip_topk_offset", least=0)
    offset = 2 if offset is None else offset
    return [max(number - offset + 1, 0) % step == 0 for number in range(num_layers)]
