"""SGLang's prefill context parallelism: copies of the attention that divide the tokens of a prompt.

--tp-size counts the devices of all copies (derive_attn_tp_size, srt/runtime_context.py). Each copy gathers the rows of
the whole prompt, and decodes all requests. Source: handle_context_parallelism (arg_groups/parallel_hook.py),
_deepseek_family_overrides (arg_groups/model_overrides/deepseek_v2.py) and srt/layers/cp, SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.model.spec import ModelSpec

OPTION = "attn-cp-size"
# The only way to divide a prompt that each kind of attention has (get_supported_attention_backend). DeepSeek-V3.2
# refuses zigzag, and GLM-5 keeps a copy of every MLP with it.
_SPARSE = ("deepseek_v32", "glm_moe_dsa")
_LATENT = ("deepseek_v3", "kimi_k2")
_HEADS = ("qwen3_moe",)
_MOST_SPARSE = 8  # "Cross-machine CP has precision issues"


def strategy_of(spec: ModelSpec) -> str:
    """SGLang's --cp-strategy for a model."""
    return "interleave" if spec.model_type in _SPARSE else "zigzag"


def keeps_mlps(spec: ModelSpec) -> bool:
    """Whether every device has whole MLPs and shared experts: moe_dense_tp_size 1 and DeepEP, for MLA."""
    return spec.model_type in _LATENT


def check_copies(spec: ModelSpec, copies: int, settings: Mapping[str, str], stages: int) -> None:
    """Raise ModelError (exit 3) or UsageError (exit 2) for what is not known with `copies` of the attention."""
    if spec.model_type == "nemotron_h":
        raise ModelError(f"{spec.name}: SGLang does not run Nemotron-H with --{OPTION}")
    if spec.model_type not in (*_SPARSE, *_LATENT, *_HEADS):
        known = "DeepSeek-V3 and V3.2, Kimi-K2, GLM-5 and Qwen3-MoE"
        raise ModelError(f"{spec.name}: SGLang's --{OPTION} is modelled only for {known}")
    if stages > 1:
        raise UsageError(f"--{OPTION} {copies}: not modelled with pipeline stages", "leave out --pp")
    if "speculative-num-draft-tokens" in settings:
        raise UsageError(f"--{OPTION} {copies}: not modelled with drafted tokens", f"leave out --{OPTION}")


def check_devices(spec: ModelSpec, copies: int, size: int) -> None:
    """Raise LayoutError (exit 2) if a copy cannot be split over `size` devices."""
    if spec.model_type in _LATENT and size > 1:
        raise LayoutError(
            f"--{OPTION} {copies} --tp {size}: SGLang has MLA without an indexer whole on every device then",
            f"use --{OPTION} {copies * size} --tp 1",
        )
    if spec.model_type in _SPARSE and copies * size > _MOST_SPARSE:
        raise LayoutError(
            f"--{OPTION} {copies} --tp {size}: SGLang divides prompts of sparse attention on {_MOST_SPARSE} devices at "
            "most",
            f"use fewer devices, or leave out --{OPTION}",
        )
