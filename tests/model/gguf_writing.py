"""Write GGUF files for tests from a preset's config, with the gguf package and as llama.cpp's converter fills them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvcalc.model.caches import RecurrentState
from kvcalc.model.presets import find_preset
from kvcalc.model.spec import ModelSpec, all_caches, weights_of
from kvcalc.model.tensors import ROUTER, Weight

Pairs = dict[str, Any]


def write(
    path: Path,
    arch: str,
    pairs: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
    file_type: int | None = None,
    **other: Any,
) -> Path:
    """Write a file with `pairs` under the architecture's keys, `other` under general keys, and zeros for `tensors`.

    A tensor is given as its shape in ggml's order (row first) and its type. The zeros are a hole, which takes no space.
    """
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in pairs.items():
        _add(writer, f"{arch}.{key}", value)
    for key, value in other.items():
        _add(writer, f"general.{key}", value)
    if file_type is not None:
        writer.add_file_type(file_type)
    writer.add_token_list(["<s>", "</s>", "a"])
    writer.add_array("tokenizer.ggml.scores", [0.0, 1.0, 2.0])
    writer.add_string("tokenizer.chat_template", "{{ messages }}" * 400)
    end = 0
    for name, (shape, kind) in (tensors or {}).items():
        quantized = gguf.GGMLQuantizationType[kind]
        size = gguf.GGML_QUANT_SIZES[quantized]
        stored = prod(shape) // size[0] * size[1]
        end += writer.ggml_pad(stored, gguf.GGUF_DEFAULT_ALIGNMENT)
        writer.add_tensor_info(name, [*reversed(shape)], np.dtype("float32"), stored, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, writer.ggml_pad(path.stat().st_size, gguf.GGUF_DEFAULT_ALIGNMENT) + end)
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def config_of(preset: str) -> dict[str, Any]:
    """Return a preset's config, or that of the language model inside it."""
    found = find_preset(preset)
    assert found is not None
    inner = found.config.get("text_config", found.config)
    assert isinstance(inner, dict)
    return inner


def base(config: Mapping[str, Any]) -> Pairs:
    """Return what the converter writes for every decoder (TextModel.set_gguf_parameters)."""
    heads = config.get("num_attention_heads") or config.get("n_head") or 0
    pairs: Pairs = {
        "block_count": config.get("num_hidden_layers") or config.get("n_layer"),
        "context_length": config.get("max_position_embeddings") or config.get("n_positions") or 2048,
        "embedding_length": config.get("hidden_size") or config.get("n_embd") or config.get("d_model"),
        "attention.head_count": heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    inner = config.get("intermediate_size") or config.get("n_inner")
    if inner or config.get("model_type") in _FOUR_TIMES:
        pairs["feed_forward_length"] = inner or 4 * pairs["embedding_length"]
    if config.get("num_key_value_heads"):
        pairs["attention.head_count_kv"] = config["num_key_value_heads"]
    if config.get("rope_theta"):
        pairs["rope.freq_base"] = float(config["rope_theta"])
    if config.get("head_dim"):
        pairs |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    for pair, keys in _EXPERTS.items():
        stated = [config[key] for key in keys if config.get(key)]
        if stated:
            pairs[pair] = stated[0]
    return pairs


_FOUR_TIMES = ("bloom", "falcon", "gpt2")
# The converters of the architectures write these from their configs (conversion/ of llama.cpp).
_EXPERTS = {
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"
    ),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "expert_latent_length": ("routed_expert_hidden_size",),
    "moe_latent_size": ("moe_latent_size",),
    "attn_res.block_size": ("attn_res_block_size",),
}  # fmt: skip


def tensors_of(spec: ModelSpec, arch: str, kind: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the tensors of a model as the converter names them: matrices in `kind`, vectors and routers in fp32.

    The gguf package has the names. A weight without one keeps its own name.
    """
    weights = weights_of(spec)
    assert weights is not None
    numbers = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    number = numbers.get(arch, gguf.MODEL_ARCH.DEEPSEEK2)  # those that the package does not know yet have MLA
    names = gguf.get_tensor_name_map(number, spec.num_layers)
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}

    def add(prefix: str, layer: int, weight: Weight) -> None:
        module = prefix.format(layer) + weight.name.replace("experts.0.", "experts.")
        stem = "enc.blk" if prefix.startswith("encoder") else "blk"
        name = names.get_name(module) or (f"{stem}.{layer}.{weight.name}" if prefix else module)
        name += "_exps" if weight.copies > 1 and "_exps" not in name else ""
        copies = (weight.copies,) if weight.copies > 1 else ()
        is_matrix = weight.columns > 1
        shape = (weight.columns, weight.rows) if is_matrix else (weight.rows,)
        if name.endswith(("ssm_conv1d", "shortconv.conv")):
            state = next(cache for cache in all_caches(spec) if isinstance(cache, RecurrentState))
            shape = (state.conv_kernel, state.conv_channels)
            if weight.parameters > prod(shape):
                tensors[f"{name}.bias"] = (weight.parameters - prod(shape),), "F32"
        tensors[f"{name}.weight"] = (*shape, *copies), kind if is_matrix and weight.role != ROUTER else "F32"
        if weight.bias:
            tensors[f"{name}.bias"] = (weight.bias, *copies), "F32"

    add("", 0, weights.embedding)
    for block in weights.blocks:
        for layer in block.numbers:
            for weight in block.weights:
                add(block.prefix, layer, weight)
    return tensors


def mla(config: Mapping[str, Any], *, old: bool = False) -> Pairs:
    """Return the keys of MLA: the latent as one head, and the widths of the heads. Old files have only the latter."""
    rank, rope, heads = config["kv_lora_rank"], config["qk_rope_head_dim"], config["num_attention_heads"]
    key, value = config["qk_nope_head_dim"] + rope, config.get("v_head_dim") or config["hidden_size"] // heads
    pairs = {**base(config), "attention.kv_lora_rank": rank, "rope.dimension_count": rope}
    if config.get("q_lora_rank"):
        pairs["attention.q_lora_rank"] = config["q_lora_rank"]
    if old:
        return pairs | {
            "attention.head_count_kv": heads, "attention.key_length": key, "attention.value_length": value,
        }  # fmt: skip
    return pairs | {
        "attention.head_count_kv": 1, "attention.key_length": rank + rope, "attention.value_length": rank,
        "attention.key_length_mla": key, "attention.value_length_mla": value,
    }  # fmt: skip


def ssm(inner: int, rank: int, state: int, groups: int, kernel: int = 4) -> Pairs:
    return {
        "ssm.inner_size": inner, "ssm.time_step_rank": rank, "ssm.state_size": state, "ssm.group_count": groups,
        "ssm.conv_kernel": kernel,
    }  # fmt: skip
