"""Read a GGUF file into a ModelSpec: its metadata are mapped to the keys of a config.json and take the same readers.

An unknown architecture, an unknown key that may change the cache, and a tensor shape that contradicts the metadata are
errors.
"""

from __future__ import annotations

from kvcalc.errors import ModelError, nearest
from kvcalc.model.gguf.architectures import (
    BY_LAYER,
    DERIVED_HEADS,
    ENCODERS,
    OWN_HEADS,
    builder_of,
    known_architectures,
)
from kvcalc.model.gguf.files import GgufModel, read_files
from kvcalc.model.gguf.keys import Facts
from kvcalc.model.gguf.latent import expands_latent
from kvcalc.model.gguf.layers import Config
from kvcalc.model.gguf.weights import count_weights, expected_rows
from kvcalc.model.hf_config import read_config
from kvcalc.model.spec import GgufFacts, ModelSpec

_OTHER_FILES = {
    "mmproj": "this is a vision projector, not a language model", "adapter": "this is a LoRA adapter, not a model",
    "imatrix": "this is an importance matrix, not a model", "vocab": "this is a vocabulary, not a model",
}  # fmt: skip

_EXPANDED = {
    "deepseek2": "the file has no key_length_mla, so llama.cpp keeps K and V of every head instead of the latent",
    "minicpm3": "llama.cpp keeps K and V of every head of MiniCPM3 instead of the latent",
}

# For these models the converter leaves out the window, or older converters did, and llama.cpp then does not use one.
# For a Phi model without a window it writes 0.
_ALL_TOKENS = "kvcalc counts all tokens, because llama.cpp keeps them"
_UNSTATED = {
    "phi3": f"the file does not state a window, which Phi-3 models may have: {_ALL_TOKENS}",
    "phimoe": f"the file does not state a window, which Phi-3.5-MoE has: {_ALL_TOKENS}",
    "starcoder2": f"GGUF files of StarCoder2 do not state its window of 4,096 tokens: {_ALL_TOKENS}",
}


def load_gguf(path: str, *, assume_full_attention: bool = False) -> ModelSpec:
    """Return the model in a GGUF file. `path` is the file, any of its shards, or a folder with one model.

    Raises UsageError (exit 2) for a file that is missing, truncated or damaged, ModelError (exit 3) for a model that is
    not supported, and RunError (exit 1) if the extra `gguf` is not installed.
    """
    model = read_files(path)
    metadata, name, source = model.metadata, model.name, model.path
    kind, arch = metadata.get("general.type"), metadata.get("general.architecture")
    if kind not in (None, "model") or arch == "clip":
        what = _OTHER_FILES.get("mmproj" if arch == "clip" else str(kind), f"this is a file of type {ascii(kind)[:40]}")
        raise ModelError(f"{name}: {what}", "give the GGUF file of the language model")
    if not isinstance(arch, str):
        raise ModelError(f"{name}: general.architecture is missing or not a string")
    if assume_full_attention:
        return _upper_bound(model, arch)
    known = known_architectures()
    if arch not in known:
        hint = nearest(arch, known) or "for an upper bound, add --assume-full-attention"
        raise ModelError(f"{name}: architecture {arch[:60]!a} is not known", hint)
    facts = Facts(metadata, arch, name)
    config = {**sizes(facts, model), **_config(facts)}
    if any(tensor.name == "blk.0.attn_output.bias" for tensor in model.tensors):
        # There is no key for this bias.
        config["attention_bias"] = True
    spec = read_config(config, name, source)
    facts.refuse_unread()
    _check_shapes(spec, model)
    expands = arch in _EXPANDED and expands_latent(facts)
    remarks = (
        *spec.remarks,
        *([_EXPANDED[arch]] if expands else []),
        *([_UNSTATED[arch]] if arch in _UNSTATED and facts.get("attention.sliding_window") is None else []),
    )
    return spec._replace(gguf=GgufFacts(count_weights(model, facts), expands), remarks=remarks)


def _config(facts: Facts) -> Config:
    """Return the metadata under the keys of a config.json."""
    arch = facts.arch
    model_type, build = builder_of(arch)
    config = shared(facts, model_type, by_layer=arch in BY_LAYER)
    if build is not None:
        config = build(facts, config)
    if not facts.boolean("attention.causal", default=True) and arch not in ENCODERS:
        raise facts.error(f"{arch}.attention.causal is false: encoders of this architecture are not supported")
    return config


