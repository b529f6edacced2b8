"""What sets the weights of one plain decoder family apart from another's.

Read from the modelling and configuration files of Transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Experts:
    """A layer of experts: the keys that size it, the names its weights have, and which layers have one.

    `layers`: all; `step` (decoder_sparse_step and mlp_only_layers); `first_dense` (after first_k_dense_replace layers).
    `shared`: n_shared_experts further experts, all of which every token reads; `gated_shared`: one further expert of
    shared_expert_intermediate_size, and a gate for it.
    """

    def __init__(
        self,
        number: str = "num_local_experts",
        inner: str = "moe_intermediate_size",
        prefix: str = "mlp",
        router: str = "gate",
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        layers: str = "all",
        shared: bool = False,
        gated_shared: bool = False,
    ) -> None:
        self.number = number
        self.inner = inner
        self.prefix = prefix
        self.router = router
        self.names = names
        self.bias = bias
        self.layers = layers
        self.shared = shared
        self.gated_shared = gated_shared


class Layout:
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

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.__dict__.update(facts)


def _facts(
    like: Mapping[str, Any] | None = None, /, *, attention: bool | str | None = None, **own: Any
) -> dict[str, Any]:
    """A family's facts, `like` another's where not its own; `attention` is the rule of all four projections' biases.

    Of these facts one layout is built at a start, not all.
    """
    if attention is not None:
        own["qkv_bias"] = own["output_bias"] = attention
    return {**like, **own} if like else own


_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
_W = ("w1", "w3", "w2")

_LLAMA = _facts(
    vocab_size=32000,
    intermediate_size=11008,
    attention="attention_bias",
    mlp_bias="mlp_bias",
)
_QWEN2 = _facts(vocab_size=151936, intermediate_size=22016, qkv_bias=True)
_QWEN3 = _facts(vocab_size=151936, intermediate_size=22016, attention="attention_bias", qk_norm="head")
_GEMMA = _facts(vocab_size=256000, intermediate_size=24576, tied=True, attention="attention_bias")
_GEMMA2 = _facts(_GEMMA, intermediate_size=9216, norms=_GEMMA_NORMS)
_OLMO = _facts(
    vocab_size=50304,
    intermediate_size=11008,
    attention="attention_bias",
    norms=(),
    final_norm="",
)
_OLMO2 = _facts(
    _OLMO, norms=("post_attention_layernorm", "post_feedforward_layernorm"), final_norm="model.norm", qk_norm="width"
)
_COHERE = _facts(
    vocab_size=256000,
    intermediate_size=22528,
    tied=True,
    attention="attention_bias",
    norms=("input_layernorm",),
)
_GLM = _facts(
    vocab_size=151552,
    intermediate_size=13696,
    qkv_bias="attention_bias",
    mlp="fused",
    defaults={"attention_bias": True},
)
_QWEN_EXPERTS = Experts("num_experts", layers="step")

LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llava": _LLAMA,
    "mistral": _facts(vocab_size=32000, intermediate_size=14336),
    "ministral3": _facts(vocab_size=131072, intermediate_size=14336),
    "mixtral": _facts(
        vocab_size=32000, intermediate_size=14336,
        experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", names=_W),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "starcoder2": _facts(
        vocab_size=49152, intermediate_size=12288, tied=True, attention="use_bias", mlp_bias="use_bias",
        norm_bias=True, mlp="plain", mlp_names=("c_fc", "c_proj"), defaults={"use_bias": True},
    ),
    "phi": _facts(
        vocab_size=51200, intermediate_size=8192, attention=True, mlp_bias=True, norms=("input_layernorm",),
        norm_bias=True, final_norm="model.final_layernorm", qk_norm="head_bias", qk_norm_key="qk_layernorm",
        qk_norm_names=("q_layernorm", "k_layernorm"), mlp="plain", mlp_names=("fc1", "fc2"), output_name="dense",
        head_bias=True,
    ),
    "phi3": _facts(vocab_size=32064, intermediate_size=8192, mlp="fused", fused_qkv=True),
    "phimoe": _facts(
        vocab_size=32064, intermediate_size=6400, attention="attention_bias", norm_bias=True,
        head_bias="lm_head_bias", experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", names=_W),
        defaults={"num_local_experts": 16, "num_experts_per_tok": 2},
    ),
    "qwen2": _QWEN2,
    "mimo": _QWEN2,
    "qwen2_vl_text": _facts(_QWEN2, vocab_size=152064, intermediate_size=29568),
    "qwen2_5_vl_text": _facts(_QWEN2, vocab_size=152064, intermediate_size=29568),
    "qwen2_moe": _facts(
        vocab_size=151936, intermediate_size=5632, qkv_bias="qkv_bias",
        experts=Experts("num_experts", layers="step", gated_shared=True),
        defaults={
            "qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_moe": _facts(
        _QWEN3, intermediate_size=6144, experts=_QWEN_EXPERTS,
        defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "qwen3_vl_moe_text": _facts(
        _QWEN3, intermediate_size=5632, experts=_QWEN_EXPERTS,
        defaults={"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    ),
    "qwen3_omni_moe_text": _facts(
        _QWEN3, vocab_size=3584, experts=_QWEN_EXPERTS,
        defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _facts(_GEMMA2, vocab_size=262208, qk_norm="head"),
    "vaultgemma": _facts(_GEMMA, intermediate_size=9216, norms=("input_layernorm", "pre_feedforward_layernorm")),
    "gpt_oss": _facts(
        vocab_size=201088, intermediate_size=2880, attention="attention_bias", sinks=True,
        experts=Experts(inner="intermediate_size", router="router", bias=True),
        defaults={"attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4},
    ),
    "olmo": _OLMO,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _facts(
        _OLMO2, intermediate_size=2048, norms=("input_layernorm", "post_attention_layernorm"),
        experts=Experts("num_experts", "intermediate_size"), defaults={"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "cohere": _facts(_COHERE, qk_norm="width", qk_norm_key="use_qk_norm"),
    "cohere2": _COHERE,
    "minimax_m2": _facts(
        vocab_size=200064, intermediate_size=1536, qk_norm="width",
        experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", names=_W),
        defaults={"num_local_experts": 256, "num_experts_per_tok": 8},
    ),
    "glm": _GLM,
    "glm4": _facts(
        _GLM, norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "glm4_moe": _facts(
        vocab_size=151552, intermediate_size=10944, qkv_bias="attention_bias", qk_norm="head",
        qk_norm_key="use_qk_norm", experts=Experts("n_routed_experts", layers="first_dense", shared=True),
        defaults={
            "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
            "n_shared_experts": 1, "first_k_dense_replace": 1,
        },
    ),
    "granite": _LLAMA,
    "granitemoe": _facts(
        vocab_size=32000, intermediate_size=11008, attention="attention_bias",
        experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", router="router"),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "cwm": _facts(vocab_size=128256, intermediate_size=21504, mlp_bias="mlp_bias"),
    "solar_open": _facts(
        vocab_size=196608, intermediate_size=10240, qkv_bias="attention_bias",
        experts=Experts("n_routed_experts", shared=True),
        defaults={
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1280,
        },
    ),
    "arcee": _facts(_LLAMA, intermediate_size=18432, mlp="plain"),
    "nemotron": _facts(_LLAMA, vocab_size=256000, intermediate_size=24576, norm_bias=True, mlp="plain"),
    "smollm3": _facts(_LLAMA, vocab_size=128256, tied=True),
    "exaone4": _facts(
        vocab_size=102400, intermediate_size=16384, norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        qk_norm="head",
    ),
    "dots1": _facts(
        vocab_size=152064, intermediate_size=10944, attention="attention_bias", qk_norm="head",
        experts=Experts("n_routed_experts", layers="first_dense", shared=True),
        defaults={"moe_intermediate_size": 1408, "first_k_dense_replace": 0},
    ),
    "apertus": _facts(
        vocab_size=131072, intermediate_size=14336, attention="attention_bias",
        norms=("attention_layernorm", "feedforward_layernorm"), qk_norm="head", mlp="xielu",
    ),
    "helium": _facts(vocab_size=48000, intermediate_size=7040, qkv_bias="attention_bias", mlp_bias="mlp_bias"),
    "seed_oss": _facts(
        vocab_size=155136, intermediate_size=27648, qkv_bias="attention_bias", output_bias="attention_out_bias",
        mlp_bias="mlp_bias", defaults={"attention_bias": True},
    ),
    "ernie4_5": _facts(
        vocab_size=103424, intermediate_size=3072, tied=True, attention="use_bias", mlp_bias="use_bias",
    ),
    "hunyuan_v1_dense": _facts(
        vocab_size=290943, intermediate_size=11008, attention="attention_bias", qk_norm="head",
        qk_norm_names=("query_layernorm", "key_layernorm"),
    ),
    "stablelm": _facts(
        vocab_size=50304, intermediate_size=6912, qkv_bias="use_qkv_bias", norm_bias=True, qk_norm="width",
        qk_norm_key="qk_layernorm", qk_norm_names=("q_layernorm", "k_layernorm"),
        parallel_key="use_parallel_residual",
    ),
}  # fmt: skip
