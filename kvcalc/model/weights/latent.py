"""Multi-head latent attention with experts: DeepSeek V2 to V3.2, Kimi K2, GLM-4.7-Flash and GLM-5, MiniCPM3."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.families.deepseek import has_indexer
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.decoder import moe, with_defaults
from kvcalc.model.weights.decoder_layouts import Experts
from kvcalc.model.weights.tensors import OTHER, Block, ModelWeights, Weight, around, gated_mlp, linear, norm, remaining

_EXPERTS = Experts("n_routed_experts", shared=True)
_V3 = {
    "vocab_size": 129280, "intermediate_size": 18432, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536,
}  # fmt: skip
_V32 = {**_V3, "index_n_heads": 64, "index_head_dim": 128}
# Source: the configuration classes of these families, Transformers 5.23.0; kimi_k2 is read as deepseek_v3.
_DEFAULTS: dict[str, dict[str, object]] = {
    "deepseek_v2": {
        "vocab_size": 102400, "intermediate_size": 11008, "n_routed_experts": 64, "n_shared_experts": 2,
        "moe_intermediate_size": 1407, "first_k_dense_replace": 0, "q_lora_rank": 1536,
    },
    "deepseek_v3": {**_V3},
    "kimi_k2": {**_V3},
    "deepseek_v32": {**_V32},
    "glm_moe_dsa": {
        **_V32, "vocab_size": 154880, "intermediate_size": 12288, "q_lora_rank": 2048, "index_n_heads": 32,
    },
    "glm4_moe_lite": {
        "vocab_size": 154880, "intermediate_size": 10240, "n_routed_experts": 64, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "q_lora_rank": 768,
    },
    "minicpm3": {"vocab_size": 73448, "intermediate_size": 6400, "q_lora_rank": 768},
}  # fmt: skip
_INDEXED = ("deepseek_v32", "glm_moe_dsa")
# Families whose configs may list the kind of every layer's MLP.
_LISTED = ("deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Latent attention in every layer, an indexer in those that have one, experts after the first dense layers."""
    config = with_defaults(config, _DEFAULTS[model_type])
    if config.config.get("moe_layer_freq") not in (None, 1):
        raise ModelError(f"{config.name}: moe_layer_freq: only 1 is known")
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers")
    common = (
        *latent_attention(config, width, model_type == "minicpm3"),
        norm("input_layernorm", width),
        norm("post_attention_layernorm", width),
    )
    blocks = [Block("model.layers.{}.", range(num_layers), common)]
    if model_type in _INDEXED:
        indexed = [n for n, has in enumerate(has_indexer(config, model_type, num_layers)) if has]
        blocks.append(Block("model.layers.{}.", indexed, _indexer(config, width)))
    sparse = [] if model_type == "minicpm3" else _sparse_layers(config, model_type, num_layers)
    dense = remaining(num_layers, sparse)
    if dense:
        bias = config.boolean("mlp_bias", default=False)
        blocks.append(
            Block("model.layers.{}.", dense, gated_mlp("mlp", width, config.integer("intermediate_size"), bias))
        )
    if sparse:
        blocks.append(Block("model.layers.{}.", sparse, moe(config, _EXPERTS, width)))
    tied = config.boolean("tie_word_embeddings", default=model_type == "minicpm3")
    embedding, ends = around(vocab, width, tied, norm("model.norm", width))
    return ModelWeights(embedding, tied, (*blocks, ends))


def latent_attention(config: ConfigReader, width: int, derives_v: bool = False) -> tuple[Weight, ...]:
    """Query, through its own low rank where there is one, the latent down and up, and the output.

    attention_bias adds a bias to what reads the model's width and to the output. `derives_v`: v_head_dim may be
    hidden_size / heads. Source: DeepseekV3Attention, Transformers 5.23.0.
    """
    heads, rope = config.integer("num_attention_heads"), config.integer("qk_rope_head_dim")
    query = heads * (config.integer("qk_nope_head_dim") + rope)
    rank, q_rank = config.integer("kv_lora_rank"), config.optional_integer("q_lora_rank")
    v_dim = config.optional_integer("v_head_dim") if derives_v else config.integer("v_head_dim")
    v_dim = width // heads if v_dim is None else v_dim
    bias = config.boolean("attention_bias", default=False)
    if q_rank is None:
        queries: tuple[Weight, ...] = (linear("self_attn.q_proj", width, query),)
    else:
        queries = (
            linear("self_attn.q_a_proj", width, q_rank, bias),
            norm("self_attn.q_a_layernorm", q_rank),
            linear("self_attn.q_b_proj", q_rank, query),
        )
    return (
        *queries,
        linear("self_attn.kv_a_proj_with_mqa", width, rank + rope, bias),
        norm("self_attn.kv_a_layernorm", rank),
        linear("self_attn.kv_b_proj", rank, query - heads * rope + heads * v_dim),
        linear("self_attn.o_proj", heads * v_dim, width, bias),
    )


def _indexer(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    """Source: DeepseekV32Indexer, Transformers 5.23.0."""
    heads, head_dim = config.integer("index_n_heads"), config.integer("index_head_dim")
    rank = config.integer("q_lora_rank")
    return (
        linear("self_attn.indexer.wq_b", rank, heads * head_dim),
        linear("self_attn.indexer.wk", width, head_dim),
        norm("self_attn.indexer.k_norm", head_dim, bias=True),
        # Published in 16 or 32 bits where all about it is in 8.
        linear("self_attn.indexer.weights_proj", width, heads)._replace(role=OTHER),
    )


def _sparse_layers(config: ConfigReader, model_type: str, num_layers: int) -> list[int]:
    kinds = config.strings("mlp_layer_types", num_layers, ("dense", "sparse")) if model_type in _LISTED else None
    if kinds is not None:
        return [number for number, kind in enumerate(kinds) if kind == "sparse"]
    # GLM-4.7-Flash's class knows the list alone; without one its first layer is dense.
    first = 1 if model_type == "glm4_moe_lite" else config.integer("first_k_dense_replace", least=0)
    return [*range(min(first, num_layers), num_layers)]
