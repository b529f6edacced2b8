"""What sets the weights of one plain decoder family apart from another's.

Read from the modelling and configuration files of Transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Experts(NamedTuple):
    """A layer of experts: the keys that size it, the names its weights have, and which layers have one.

    `layers`: all; `step` (decoder_sparse_step and mlp_only_layers); `first_dense` (after first_k_dense_replace layers).
    `shared`: n_shared_experts further experts, all of which every token reads.
    """

    number: str = "num_local_experts"
    inner: str = "moe_intermediate_size"
    prefix: str = "mlp"
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    bias: bool = False
    layers: str = "all"
    shared: bool = False


class Layout(NamedTuple):
    """A family's own facts. A bias is given outright, or by the key that says so (absent: none).

    `tied`: the default of tie_word_embeddings. `qk_norm`: one scale which all heads share (head), the same with a shift
    (head_bias), or one as wide as all heads together (width); where the config has `qk_norm_key` true, if there is one.
    `mlp`: gated, fused (gate and up in one matrix), plain (no gate), or xielu (no gate, an activation with two
    weights). `parallel_key`: where the config has it true, attention and MLP share the first norm.
    """

    vocab_size: int
    intermediate_size: int
    tied: bool = False
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False
    final_norm: str = "model.norm"
    qk_norm: str = ""
    qk_norm_key: str = ""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    mlp: str = "gated"
    mlp_names: tuple[str, str] = ("up_proj", "down_proj")
    fused_qkv: bool = False
    output_name: str = "o_proj"
    experts: Experts | None = None
    head_bias: bool | str = False
    sinks: bool = False
    parallel_key: str = ""
    defaults: Mapping[str, object] = {}


_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
_W = ("w1", "w3", "w2")


_LLAMA = Layout(32000, 11008, qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias")
_QWEN2 = Layout(151936, 22016, qkv_bias=True)
_QWEN3 = Layout(151936, 22016, qkv_bias="attention_bias", output_bias="attention_bias", qk_norm="head")
_GEMMA = Layout(256000, 24576, True, qkv_bias="attention_bias", output_bias="attention_bias")
_GEMMA2 = _GEMMA._replace(intermediate_size=9216, norms=_GEMMA_NORMS)
_OLMO = Layout(50304, 11008, qkv_bias="attention_bias", output_bias="attention_bias", norms=(), final_norm="")
_OLMO2 = _OLMO._replace(
    norms=("post_attention_layernorm", "post_feedforward_layernorm"), final_norm="model.norm", qk_norm="width"
)
_COHERE = Layout(
    256000, 22528, True, qkv_bias="attention_bias", output_bias="attention_bias", norms=("input_layernorm",)
)
_GLM = Layout(151552, 13696, qkv_bias="attention_bias", mlp="fused", defaults={"attention_bias": True})
_QWEN_EXPERTS = Experts("num_experts", layers="step")

LAYOUTS: dict[str, Layout] = {
    "llama": _LLAMA,
    "llava": _LLAMA,
    "mistral": Layout(32000, 14336),
    "ministral3": Layout(131072, 14336),
    "mixtral": Layout(
        32000, 14336, experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", names=_W),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "starcoder2": Layout(
        49152, 12288, True, qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", norm_bias=True,
        mlp="plain", mlp_names=("c_fc", "c_proj"), defaults={"use_bias": True},
    ),
    "phi": Layout(
        51200, 8192, qkv_bias=True, output_bias=True, mlp_bias=True, norms=("input_layernorm",), norm_bias=True,
        final_norm="model.final_layernorm", qk_norm="head_bias", qk_norm_key="qk_layernorm",
        qk_norm_names=("q_layernorm", "k_layernorm"), mlp="plain", mlp_names=("fc1", "fc2"), output_name="dense",
        head_bias=True,
    ),
    "phi3": Layout(32064, 8192, mlp="fused", fused_qkv=True),
    "phimoe": Layout(
        32064, 6400, qkv_bias="attention_bias", output_bias="attention_bias", norm_bias=True, head_bias="lm_head_bias",
        experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", names=_W),
        defaults={"num_local_experts": 16, "num_experts_per_tok": 2},
    ),
    "qwen2": _QWEN2,
    "mimo": _QWEN2,
    "qwen2_vl_text": _QWEN2._replace(vocab_size=152064, intermediate_size=29568),
    "qwen2_5_vl_text": _QWEN2._replace(vocab_size=152064, intermediate_size=29568),
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_moe": _QWEN3._replace(
        intermediate_size=6144, experts=_QWEN_EXPERTS,
        defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "qwen3_vl_moe_text": _QWEN3._replace(
        intermediate_size=5632, experts=_QWEN_EXPERTS,
        defaults={"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2._replace(vocab_size=262208, qk_norm="head"),
    "vaultgemma": _GEMMA._replace(
        intermediate_size=9216, norms=("input_layernorm", "pre_feedforward_layernorm")
    ),
    "gpt_oss": Layout(
        201088, 2880, qkv_bias="attention_bias", output_bias="attention_bias", sinks=True,
        experts=Experts(inner="intermediate_size", router="router", bias=True),
        defaults={"attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4},
    ),
    "olmo": _OLMO,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _OLMO2._replace(
        intermediate_size=2048, norms=("input_layernorm", "post_attention_layernorm"),
        experts=Experts("num_experts", "intermediate_size"), defaults={"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "cohere": _COHERE._replace(qk_norm="width", qk_norm_key="use_qk_norm"),
    "cohere2": _COHERE,
    "minimax_m2": Layout(
        200064, 1536, qk_norm="width",
        experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", names=_W),
        defaults={"num_local_experts": 256, "num_experts_per_tok": 8},
    ),
    "glm": _GLM,
    "glm4": _GLM._replace(
        norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
    ),
    "glm4_moe": Layout(
        151552, 10944, qkv_bias="attention_bias", qk_norm="head", qk_norm_key="use_qk_norm",
        experts=Experts("n_routed_experts", layers="first_dense", shared=True),
        defaults={
            "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "granite": _LLAMA,
    "granitemoe": Layout(
        32000, 11008, qkv_bias="attention_bias", output_bias="attention_bias",
        experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", router="router"),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "arcee": _LLAMA._replace(intermediate_size=18432, mlp="plain"),
    "apertus": Layout(
        131072, 14336, qkv_bias="attention_bias", output_bias="attention_bias",
        norms=("attention_layernorm", "feedforward_layernorm"), qk_norm="head", mlp="xielu",
    ),
    "helium": Layout(48000, 7040, qkv_bias="attention_bias", mlp_bias="mlp_bias"),
    "seed_oss": Layout(
        155136, 27648, qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias",
        defaults={"attention_bias": True},
    ),
    "ernie4_5": Layout(103424, 3072, True, qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias"),
    "hunyuan_v1_dense": Layout(
        290943, 11008, qkv_bias="attention_bias", output_bias="attention_bias", qk_norm="head",
        qk_norm_names=("query_layernorm", "key_layernorm")
    ),
    "stablelm": Layout(
        50304, 6912, qkv_bias="use_qkv_bias", norm_bias=True, qk_norm="width", qk_norm_key="qk_layernorm",
        qk_norm_names=("q_layernorm", "k_layernorm"), parallel_key="use_parallel_residual",
    ),
}  # fmt: skip
