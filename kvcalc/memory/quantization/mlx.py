"""MLX's types for weights: which matrices a conversion quantizes, in which format.

Sources: quantize_model of mlx_lm/utils.py and `quant_predicate` of the classes in mlx_lm/models, commit d78bf58e217c
(mlx-lm 0.32.0); nn.quantize and mx.quantize of MLX at commit 846d176227a0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcalc.memory.dtypes import MLX_BITS, MLX_GROUPS, MLX_TYPES, mlx_name
from kvcalc.memory.quantization.formats import Format
from kvcalc.memory.quantization.names import aliases
from kvcalc.memory.quantization.schemes import Scheme, UnknownSchemeError
from kvcalc.model.tensors import EMBEDDING, HEAD, LINEAR, LOOKUP, ROUTER

# Types whose router is quantized to 8 bits in groups of 64, whatever the type of the other matrices.
_ROUTERS_OF_8_BITS = (
    "afmoe bailing_moe gemma4_text gemma4_unified_text gpt_oss granitemoe granitemoehybrid kimi_linear lfm2_moe "
    "longcat_flash mellum minimax_m2 qwen3_5_moe_text qwen3_moe qwen3_next qwen3_vl_moe_text step3p5"
).split()
# Types whose router is not a linear layer (MoEGate) and keeps its 16 or 32 bits.
_PLAIN_ROUTERS = (
    "deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 exaone_moe glm4_moe glm4_moe_lite glm_moe_dsa kimi_k2 laguna "
    "mimo_v2_flash nemotron_h solar_open"
).split()

# mx.quantize packs the elements of a row into words of 32 bits. A group has a scale and, in the affine mode, a bias,
# both in the type of the weights. The other modes have one scale of 8 bits. Conversions leave a matrix as it is if the
# group does not divide its columns.
_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def mlx_scheme(name: str, model_type: str, base_bytes: int) -> Scheme:
    """The scheme of a type in MLX_TYPES (`mlx-4bit`) for a model converted by mlx_lm.convert.

    Linear layers, embeddings, the output head and most routers are quantized. `base_bytes` is the size of an element
    that is not quantized, and of a scale.
    """
    dtype = MLX_TYPES[name]
    mode = name.removeprefix("mlx-")
    form = _format(name, dtype.bits, dtype.block_elements, base_bytes, mode if mode in _MODES else "affine")
    return _scheme(name, lambda _: form, form, model_type, base_bytes)


def read_mlx(config: Mapping[str, object], model_type: str, base_bytes: int) -> Scheme:
    """The scheme of the `quantization` that mlx_lm.convert writes to config.json.

    It has the bits, the group size and the mode of all modules, and a value for each module that differs: false, or
    its own bits. Raises UnknownSchemeError for values that MLX does not have.
    """
    form = _stated(config, base_bytes)
    exceptions = {_folded(path): value for path, value in config.items() if isinstance(value, (bool, Mapping))}
    forms = {
        path: _stated({**_defaults(value), **value}, base_bytes)
        if isinstance(value, Mapping)
        else form
        if value
        else None
        for path, value in exceptions.items()
    }
    if not forms:
        return _scheme(form.name, lambda _: form, form, model_type, base_bytes)

    def format_of(name: str) -> Format | None:
        path = next((path for path in map(_folded, aliases(name)) if path in forms), None)
        return form if path is None else forms[path]

    return _scheme("mlx-mixed", format_of, form, model_type, base_bytes, states=forms.__contains__)._replace(
        by_layer=True
    )


def _scheme(
    name: str,
    matrix: Callable[[str], Format | None],
    form: Format,
    model_type: str,
    base_bytes: int,
    states: Callable[[str], bool] = lambda _: False,
) -> Scheme:
    """A scheme in which `matrix` gives the format of a module. `states`: whether the config names the module."""
    of_8_bits = _format("mlx-8bit", 8, 64, base_bytes, "affine")

    def format_of(module: str, role: str) -> Format | None:
        # The indexer's weights_proj is a linear layer in MLX, but published checkpoints keep it in 16 bits.
        if role in (LINEAR, HEAD, EMBEDDING, LOOKUP) or module.endswith("indexer.weights_proj"):
            return matrix(module)
        if role != ROUTER or model_type in _PLAIN_ROUTERS:
            return None
        if model_type in _ROUTERS_OF_8_BITS and not any(states(_folded(alias)) for alias in aliases(module)):
            return of_8_bits
        return matrix(module)

    table = matrix("model.embed_tokens") or form._replace(bits=8 * base_bytes, scale_bytes=0, group=0)
    return Scheme(name, format_of, by_layer=False, embedding=(table, table))


def _format(name: str, bits: int, group: int, base_bytes: int, mode: str) -> Format:
    scale_bytes = 2 * base_bytes if mode == "affine" else 1
    return Format(name, bits, word_bits=32, scale_bytes=scale_bytes, group=group, plain_bytes=base_bytes)


def _defaults(value: Mapping[str, object]) -> dict[str, object]:
    """The bits and the group size of a mode, for modules that do not state them (_defaults_for_mode)."""
    bits, group = _MODES.get(str(value.get("mode", "affine")), (4, 64))
    return {"bits": bits, "group_size": group}


def _stated(config: Mapping[str, object], base_bytes: int) -> Format:
    bits, group, mode = config.get("bits"), config.get("group_size"), config.get("mode", "affine")
    if isinstance(mode, str) and mode in _MODES and (bits, group) == _MODES[mode]:
        return _format(f"mlx-{mode}", *_MODES[mode], base_bytes, mode)
    if mode != "affine" or type(bits) is not int or type(group) is not int:
        raise UnknownSchemeError(f"MLX mode {ascii(mode)[:40]} with bits {ascii(bits)[:20]}")
    if bits not in MLX_BITS or group not in MLX_GROUPS:
        raise UnknownSchemeError(f"MLX with {bits} bits in groups of {group}")
    return _format(mlx_name(bits, group), bits, group, base_bytes, "affine")


def _folded(path: str) -> str:
    """A module's name without the word that mlx-lm gives its experts (switch_mlp), and without an expert's number."""
    return path.replace(".switch_mlp.", ".experts.").replace(".experts.0.", ".experts.")
