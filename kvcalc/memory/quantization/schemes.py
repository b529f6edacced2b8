"""Turn a quantization_config into a scheme: a format for every weight, or None if the weight is not quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcalc.memory.quantization import formats
from kvcalc.memory.quantization.formats import Format
from kvcalc.memory.quantization.names import Match, compressed_match, glob_match, nearest_entry, transformers_match
from kvcalc.model.tensors import HEAD, LINEAR, OTHER
from kvcalc.records import NamedTuple

# Digits, and the parts of a regular expression that can match a single digit: a class, a count, an escape.
_DIGITS = frozenset("0123456789[]{}?\\")


class UnknownSchemeError(Exception):
    """A scheme that is not modelled. The message names the scheme but not the model."""


class Scheme(NamedTuple):
    """`format_of(name, role)` is the format of a module's matrix, or None if it is not quantised.

    `by_layer` is whether the format may differ between layers; if not, one layer represents all. `embedding` has the
    input embedding's format, and its format if it is also the output head; None if it is not quantised. `bias_bytes` is
    the size of an element of a bias, None if that of an unquantised weight.
    """

    name: str
    format_of: Callable[[str, str], Format | None]
    by_layer: bool = True
    embedding: tuple[Format, Format] | None = None
    bias_bytes: int | None = None


def is_mlx(config: Mapping[str, object]) -> bool:
    """Whether mlx_lm.convert wrote this quantization_config: a group size and bits, and no method."""
    return "quant_method" not in config and "group_size" in config and "bits" in config


def read_scheme(config: Mapping[str, object], base_bytes: int) -> Scheme:
    """The scheme of a quantization_config.

    `base_bytes` is the size of an unquantised element, and of a scale in that dtype.
    Raises UnknownSchemeError for a method or setting that is not modelled.
    """
    method = config.get("quant_method")
    if method is None and "quant_algo" in config:
        method = "modelopt"
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise UnknownSchemeError(f"quant_method {_shown(method)}")
    if reader is not _modelopt and config.get("quant_algo") is not None and "moe_quant_algo" not in config:
        raise UnknownSchemeError(f"quant_method {method} with quant_algo {_shown(config['quant_algo'])}")
    try:
        return reader(config, base_bytes)._replace(by_layer=_tells_layers_apart(config))
    except ValueError as error:
        raise UnknownSchemeError(f"the module pattern {_shown(str(error))} in quantization_config") from None


_EXPERTS = {"fp4": formats.MXFP4, "NVFP4": formats.NVFP4}


def with_expert_dtype(scheme: Scheme, expert_dtype: object) -> Scheme:
    """The scheme of a DeepSeek-V4 checkpoint, whose config names the type of the experts separately.

    With fp4, experts are mxfp4, and all scales have one byte (ue8m0). With NVFP4 (moe_quant_algo of NVIDIA's copies),
    the experts are nvfp4 instead. With fp8, the experts are like the other linear layers, whose scales are fp32. The
    weights of the hyper-connections and the positions of the compressors are fp32. Raises UnknownSchemeError for
    another type. Source: DeepseekV4FP8Config, DeepseekV4DecoderLayer and
    DeepseekCompressor, vLLM 0.33.0.
    """
    if expert_dtype in (None, "fp8"):
        return scheme
    experts = _EXPERTS.get(expert_dtype) if isinstance(expert_dtype, str) else None
    if experts is None:
        raise UnknownSchemeError(f"expert_dtype {_shown(expert_dtype)}")

    def format_of(name: str, role: str) -> Format | None:
        if role == LINEAR and ".experts." in name:
            return experts
        if role == OTHER and any(part in name for part in ("_hc.", "hc_head.", "position_bias")):
            return formats.FP32
        form = scheme.format_of(name, role)
        return None if form is None else form._replace(scale_bytes=1)

    return scheme._replace(name="mixed", format_of=format_of)


def _fp8(config: Mapping[str, object], base_bytes: int) -> Scheme:
    """Fine-grained fp8. Source: FP8Linear, Transformers 5.23.0."""
    block = config.get("weight_block_size")
    form = formats.FP8_MODELOPT if config.get("activation_scheme") == "static" else formats.FP8_TENSOR
    if block is not None:
        form = formats.fp8_block(*_block(block, "weight_block_size"))
    return Scheme("fp8", _linear_but(_strings(config, "modules_to_not_convert", "ignored_layers"), form))


def _fbgemm_fp8(config: Mapping[str, object], base_bytes: int) -> Scheme:
    """fp8 with one fp32 scale per row. Source: FbgemmFp8Linear, Transformers 5.23.0."""
    return Scheme("fp8", _linear_but(_strings(config, "modules_to_not_convert"), formats.FP8_CHANNEL))


def _mxfp4(config: Mapping[str, object], base_bytes: int) -> Scheme:
    """mxfp4 for experts only. Source: Mxfp4GptOssExperts, Transformers 5.23.0."""
    linear = _linear_but(_strings(config, "modules_to_not_convert"), formats.MXFP4)
    return Scheme("mxfp4", lambda name, role: linear(name, role) if ".experts." in name else None)


def _gptq(config: Mapping[str, object], base_bytes: int) -> Scheme:
    """GPTQ's own layout: 32-bit words, an fp16 scale and a zero point per group, and a group number per column."""
    for key in ("dynamic", "modules_in_block_to_quantize"):
        if config.get(key):
            raise UnknownSchemeError(f"gptq with {key}")
    form = _words(config, "bits", "group_size")._replace(zero_points=True, index_bytes=4)
    return Scheme(form.name, _linear_but([], form, with_head=config.get("lm_head") is True))


def _awq(config: Mapping[str, object], base_bytes: int) -> Scheme:
    """Like GPTQ, but without the group numbers. Source: WQLinear_GEMM, AutoAWQ 0.2."""
    form = _words(config, "bits" if "bits" in config else "w_bit", "group_size")._replace(zero_points=True)
    return Scheme(form.name, _linear_but(_strings(config, "modules_to_not_convert"), form))


def _bitsandbytes(config: Mapping[str, object], base_bytes: int) -> Scheme:
    """Linear layers in 4 bits with a scale per 64 elements, or in int8 with one per row.

    With double quantization, a scale has one byte, and 256 of them share an fp32 scale. A 4-bit matrix also has the 16
    values of its type in fp32 and, with double quantization, the 256 of its scales and an offset. Without a list, the
    output head is not quantized. Source: QuantState, quantize_4bit and Int8Params, bitsandbytes 0.50.2;
    replace_with_bnb_linear, Transformers 5.23.0. fp4 and nf4 have the same bytes.
    """
    skipped = _strings(config, "llm_int8_skip_modules")
    if config.get("load_in_4bit") is True:
        twice = config.get("bnb_4bit_use_double_quant") is True
        form = formats.BNB_4BIT_TWICE if twice else formats.BNB_4BIT
    elif config.get("load_in_8bit") is True and not config.get("llm_int8_has_fp16_weight"):
        form = formats.INT8_ROW
    else:
        raise UnknownSchemeError("bitsandbytes without load_in_4bit or load_in_8bit")
    return Scheme(form.name, _linear_but(skipped, form, with_head=bool(skipped)))


def _words(config: Mapping[str, object], bits_key: str, group_key: str) -> Format:
    bits, group = config.get(bits_key), config.get(group_key)
    if type(bits) is not int or bits not in (2, 3, 4, 8):
        raise UnknownSchemeError(f"{bits_key} {_shown(bits)}")
    if type(group) is not int or (group < 1 and group != -1):
        raise UnknownSchemeError(f"{group_key} {_shown(group)}")
    return Format(f"int{bits}", bits, word_bits=32, scale_bytes=2, group=max(group, 0))


def _compressed_tensors(config: Mapping[str, object], base_bytes: int) -> Scheme:
    """Groups of targets, each with its own element type and scales. Source: compressed-tensors 0.20."""
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise UnknownSchemeError(f"sparsity format {_shown(sparsity.get('format'))}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnknownSchemeError("compressed-tensors without config_groups")
    rules: list[tuple[Match, Format]] = []
    for group in groups.values():
        if not isinstance(group, Mapping):
            raise UnknownSchemeError("compressed-tensors with a group that is not an object")
        weights = group.get("weights")
        if weights is None:
            continue
        if not isinstance(weights, Mapping):
            raise UnknownSchemeError("compressed-tensors with weights that are not an object")
        inputs = group.get("input_activations")
        layout = str(group.get("format") or config.get("format"))
        form = _compressed_format(weights, layout, inputs if isinstance(inputs, Mapping) else None, base_bytes)
        rules.append((compressed_match(_strings(group, "targets"), ("Linear",)), form))
    ignored = compressed_match(_strings(config, "ignore"), ("Linear",))

    def format_of(name: str, role: str) -> Format | None:
        if role not in (LINEAR, HEAD) or ignored(name):
            return None
        return next((form for match, form in rules if match(name)), None)

    names = {form.name for _, form in rules}
    return Scheme(names.pop() if len(names) == 1 else "mixed", format_of)


def _compressed_format(
    weights: Mapping[str, object], layout: str, inputs: Mapping[str, object] | None, base_bytes: int
) -> Format:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    group = weights.get("group_size")
    group = group if type(group) is int and group > 0 else 0
    if strategy is None:
        strategy = "group" if group else "tensor"
    if kind == "float" and bits == 4 and group in (16, 32):
        nvfp4 = formats.NVFP4_WEIGHT_ONLY if inputs is None else formats.NVFP4
        return formats.MXFP4 if group == 32 else nvfp4
    known = (kind == "float" and bits == 8) or (kind == "int" and bits in (2, 3, 4, 8))
    if not known or strategy not in ("tensor", "channel", "group", "block") or (strategy == "group" and not group):
        raise UnknownSchemeError(f"compressed-tensors {_shown(kind)} with {_shown(bits)} bits per {_shown(strategy)}")
    static = inputs is not None and inputs.get("dynamic") is False
    form = Format(
        "fp8" if kind == "float" else f"int{bits}", int(str(bits)),
        scale_bytes=1 if weights.get("scale_dtype") == "torch.uint8" else base_bytes,
        group=group if strategy == "group" else 0, per_tensor=strategy == "tensor",
        zero_points=weights.get("symmetric") is False, constant_bytes=base_bytes if static else 0,
    )  # fmt: skip
    if strategy == "block":
        form = form._replace(block=_block(weights.get("block_structure"), "block_structure"))
    if layout == "pack-quantized":
        # weight_shape is two 64-bit integers. With activation order by group, each column also has a group number.
        index = 4 if weights.get("actorder") == "group" else 0
        form = form._replace(word_bits=32, index_bytes=index, constant_bytes=form.constant_bytes + 16)
    elif kind == "int" and bits != 8:
        raise UnknownSchemeError(f"compressed-tensors format {_shown(layout)} with {bits} bits")
    return form


# Source: the exporter of TensorRT Model Optimizer (modelopt 0.37), quant_utils.
_ALGORITHMS = {
    "FP8": formats.FP8_MODELOPT, "NVFP4": formats.NVFP4, "W4A16_NVFP4": formats.NVFP4_WEIGHT_ONLY,
    "MXFP8": formats.MXFP8, "FP8_PB_WO": formats.fp8_block(128, 128),
}  # fmt: skip


def _modelopt(config: Mapping[str, object], base_bytes: int) -> Scheme:
    algorithm = config.get("quant_algo")
    excluded = glob_match(_strings(config, "ignore", "exclude_modules"))
    if algorithm == "MIXED_PRECISION":
        table = config.get("quantized_layers")
        if not isinstance(table, dict) or not table:
            raise UnknownSchemeError("MIXED_PRECISION without quantized_layers")
        forms: dict[str, Format | None] = {}
        for module, entry in table.items():
            form = _algorithm(entry.get("quant_algo") if isinstance(entry, Mapping) else entry)
            forms[module] = form if isinstance(entry, Mapping) else None
        patterns = [(glob_match([module]), form) for module, form in forms.items() if "*" in module]

        def format_of(name: str, role: str) -> Format | None:
            if role not in (LINEAR, HEAD) or excluded(name):
                return None
            return nearest_entry(name, forms) or next((form for matches, form in patterns if matches(name)), None)

        return Scheme("mixed", format_of)
    form = _algorithm(algorithm)
    return Scheme(form.name, lambda name, role: form if role == LINEAR and not excluded(name) else None)


def _quark(config: Mapping[str, object], base_bytes: int) -> Scheme:
    """AMD's Quark: one specification for all matrices but those of some modules, and a list of modules left out.

    Source: QuarkConfig, model_executor/layers/quantization/quark/quark.py, and should_ignore_layer, utils.py, of vLLM
    0.33.0.
    """
    excluded = _strings(config, "exclude")
    is_named = compressed_match([name for name in excluded if "*" not in name or name.startswith("re:")], ())
    is_like = glob_match([name for name in excluded if "*" in name and not name.startswith("re:")])
    listed, kinds = config.get("layer_quant_config") or {}, config.get("layer_type_quant_config") or {}
    if not isinstance(listed, Mapping) or kinds:
        raise UnknownSchemeError("quark with layer_type_quant_config")
    rest = _quark_format(config.get("global_quant_config"))
    forms = [(glob_match([pattern]), _quark_format(entry)) for pattern, entry in listed.items()]

    def format_of(name: str, role: str) -> Format | None:
        if role != LINEAR or is_named(name) or is_like(name):
            return None
        return next((form for matches, form in forms if matches(name)), rest)

    used = {form.name for form in (rest, *(form for _, form in forms)) if form is not None}
    return Scheme(used.pop() if len(used) == 1 else "mixed", format_of)


def _quark_format(entry: object) -> Format | None:
    """The format of `weight` in a specification of Quark, None if it leaves the weights as they are."""
    weight = entry.get("weight") if isinstance(entry, Mapping) else None
    if isinstance(weight, list) and len(weight) == 1:
        weight = weight[0]
    if weight is None:
        return None
    if isinstance(weight, Mapping):
        dtype, scheme, group = (weight.get(key) for key in ("dtype", "qscheme", "group_size"))
        is_scaled = weight.get("scale_format") == "e8m0"
        if dtype == "fp4" and scheme == "per_group" and group == 32 and is_scaled:
            return formats.MXFP4
        if dtype == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
            return formats.FP8_TENSOR if scheme == "per_tensor" else formats.FP8_CHANNEL
        raise UnknownSchemeError(f"quark with weights in {_shown(dtype)} {_shown(scheme)}")
    raise UnknownSchemeError("quark with several types of a weight")


def _algorithm(name: object) -> Format:
    form = _ALGORITHMS.get(name) if isinstance(name, str) else None
    if form is None:
        raise UnknownSchemeError(f"quant_algo {_shown(name)}")
    return form


def _tells_layers_apart(config: Mapping[str, object]) -> bool:
    """Whether a pattern may match some layers and not others: it contains a digit, or something that matches one."""
    groups, table = config.get("config_groups"), config.get("quantized_layers")
    skipped = (
        "modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers", "ignore", "exclude_modules", "exclude",
    )  # fmt: skip
    lists = [config.get(key) for key in skipped]
    if isinstance(groups, Mapping):
        lists += [group.get("targets") for group in groups.values() if isinstance(group, Mapping)]
    patterns = [str(item) for items in lists if isinstance(items, list) for item in items]
    for named in (table, config.get("layer_quant_config")):
        patterns += named if isinstance(named, Mapping) else ()
    return any(not _DIGITS.isdisjoint(pattern.replace("\\.", "")) for pattern in patterns)


def _linear_but(skipped: list[str], form: Format, with_head: bool = False) -> Callable[[str, str], Format | None]:
    """Use `form` for every linear layer that no pattern of `skipped` matches. `with_head` includes the output head."""
    skips = transformers_match(skipped)
    roles = (LINEAR, HEAD) if with_head else (LINEAR,)
    return lambda name, role: form if role in roles and not skips(name) else None


def _strings(config: Mapping[str, object], *keys: str) -> list[str]:
    """The module names listed under any of `keys`."""
    strings: list[str] = []
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise UnknownSchemeError(f"{key}, which is not a list of module names")
        strings += value
    return strings


def _block(value: object, key: str) -> tuple[int, int]:
    """The numbers of rows and columns that share a scale."""
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise UnknownSchemeError(f"{key} {_shown(value)}")


def _shown(value: object) -> str:
    return ascii(value)[:60]


_METHODS = {
    "fp8": _fp8, "fbgemm_fp8": _fbgemm_fp8, "mxfp4": _mxfp4, "gptq": _gptq, "awq": _awq, "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes, "compressed-tensors": _compressed_tensors, "quark": _quark,
}  # fmt: skip
