"""llama.cpp's file types: the format in which a file such as Q8_0, MXFP4_MOE or Q4_K_M stores each matrix.

Source: llama_tensor_get_type_impl and tensor_type_fallback in src/llama-quant.cpp, and the block structures of
ggml-common.h (a block of a mixed recipe has 256 elements), llama.cpp. Files of the types IQ1 to IQ4_NL count as made
with an importance matrix, as published ones are; for other types it may add bits in some layers, which is not modelled.
The header of a GGUF file gives more detail.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.memory.quantization import formats
from kvcalc.memory.quantization.formats import Format
from kvcalc.memory.quantization.schemes import Scheme
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.tensors import EMBEDDING, HEAD, LINEAR, LOOKUP
from kvcalc.records import NamedTuple

_Q8_0 = Format("q8_0", 8, scale_bytes=2, group=32)
_Q5_1 = Format("q5_1", 5, scale_bytes=4, group=32)
_Q5_0 = Format("q5_0", 5, scale_bytes=2, group=32)
_Q4_0 = Format("q4_0", 4, scale_bytes=2, group=32)
_IQ4_NL = Format("iq4_nl", 4, scale_bytes=2, group=32)


def _blocks(name: str, bits: int, size: int, otherwise: Format) -> Format:
    """A type with blocks of 256 elements in `size` bytes. Rows that they do not divide have the type `otherwise`."""
    return Format(name, bits, scale_bytes=size - 32 * bits, group=256, otherwise=otherwise)


_Q2_K = _blocks("q2_k", 2, 84, _Q4_0)
_Q3_K = _blocks("q3_k", 3, 110, _Q4_0)
_Q4_K = _blocks("q4_k", 4, 144, _Q5_0)
_Q5_K = _blocks("q5_k", 5, 176, _Q5_1)
_Q6_K = _blocks("q6_k", 6, 210, _Q8_0)
_IQ1_S = _blocks("iq1_s", 1, 50, _IQ4_NL)
_IQ1_M = _blocks("iq1_m", 1, 56, _IQ4_NL)
_IQ2_XXS = _blocks("iq2_xxs", 2, 66, _IQ4_NL)
_IQ2_XS = _blocks("iq2_xs", 2, 74, _IQ4_NL)
_IQ2_S = _blocks("iq2_s", 2, 82, _IQ4_NL)
_IQ3_XXS = _blocks("iq3_xxs", 3, 98, _IQ4_NL)
_IQ3_S = _blocks("iq3_s", 3, 110, _IQ4_NL)
_IQ4_XS = _blocks("iq4_xs", 4, 136, _IQ4_NL)
# Vectors, biases, routers and convolutions are not quantized. The converter writes them in fp32 (prepare_tensors,
# convert_hf_to_gguf.py).
_F32 = Format("fp32", 32)

# The type of most matrices. All have blocks of 32 elements, with an fp16 scale and, in the _1 types, an fp16 minimum.
_TYPES = {
    "q8_0": _Q8_0,
    "q5_1": _Q5_1,
    "q5_0": _Q5_0,
    "q4_1": Format("q4_1", 4, scale_bytes=4, group=32),
    "q4_0": _Q4_0,
    "iq4_nl": _IQ4_NL,
    "mxfp4": formats.MXFP4,
}

# The type of most matrices (llama_ftype_get_default_type), for the types in kvcalc.memory.dtypes.FILE_TYPES.
_COMMON = {
    "iq1_s": _IQ1_S, "iq1_m": _IQ1_M, "iq2_xxs": _IQ2_XXS, "iq2_xs": _IQ2_XS, "iq2_s": _IQ2_XS, "iq2_m": _IQ2_S,
    "q2_k_s": _Q2_K, "q2_k": _Q2_K, "iq3_xxs": _IQ3_XXS, "iq3_xs": _IQ3_S, "iq3_s": _IQ3_S, "iq3_m": _IQ3_S,
    "q3_k_s": _Q3_K, "q3_k_m": _Q3_K, "q3_k_l": _Q3_K, "iq4_xs": _IQ4_XS, "q4_k_s": _Q4_K, "q4_k_m": _Q4_K,
    "q5_k_s": _Q5_K, "q5_k_m": _Q5_K, "q6_k": _Q6_K, "tq1_0": _blocks("tq1_0", 1, 54, _Q4_0),
    "tq2_0": _blocks("tq2_0", 2, 66, _Q4_0),
}  # fmt: skip
_LOW = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m")
# The head, and the input embedding that is not the head, of the types in which they have other types than the rest.
_HEADS = {**dict.fromkeys((*_LOW, "iq3_xxs"), _Q5_K)}
_EMBEDDINGS = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs"), _Q2_K),
    **dict.fromkeys(("iq2_s", "iq2_m", "iq3_xxs"), _IQ3_S), **dict.fromkeys(("tq1_0", "tq2_0"), _Q4_K),
}  # fmt: skip
# A delta net's queries, keys and values are one matrix, attn_qkv, which has the type of values (category_is_attn_v).
# Qwen3-Next's also has the gate, which the converter takes out of it (attn_gate).
_VALUES = (".v_proj", ".value", ".linear_attn.in_proj_qkv", ".linear_attn.in_proj_qkvz")
# The parts of a layer, by the ends of the names of their matrices.
_PARTS = {
    "value": _VALUES, "key": (".k_proj", ".key"), "query": (".q_proj", ".query"),
    "output": (
        ".o_proj", ".attn.out_proj", ".self_attn.out_proj", ".attention.out_proj", "attention.dense", "attn.c_proj",
        "self_attention.dense", ".self_attn.dense", ".attention.wo",
    ),
    "fused": (".qkv_proj", ".query_key_value", ".c_attn", ".Wqkv", ".W_pack", ".wqkv"),
    "down": (".down_proj", ".w2", ".dense_4h_to_h", ".fc2", ".mlp.c_proj", ".output_linear"),
}  # fmt: skip

# llama.cpp keeps K and V of models with eight experts in 8 bits, because that adds little to their size.
_FEW_EXPERTS = 8


def file_type_scheme(file_type: str, spec: ModelSpec) -> Scheme:
    """The scheme of a file type in `kvcalc.memory.dtypes.GGUF_TYPES` for a model."""
    name = file_type.removeprefix("gguf-")
    common = _TYPES[name]
    if name == "mxfp4":
        return Scheme(name, _of_mxfp4, by_layer=False, embedding=(_Q8_0, _Q8_0), bias_bytes=4)
    head, keeps_experts = _head(common, spec), _keeps_experts(spec)
    few_experts = count_experts(spec) == _FEW_EXPERTS
    shares_values = name == "iq4_nl" and spec.attention.num_heads >= 4 * max(spec.attention.num_kv_heads, 1)

    def format_of(module: str, role: str) -> Format:
        if role in (HEAD, EMBEDDING, LOOKUP):
            return head if role == HEAD else common
        if role != LINEAR:
            return _F32
        if keeps_experts and _is_expert(module):
            return formats.MXFP4
        is_value = module.endswith(_VALUES)
        if few_experts and (is_value or module.endswith(".k_proj")):
            return _Q8_0
        return _Q5_K if is_value and shares_values else common

    return Scheme(name, format_of, by_layer=False, embedding=(common, head), bias_bytes=4)


def k_quant_scheme(file_type: str, spec: ModelSpec) -> Scheme:
    """The scheme of a file type in `kvcalc.memory.dtypes.FILE_TYPES` for a model."""
    common = _COMMON[file_type]
    head = _HEADS.get(file_type, _Q6_K)
    if spec.model_type == "falcon" or (spec.attention.hidden_size or 0) % 256:
        head = _Q8_0
    facts = _Facts(
        file_type, spec.num_layers, count_experts(spec),
        spec.attention.num_heads // max(spec.attention.num_kv_heads, 1), spec.model_type == "falcon",
    )  # fmt: skip

    keeps_experts = _keeps_experts(spec)

    def format_of(name: str, role: str) -> Format:
        if role == HEAD:
            return head
        if role in (EMBEDDING, LOOKUP):
            return _EMBEDDINGS.get(file_type, common)
        if role != LINEAR:
            return _F32
        if keeps_experts and _is_expert(name):
            return formats.MXFP4
        part = next((part for part, ends in _PARTS.items() if name.endswith(ends)), "up")
        return _type_of(facts, part, _layer_of(name)) or common

    embedding = _EMBEDDINGS.get(file_type, common), head
    return Scheme(file_type, format_of, by_layer=file_type != "q6_k", embedding=embedding, bias_bytes=4)


class _Facts(NamedTuple):
    """What the type of a matrix depends on: the file's type, the model's layers, experts and heads per KV head."""

    file_type: str
    layers: int
    experts: int
    heads_per_kv: int
    is_falcon: bool


def _type_of(facts: _Facts, part: str, layer: int) -> Format | None:
    """The type of one matrix of a layer, None for the type of most matrices."""
    kind, few_experts = facts.file_type, facts.experts == _FEW_EXPERTS
    if kind in ("tq1_0", "tq2_0"):
        return None
    if few_experts and part in ("value", "key"):
        return _Q4_K if kind in _LOW else _Q8_0
    if part == "value":
        value_type = _value_type(facts, layer)
        # llama.cpp recognises 70B models by their 80 layers. Eight heads share one value there, so it gets 5 bits.
        return _Q5_K if facts.layers == 80 and (value_type or _COMMON[kind]) in (_Q3_K, _Q4_K) else value_type
    if part == "down":
        return _down_type(facts, layer)
    if part == "output":
        if few_experts:
            if kind in ("q5_k_s", "q5_k_m", "q6_k", "q3_k_l", "q2_k_s"):
                return None
            return _Q5_K
        if facts.is_falcon:
            return _Q4_K if kind == "q3_k_l" else None
        return {
            "q2_k": _Q3_K, "iq3_xxs": _IQ3_S, "q3_k_m": _Q4_K, "q3_k_l": _Q5_K, "iq3_m": _Q4_K,
            "iq1_s": _IQ2_XXS, "iq1_m": _IQ2_XXS, "iq2_s": _IQ3_S, "iq2_m": _IQ3_S,
        }.get(kind)  # fmt: skip
    if part == "fused":
        return {"q3_k_m": _Q4_K, "q3_k_l": _Q4_K, "iq3_m": _Q4_K, "q4_k_m": _Q5_K, "q5_k_m": _Q6_K}.get(kind)
    if part in ("query", "key"):
        return {"iq3_xs": _IQ3_XXS, "iq3_xxs": _IQ2_S}.get(kind)
    is_middle = facts.layers // 8 <= layer < 7 * facts.layers // 8
    return _IQ3_XXS if kind == "iq3_xs" and is_middle else None


def _value_type(facts: _Facts, layer: int) -> Format | None:
    kind, shares = facts.file_type, facts.heads_per_kv >= 4
    if kind in _LOW:
        if shares or facts.experts >= 4:
            return _Q4_K
        return _IQ3_S if kind in ("iq2_s", "iq2_m") else _Q2_K
    if kind in ("q2_k", "q2_k_s", "iq3_xxs", "iq3_xs", "iq3_s"):
        return _Q4_K if shares else _Q3_K if kind == "q2_k" else None
    if kind == "q3_k_m":
        return _Q5_K if layer < 2 else _Q4_K
    if kind == "iq4_xs":
        return _Q5_K if shares else None
    if kind in ("q4_k_m", "q5_k_m") and _more_bits(layer, facts.layers):
        return _Q6_K
    if kind == "q4_k_s" and layer < 4:
        return _Q5_K
    return {"iq3_m": _Q4_K, "q3_k_l": _Q5_K}.get(kind)


def _down_type(facts: _Facts, layer: int) -> Format | None:
    kind, layers, is_falcon = facts.file_type, facts.layers, facts.is_falcon
    is_early, more = layer < layers // 8, _more_bits(layer, layers)
    if kind in _LOW:
        return None if not is_early else _IQ3_S if kind in ("iq2_s", "iq2_m") else _Q2_K
    if kind == "q2_k":
        return _Q3_K
    if kind == "q3_k_m":
        return _Q5_K if layer < layers // 16 else _Q4_K if more or not is_falcon else _Q3_K
    if kind == "q3_k_l":
        return _Q4_K if is_falcon else _Q5_K
    if kind == "iq3_m":
        return _Q4_K if is_early or (facts.experts == _FEW_EXPERTS and more) else None
    if kind == "q4_k_m" and is_falcon:
        return _Q6_K if layer < layers // 16 else _Q5_K if more else None
    if kind in ("q4_k_m", "q5_k_m"):
        return _Q6_K if more else None
    if is_early and (kind == "q2_k_s" or (kind == "q4_k_s" and not is_falcon)):
        return _Q4_K if kind == "q2_k_s" else _Q5_K
    return None


def _more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers and every third layer between them (use_more_bits)."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def count_experts(spec: ModelSpec) -> int:
    """The number of experts in a layer. 0 if there are none, or if the weights are not known."""
    weights = weights_of(spec)
    if weights is None:
        return 0
    return max(
        (weight.copies for block in weights.blocks for weight in block.weights if _is_expert(weight.name)), default=0
    )


def _head(common: Format, spec: ModelSpec) -> Format:
    """The output head's format, and that of an embedding that is also the head.

    It has 6 bits. Falcon's has 8, and so has one whose rows the blocks of Q6_K (256 elements) do not divide.
    """
    fits = (spec.attention.hidden_size or 0) % 256 == 0 and spec.model_type != "falcon"
    return _Q6_K if common != _Q8_0 and fits else _Q8_0


def _of_mxfp4(module: str, role: str) -> Format:
    """MXFP4_MOE: mxfp4 for the experts, and Q8_0 for everything else.

    MLA's up-projection of the latent has a matrix per head, which llama.cpp treats like experts.
    """
    if role in (HEAD, EMBEDDING, LOOKUP):
        return _Q8_0
    if role != LINEAR:
        return _F32
    return formats.MXFP4 if _is_expert(module) or module.endswith(".kv_b_proj") else _Q8_0


def _keeps_experts(spec: ModelSpec) -> bool:
    """Whether files of every type have the experts in the checkpoint's own mxfp4 (gpt-oss).

    The converter copies their blocks (repack_mxfp4, convert_hf_to_gguf.py), and published files of other types keep
    them: unsloth/gpt-oss-20b-GGUF has 11.62 GB as Q4_K_M, where experts of that type would take 15.8 GB.
    """
    return isinstance(spec.quantization, Mapping) and spec.quantization.get("quant_method") == "mxfp4"


def _is_expert(module: str) -> bool:
    return "experts.0." in module and "shared_experts" not in module


def _layer_of(module: str) -> int:
    return next((int(part) for part in module.split(".") if part.isdigit()), 0)
