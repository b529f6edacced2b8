"""The published names of other releases of a preset's model, and how each quantized release stores its weights.

A name is listed only if its publisher says that the release has the preset's layers. Names are compared as a whole,
ignoring case. Sources: config.json files as quoted in ai-dynamo/aiconfigurator, sgl-project/ome,
AI-Hypercomputer/maxtext and inference-sim; the sizes of base and instruct releases in litgpt's config.py; the
publishers' model cards. For a series of quantized releases, such as Qwen2.5's AWQ, one or two configs were read, and
the other releases with the same suffix are assumed to follow them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvcalc.records import NamedTuple


class Recipe(NamedTuple):
    """How the weights of a quantized release are stored.

    `stored` describes it in words. `config` is the release's quantization_config. If the published list has one module
    name per layer, `config` has only the endings of these names. `changes` are the other config keys that differ.
    """

    stored: str
    config: Mapping[str, object]
    changes: Mapping[str, object] = {}


class Release(NamedTuple):
    """A published name, in its publisher's spelling, and its preset.

    `aside` is a part of the name that the preset's name does not have and that does not affect the config. `changes`
    are the config keys in which the release differs from the preset. `suffix` is the part of the name for `recipe`.
    """

    name: str
    preset: str
    aside: str | None
    changes: Mapping[str, object]
    suffix: str | None = None
    recipe: Recipe | None = None


class _Names(NamedTuple):
    """Names that differ only in `sizes`, each with and without the suffixes of `quantized`.

    `{}` is replaced by the size, in lower case for the preset. `is_alias` is true if the name without a suffix is the
    preset's own name or one of its aliases.
    """

    name: str
    preset: str
    sizes: str = ""
    aside: str | None = None
    changes: Mapping[str, object] = {}
    quantized: Mapping[str, Recipe] = {}
    is_alias: bool = False


_FP8_BLOCKS: dict[str, object] = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
_FP8_TEXT = "fp8 weights with a scale per block of 128 x 128"
_FP8 = Recipe(_FP8_TEXT, _FP8_BLOCKS)
_FP8_EXPERTS = Recipe(_FP8_TEXT, {**_FP8_BLOCKS, "modules_to_not_convert": ["lm_head", "mlp.gate"]})
_FP8_GLM5 = Recipe(
    _FP8_TEXT, {**_FP8_BLOCKS, "modules_to_not_convert": ["lm_head", "mlp.gate", "self_attn.indexers_proj"]}
)
_AWQ = Recipe("int4 weights in groups of 128", {"quant_method": "awq", "bits": 4, "group_size": 128})
_AWQ_MIXTRAL = Recipe(_AWQ.stored, {**_AWQ.config, "modules_to_not_convert": ["gate"]})
_GPTQ_INT4 = Recipe("int4 weights in groups of 128", {"quant_method": "gptq", "bits": 4, "group_size": 128})
_GPTQ_INT8 = Recipe("int8 weights in groups of 128", {"quant_method": "gptq", "bits": 8, "group_size": 128})
_FP8_DYNAMIC = Recipe(
    "fp8 weights with a scale per row",
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
    },
)
_INT4_EXPERTS = Recipe(
    "int4 experts in groups of 32",
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            }
        },
    },
)
_BNB_NF4 = Recipe(
    "bitsandbytes nf4 weights",
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
)
# With these, vLLM and SGLang keep the cache in fp8 if --kv-dtype is auto.
_NVIDIA_FP8 = Recipe(
    "fp8 weights, and an fp8 cache if the engine follows the checkpoint",
    {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
)
_NVIDIA_NVFP4 = Recipe(
    "nvfp4 weights, and an fp8 cache if the engine follows the checkpoint",
    {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "*.mlp.gate"],
    },
)

# Qwen pads the 72B model's MLP in its int4 and int8 releases, so that groups of 128 can be divided among 8 devices
# (https://github.com/QwenLM/Qwen3/issues/578). These releases compute in float16.
_HALF = {"torch_dtype": "float16"}
_PADDED = {**_HALF, "intermediate_size": 29696}
_QWEN2_INT = {
    "-AWQ": _AWQ._replace(changes=_HALF),
    "-GPTQ-Int4": _GPTQ_INT4._replace(changes=_HALF),
    "-GPTQ-Int8": _GPTQ_INT8._replace(changes=_HALF),
}
_QWEN2_72B_INT = {suffix: recipe._replace(changes=_PADDED) for suffix, recipe in _QWEN2_INT.items()}
_LENGTH = "max_position_embeddings"

_FIRST_HAND = (
    _Names("meta-llama/Llama-2-{}-chat-hf", "llama-2-{}", "70b", "chat"),
    _Names("meta-llama/Meta-Llama-3-{}-Instruct", "llama-3-{}", "8B 70B", "Instruct"),
    _Names("meta-llama/Meta-Llama-3.1-{}-Instruct", "llama-3.1-{}", "405B", "Instruct"),
    # The preset has the vocabulary of the 7B and 13B models. 34B has no infilling tokens.
    _Names("codellama/CodeLlama-34b-Instruct-hf", "codellama-34b", aside="Instruct"),
    _Names("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b-v0.1", aside="Instruct"),
    _Names("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3", aside="Instruct"),
    _Names("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b", aside="Instruct"),
    _Names("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b", aside="Instruct", changes={"vocab_size": 32768}),
    _Names("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo", aside="Instruct", changes={_LENGTH: 131072}),
    _Names("Qwen/Qwen2-{}-Instruct", "qwen2-{}", "1.5B 7B", quantized=_QWEN2_INT, is_alias=True),
    _Names("Qwen/Qwen2-{}-Instruct", "qwen2-{}", "72B", quantized=_QWEN2_72B_INT, is_alias=True),
    _Names("Qwen/Qwen2.5-{}-Instruct", "qwen2.5-{}", "0.5B 3B", quantized=_QWEN2_INT, is_alias=True),
    _Names("Qwen/Qwen2.5-{}-Instruct", "qwen2.5-{}", "1.5B 7B 14B 32B", "Instruct", {_LENGTH: 32768}, _QWEN2_INT),
    _Names("Qwen/Qwen2.5-{}-Instruct", "qwen2.5-{}", "72B", "Instruct", {_LENGTH: 32768}, _QWEN2_72B_INT),
    _Names("Qwen/Qwen3-30B-A3B-Base", "qwen3-30b-a3b", aside="Base", changes={_LENGTH: 32768}),
    _Names("Qwen/Qwen3-{}", "qwen3-{}", "0.6B 1.7B", quantized={"-FP8": _FP8}, is_alias=True),
    _Names("Qwen/Qwen3-{}", "qwen3-{}", "4B 8B 14B 32B", quantized={"-FP8": _FP8, "-AWQ": _AWQ}, is_alias=True),
    _Names("Qwen/Qwen3-{}", "qwen3-{}", "30B-A3B 235B-A22B", quantized={"-FP8": _FP8_EXPERTS}, is_alias=True),
    _Names("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b-2507", quantized={"-FP8": _FP8}, is_alias=True),
    _Names("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b-2507", quantized={"-FP8": _FP8}, is_alias=True),
    _Names("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b-2507", quantized={"-FP8": _FP8_EXPERTS}, is_alias=True),
    _Names(
        "Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b-2507", aside="Thinking", quantized={"-FP8": _FP8_EXPERTS}
    ),
    _Names(
        "Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b", aside="Instruct-2507", changes={_LENGTH: 262144},
        quantized={"-FP8": _FP8_EXPERTS},
    ),
    _Names(
        "Qwen/Qwen3-235B-A22B-Thinking-2507", "qwen3-235b-a22b", aside="Thinking-2507", changes={_LENGTH: 262144},
        quantized={"-FP8": _FP8_EXPERTS},
    ),
    _Names(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3-coder-480b-a35b", quantized={"-FP8": _FP8_EXPERTS}, is_alias=True
    ),
    _Names("Qwen/Qwen3-VL-235B-A22B-Thinking", "qwen3-vl-235b-a22b", aside="Thinking"),
    _Names("google/gemma-{}-it", "gemma-{}", "2b 7b", "it"),
    # "The model structure of DeepSeek-V3-0324 is exactly the same as DeepSeek-V3" (its card). The cards of V3, R1 and
    # V2 list the base, Zero and Chat models with the same numbers.
    _Names("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3", aside="0324"),
    _Names("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3", aside="Base"),
    _Names("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1", aside="0528"),
    _Names("deepseek-ai/DeepSeek-R1-Zero", "deepseek-r1", aside="Zero"),
    _Names("deepseek-ai/DeepSeek-V2-Chat", "deepseek-v2", aside="Chat"),
    # "The model structure of DeepSeek-V3.2 and DeepSeek-V3.2-Speciale are the same as DeepSeek-V3.2-Exp" (their card).
    _Names("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2", aside="Exp"),
    _Names("deepseek-ai/DeepSeek-V3.2-Speciale", "deepseek-v3.2", aside="Speciale"),
    _Names("moonshotai/Kimi-K2-Base", "kimi-k2", aside="Base"),
    _Names("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2", aside="0905", changes={_LENGTH: 262144}),
    # "Kimi-K2.5 adopts the same native int4 quantization method as Kimi-K2-Thinking" (the card of Kimi-K2.5).
    _Names(
        "moonshotai/Kimi-K2", "kimi-k2", changes={_LENGTH: 262144}, quantized={"-Thinking": _INT4_EXPERTS},
        is_alias=True,
    ),
    _Names("zai-org/{}", "{}", "GLM-5 GLM-5.1 GLM-5.2", quantized={"-FP8": _FP8_GLM5}, is_alias=True),
    _Names("microsoft/Phi-4-mini-reasoning", "phi-4-mini", aside="reasoning"),
    _Names("microsoft/Phi-4-reasoning", "phi-4", aside="reasoning", changes={_LENGTH: 32768}),
    _Names("microsoft/Phi-4-reasoning-plus", "phi-4", aside="reasoning-plus", changes={_LENGTH: 32768}),
    _Names("tiiuae/falcon-{}-instruct", "falcon-{}", "7b 40b", "instruct"),
    _Names("tiiuae/Falcon3-10B-Instruct", "falcon3-10b", aside="Instruct"),
    _Names("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "nemotron-3-super-120b-a12b", aside="BF16"),
)  # fmt: skip

# Single releases, whose quantization was read from their own configs. The modules that nvidia leaves in 16 bits, and
# whether the cache is fp8, differ between models. TheBloke's old files have no common suffix.
_SECOND_HAND = (
    _Names("nvidia/Llama-3.1-70B-Instruct", "llama-3.1-70b", aside="Instruct", quantized={"-FP8": _NVIDIA_FP8}),
    _Names("nvidia/Qwen3-{}", "qwen3-{}", "32B 30B-A3B 235B-A22B", quantized={"-NVFP4": _NVIDIA_NVFP4}),
    _Names(
        "TheBloke/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b", aside="Instruct", quantized={"-AWQ": _AWQ_MIXTRAL}
    ),
)  # fmt: skip

REPACKAGERS: Mapping[str, Mapping[str, Recipe | None]] = {
    # The scheme FP8_DYNAMIC of compressed-tensors. Both organisations belong to one company.
    "redhatai": {"-FP8-dynamic": _FP8_DYNAMIC},
    "neuralmagic": {"-FP8-dynamic": _FP8_DYNAMIC},
    # Copies of the original weights, and copies in nf4. It is not known which modules -unsloth-bnb-4bit leaves in 16
    # bits.
    "unsloth": {"": None, "-bnb-4bit": _BNB_NF4},
}
"""Organisation, in lower case -> the suffix it appends to the name of a converted model -> the recipe. None: no
quantization."""

REPACKAGED_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Dense decoders, in which every linear layer except the output head is quantized. In other types, some layers stay in
16 bits."""

