"""GGUF metadata as config keys, for architectures with a latent or an indexer.

Source: load_arch_hparams in src/models of llama.cpp, and conversion/, in the version that llama-cpp-python 0.3.36
ships.
"""

from __future__ import annotations

from kvcalc.model.gguf.keys import Facts
from kvcalc.model.gguf.layers import Config


def expands_latent(facts: Facts) -> bool:
    """Return whether llama.cpp keeps K and V of every head of an MLA model instead of the latent.

    It does so for files made before April 2025 (llama.cpp pull request 12801), which have no key_length_mla.
    """
    return facts.metadata.get(f"{facts.arch}.attention.kv_lora_rank") is not None and not facts.metadata.get(
        f"{facts.arch}.attention.key_length_mla"
    )


def latent(facts: Facts, config: Config) -> Config:
    """DeepSeek V2, V3 and similar models.

    key_length and value_length are the widths of the latent, and key_length_mla and value_length_mla those of the
    heads. Older files and those of MiniCPM3 have only key_length and value_length, as the widths of the heads.
    """
    rank, rope = facts.integer("attention.kv_lora_rank"), facts.integer("rope.dimension_count")
    key, value = facts.integer("attention.key_length"), facts.integer("attention.value_length", least=0)
    if not expands_latent(facts):
        if (key, value) != (rank + rope, rank):
            raise facts.error(
                f"{facts.arch}.attention.key_length and value_length are {key} and {value}: they do not match a latent "
                f"of {rank} + {rope}"
            )
        key, value = facts.integer("attention.key_length_mla"), facts.integer("attention.value_length_mla")
    if key <= rope:
        raise facts.error(f"{facts.arch}: {rope} rotated dimensions do not fit into a key of {key}")
    heads = config["num_attention_heads"]
    for gone in ("num_key_value_heads", "head_dim", "v_head_dim"):
        config.pop(gone, None)
    return {
        **config, "num_attention_heads": heads, "num_key_value_heads": heads, "kv_lora_rank": rank,
        "q_lora_rank": facts.optional("attention.q_lora_rank", least=1), "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope, "v_head_dim": value,
    }  # fmt: skip


def glm_dsa(facts: Facts, config: Config) -> Config:
    """GLM-5 and later.

    GLM-5 and GLM-5.1 have an indexer in every layer. GLM-5.2, recognized by its context length, has one in the first
    three layers and then in every fourth layer. Files may list these layers.
    """
    stated = facts.flags("attention.indexer.types")
    if isinstance(stated, list):
        kinds = {"indexer_types": ["full" if has_indexer else "shared" for has_indexer in stated]}
    elif stated is not None:
        kinds = {"indexer_types": ["full" if stated else "shared"] * facts.num_layers}
    elif facts.integer("context_length") < 1_048_576:
        kinds = {"indexer_types": ["full"] * facts.num_layers}
    else:
        return {**latent(facts, config), "index_topk_freq": 4, "index_skip_topk_offset": 3}
    return {**latent(facts, config), **kinds}
