"""llama.cpp's file types: the format in which a file such as Q8_0, MXFP4_MOE or Q4_K_M stores each matrix.

Source: llama_tensor_get_type_impl and tensor_type_fallback in src/llama-quant.cpp, and the block structures of
ggml-common.h (a block of a mixed recipe has 256 elements), llama.cpp; for the recipes, the choice of types in dense
models. For other models, the header of a GGUF file gives more detail. Files made with an importance matrix may have
more bits in some layers; they are not modelled.
"""

from __future__ import annotations

from kvcalc.memory.quantization import formats
from kvcalc.memory.quantization.formats import Format
from kvcalc.memory.quantization.schemes import Scheme
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.tensors import EMBEDDING, HEAD, LINEAR, LOOKUP

_Q8_0 = Format("q8_0", 8, scale_bytes=2, group=32)
# Packed elements, and the bytes of scales and minima: 144, 176 and 210 bytes per block.
_Q4_K = Format("q4_k", 4, scale_bytes=16, group=256)
_Q5_K = Format("q5_k", 5, scale_bytes=16, group=256)
_Q6_K = Format("q6_k", 6, scale_bytes=18, group=256)
# Vectors, biases, routers and convolutions are not quantized. The converter writes them in fp32 (prepare_tensors,
# convert_hf_to_gguf.py).
_F32 = Format("fp32", 32)

# The type of most matrices. All have blocks of 32 elements, with an fp16 scale and, in the _1 types, an fp16 minimum.
_TYPES = {
    "q8_0": _Q8_0,
    "q5_1": Format("q5_1", 5, scale_bytes=4, group=32),
    "q5_0": Format("q5_0", 5, scale_bytes=2, group=32),
    "q4_1": Format("q4_1", 4, scale_bytes=4, group=32),
    "q4_0": Format("q4_0", 4, scale_bytes=2, group=32),
    "iq4_nl": Format("iq4_nl", 4, scale_bytes=2, group=32),
    "mxfp4": formats.MXFP4,
}

# The keys are those of kvcalc.memory.dtypes.FILE_TYPES. The values are the type of most matrices, and the type of the
# value projection and the MLP's down projection in the layers that get more bits.
_RECIPES = {
    "q4_k_s": (_Q4_K, _Q5_K),
    "q4_k_m": (_Q4_K, _Q6_K),
    "q5_k_s": (_Q5_K, _Q5_K),
    "q5_k_m": (_Q5_K, _Q6_K),
    "q6_k": (_Q6_K, _Q6_K),
}

# llama.cpp keeps K and V of models with eight experts in 8 bits, because that adds little to their size.
_FEW_EXPERTS = 8


def file_type_scheme(file_type: str, spec: ModelSpec) -> Scheme:
    """The scheme of a file type in `kvcalc.memory.dtypes.GGUF_TYPES` for a model."""
    name = file_type.removeprefix("gguf-")
    common = _TYPES[name]
    if name == "mxfp4":
        return Scheme(name, _of_mxfp4, by_layer=False, embedding=(_Q8_0, _Q8_0), bias_bytes=4)
    head = _head(common, spec)
    few_experts, layers = count_experts(spec) == _FEW_EXPERTS, spec.num_layers
    shares_values = name == "iq4_nl" and spec.attention.num_heads >= 4 * max(spec.attention.num_kv_heads, 1)

    def format_of(module: str, role: str) -> Format:
        if role in (HEAD, EMBEDDING, LOOKUP):
            return head if role == HEAD else common
        if role != LINEAR:
            return _F32
        is_value = module.endswith((".v_proj", ".value"))
        if few_experts and (is_value or module.endswith(".k_proj")):
            return _Q8_0
        is_down = module.endswith((".down_proj", ".w2", ".dense_4h_to_h", ".fc2"))
        if (is_value and shares_values) or (is_down and name == "iq4_nl" and _layer_of(module) < layers // 8):
            return _Q5_K
        return common

    return Scheme(name, format_of, by_layer=name == "iq4_nl", embedding=(common, head), bias_bytes=4)


def k_quant_scheme(file_type: str, num_layers: int) -> Scheme:
    """The scheme of a file type in `kvcalc.memory.dtypes.FILE_TYPES` for a model with `num_layers` layers.

    The output head has 6 bits in every recipe. The input embedding has the recipe's own type unless it is also the
    output head.
    """
    common, more = _RECIPES[file_type]

    def format_of(name: str, role: str) -> Format | None:
        if role == HEAD:
            return _Q6_K
        if role in (EMBEDDING, LOOKUP):
            return common
        if role != LINEAR:
            return None
        is_value = name.endswith((".v_proj", ".value"))
        is_down = name.endswith((".down_proj", ".w2", ".dense_4h_to_h", ".fc2"))
        if (is_value or is_down) and _gets_more(file_type, name, num_layers):
            return more
        # llama.cpp recognises 70B models by their 80 layers. Eight heads share one value there, so it gets 5 bits.
        return _Q5_K if is_value and num_layers == 80 and common is _Q4_K else common

    return Scheme(file_type, format_of, by_layer=common != more, embedding=(common, _Q6_K))


def _gets_more(file_type: str, name: str, num_layers: int) -> bool:
    """Whether a layer gets more bits.

    These are the first and last eighth of the layers and every third layer between them, or only the first eighth in
    the `_S` types.
    """
    layer, eighth = _layer_of(name), num_layers // 8
    if file_type.endswith("_s"):
        return layer < eighth
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


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


def _is_expert(module: str) -> bool:
    return "experts.0." in module and "shared_experts" not in module


def _layer_of(module: str) -> int:
    return next((int(part) for part in module.split(".") if part.isdigit()), 0)