def shared(facts: Facts, model_type: str, *, by_layer: bool) -> Config:
    """Return the facts that all architectures state in the same way.

    `by_layer`: the architecture's own function reads the KV heads of each layer. The type of the cache is llama.cpp's
    default, f16, whatever the type of the weights.
    """
    hidden_size = facts.integer("embedding_length")
    config: Config = {
        "model_type": model_type, "num_hidden_layers": facts.num_layers, "hidden_size": hidden_size,
        "max_position_embeddings": facts.optional("context_length") or None, "torch_dtype": "float16",
        "rope_theta": facts.number("rope.freq_base", default=10_000.0),
    }  # fmt: skip
    heads = max(facts.by_layer("attention.head_count", 0)) if by_layer else facts.same_in_all("attention.head_count")
    if not heads:
        return config
    config["num_attention_heads"] = heads
    kv_heads = None if by_layer else facts.same_in_all("attention.head_count_kv", heads)
    config["num_key_value_heads"] = kv_heads
    # By default llama.cpp computes the width of a head. A file states the width only if it differs.
    derived = hidden_size // heads if hidden_size % heads == 0 else None
    width = facts.optional("attention.key_length", least=1) or derived
    value = facts.optional("attention.value_length") or derived
    if width != derived or model_type not in DERIVED_HEADS:
        config["head_dim"] = width
    if value != width:
        config["v_head_dim"] = value
    if model_type in OWN_HEADS and kv_heads == heads:
        del config["num_key_value_heads"]
    return config


# Sizes of MLPs and experts, each with the keys of the families' configs. A family reads those of its own.
_SIZES = {
    "feed_forward_length": "intermediate_size",
    "expert_count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "expert_used_count": "num_experts_per_tok moe_k moe_top_k top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts num_shared_experts moe_num_shared_experts",
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size share_expert_dim"
    ),
    "leading_dense_block_count": "first_k_dense_replace num_dense_layers moe_layer_start_index",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "moe_latent_size": "moe_latent_size",
    "expert_latent_length": "routed_expert_hidden_size",
    "attn_res.block_size": "attn_res_block_size",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}
_ROWS = {"token_embd.weight": "vocab_size", "per_layer_token_embd.weight": "vocab_size_per_layer_input"}


def sizes(facts: Facts, model: GgufModel) -> Config:
    """Return what the weights depend on besides attention: the sizes of MLPs, experts and embeddings.

    A size that differs between layers is a list, unless it is 0 in all layers but those of one size.
    """
    tensors = {tensor.name: tensor for tensor in model.tensors}
    config: Config = {
        "tie_word_embeddings": "output.weight" not in tensors, "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors
    }  # fmt: skip
    for name, key in _ROWS.items():
        if name in tensors and len(tensors[name].shape) == 2:
            config[key] = tensors[name].shape[1]
    for key, names in _SIZES.items():
        if facts.get(key) is not None:
            values = facts.by_layer(key)
            distinct = [*dict.fromkeys(value for value in values if value)] or [0]
            config |= dict.fromkeys(names.split(), values if len(distinct) > 1 else distinct[0])
    return config


def _check_shapes(spec: ModelSpec, model: GgufModel) -> None:
    """Compare the caches with the tensors that produce K, V and states. Raises ModelError (exit 3) if they disagree."""
    tensors = {tensor.name: tensor for tensor in model.tensors}
    for name, place, size, what in expected_rows(spec):
        tensor = tensors.get(name)
        if tensor is not None and (len(tensor.shape) <= place or tensor.shape[place] != size):
            raise ModelError(
                f"{spec.name}: the metadata give {what} {size:,}, but tensor {name} has the shape "
                f"{' x '.join(map(str, tensor.shape))}"
            )


def _upper_bound(model: GgufModel, arch: str) -> ModelSpec:
    """Return the model as `read_upper_bound` does. An unsupported architecture is read as a plain decoder."""
    from kvcalc.model.upper_bound import read_upper_bound

    facts = Facts(model.metadata, arch, model.name)
    why = ""
    try:
        if arch not in known_architectures():
            raise ModelError(f"architecture {arch[:60]!a} is not known")
        config = _config(facts)
        facts.refuse_unread()
    except ModelError as error:
        why = f" ({error.message.removeprefix(f'{model.name}: ')})"
        config = shared(facts, "generic", by_layer=True)
        if "num_attention_heads" not in config:
            raise facts.missing("attention.head_count") from None
        config["num_key_value_heads"] = max(facts.by_layer("attention.head_count_kv", config["num_attention_heads"]))
    spec = read_upper_bound(config, model.name, model.path)
    remarks = tuple(f"{remark}{why}" for remark in spec.remarks)
    return spec._replace(gguf=GgufFacts(count_weights(model, facts)), remarks=remarks)