DISTILLED: Mapping[str, str] = {
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b", "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
    "deepseek-r1-distill-qwen-1.5b": "qwen2.5-1.5b", "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b", "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-0528-qwen3-8b": "qwen3-8b",
}  # fmt: skip
"""Distillations, which are named after their teacher -> the preset with the same layers (DeepSeek-R1's cards)."""

QUANTIZED_AS: Mapping[str, str | None] = {
    "-fp8-dynamic": "fp8", "-fp8": "fp8", "-nvfp4": "nvfp4", "-fp4": "nvfp4", "-mxfp4": "mxfp4",
    "-unsloth-bnb-4bit": "int4", "-bnb-4bit": "int4", "-awq-int4": "int4", "-gptq-int4": "int4",
    "-gptq-int8": "int8", "-quantized.w4a16": "int4", "-quantized.w8a8": "int8", "-awq": "int4", "-gptq": "int4",
    "-int4": "int4", "-int8": "int8", "-gguf": "q4_k_m",
    "-4bit-dwq": "mlx-4bit", "-3bit": "mlx-3bit", "-4bit": "mlx-4bit", "-5bit": "mlx-5bit", "-6bit": "mlx-6bit",
    "-8bit": "mlx-8bit",
}  # fmt: skip
"""Usual suffixes of quantized releases, a longer one before its own end -> the closest --dtype. Used only in hints."""


def releases() -> Iterator[Release]:
    """Every name from the original publishers that is not a preset's alias."""
    return _spelled_out(_FIRST_HAND)


def repackaged() -> Iterator[Release]:
    """Every name from other publishers that is listed individually."""
    return (release for release in _spelled_out(_SECOND_HAND) if release.recipe is not None)


def _spelled_out(rows: tuple[_Names, ...]) -> Iterator[Release]:
    for row in rows:
        for size in row.sizes.split() or [""]:
            name, preset = row.name.format(size), row.preset.format(size.casefold())
            if not row.is_alias:
                yield Release(name, preset, row.aside, row.changes)
            for suffix, recipe in row.quantized.items():
                changes = {**row.changes, **recipe.changes}
                yield Release(name + suffix, preset, row.aside, changes, suffix.lstrip("-"), recipe)
