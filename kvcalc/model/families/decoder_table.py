"""Plain decoders, one row each.

A row has the keys of a family's configs, the defaults that configs leave out, the layers with a window, the names of
the weights, and the family's GGUF architectures. Source: the configuration and modelling files of Transformers 5.23.0,
whose saved configs contain only what differs from the defaults of the class. A new plain decoder is one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcalc.model.experts import Experts
from kvcalc.model.families import window_patterns as pattern
from kvcalc.model.reader import ConfigReader


class Decoder:
    """The facts of a plain decoder. A bias is True or False, or the config key that sets it (no bias if absent).

    Keys: `layers`, `heads`, `hidden`, `inner` and `positions` list the config keys for one fact, the most common key
    first. `kv_heads_key` is empty if the family has no such key. `keys` are all keys that the family accepts besides
    the common ones (default: those of most decoders). `own_keys` are keys that may change the cache and that this
    family supports. `foreign_keys` are keys of other families that are refused here.

    Attention: `slides` is the pattern of layers with a window, if the config gives one; None means that a window is an
    error. `switch`: the window is used only with use_sliding_window. `has_layer_types`: the config may list the kinds
    of layers. `refused` maps unsupported keys to the reason. `grouped` is False if every query head has its own K and
    V. `states_kv_heads`: the config must give num_key_value_heads. `derives_head_dim`: the width of a head is always
    hidden_size / num_attention_heads. `floors_head_dim`: without a width of its own, that quotient is rounded down.
    `num_kv_heads` is set if the family's own module has determined the number.

    Weights: `vocab_size` is None if the family's weights are not counted. `tied` is the default of tie_word_embeddings.
    `qk_norm` is as in Projections; if `qk_norm_key` is set, it applies only if the config has that key set to true.
    `mlp` is gated, fused (gate and up in one matrix), plain (no gate), or xielu (no gate, an activation with two
    weights). `inner_factor` is the width of the MLP divided by that of the model, if the config does not give it.
    `parallel_key`: if the config has this key set to true, attention and MLP share the first norm. `tables` are learned
    position tables: name, keys, default rows and additional rows. `gguf` lists the architectures of its GGUF files.
    `is_remote`: published with its own code, without a class in Transformers.
    """

    layers: tuple[str, ...] = ("num_hidden_layers", "n_layer")
    heads: tuple[str, ...] = ("num_attention_heads", "n_head")
    hidden: tuple[str, ...] = ("hidden_size", "n_embed")
    inner: tuple[str, ...] = ("intermediate_size",)
    positions: tuple[str, ...] = ("max_position_embeddings",)
    kv_heads_key: str = "num_key_value_heads"
    head_dim_key: str = "head_dim"
    keys: frozenset[str] | None = None
    foreign_keys: tuple[str, ...] = ()
    own_keys: tuple[str, ...] = ()
    defaults: Mapping[str, object] = {}

    slides: pattern.Pattern | None = None
    switch: bool = False
    has_layer_types: bool = False
    refused: Mapping[str, str] = {}
    grouped: bool = True
    states_kv_heads: bool = False
    derives_head_dim: bool = False
    floors_head_dim: bool = False
    num_kv_heads: int | None = None
    rotary: bool = True
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"

    vocab_size: int | None = None
    tied: bool = False
    prefix: str = "model.layers.{}."
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    head_bias: bool | str = False
    attention_names: Mapping[str, Any] = {}
    qk_norm: str = ""
    qk_norm_key: str = ""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False
    final_norms: tuple[str, ...] = ("model.norm",)
    parallel_key: str = ""
    mlp: str = "gated"
    mlp_bias: bool | str = False
    mlp_names: tuple[str, str] = ("mlp.up_proj", "mlp.down_proj")
    inner_factor: int | None = None
    experts: Experts | None = None
    tables: tuple[tuple[str, tuple[str, ...], int, int], ...] = ()
    check: Callable[[ConfigReader], None] | None = None
    gguf: tuple[str, ...] = ()
    is_remote: bool = False

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.__dict__.update(facts)


def row(like: Mapping[str, Any] | None = None, /, **own: Any) -> dict[str, Any]:
    """Return the facts of a row: those of the row `like`, replaced by `own`.

    `bias` applies to the biases of all four projections. `kv_heads`, `head_dim`, `window`, `intermediate_size` and
    `defaults` are defaults of config keys. `gguf` is one or more architectures, separated by spaces. Rows are mappings
    because a start needs only one Decoder. Raises TypeError for a field that a Decoder does not have.
    """
    defaults = {**(like or {}).get("defaults", {}), **own.pop("defaults", {})}
    for name, key in _DEFAULTED.items():
        if name in own:
            defaults[key] = own.pop(name)
    if own.get("vocab_size") is not None:
        defaults["vocab_size"] = own["vocab_size"]
    if "bias" in own:
        own["qkv_bias"] = own["output_bias"] = own.pop("bias")
    if "gguf" in own:
        own["gguf"] = tuple(own["gguf"].split())
    if like:
        # GGUF files of the family `like` do not belong to this family.
        own = {**like, "gguf": (), **own}
    own["defaults"] = defaults
    if not own.keys() <= _FIELDS:
        raise TypeError(f"a row of decoders has no {' or '.join(sorted(own.keys() - _FIELDS))}")
    return own


_FIELDS = frozenset(Decoder.__annotations__)
_DEFAULTED = {
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "window": "sliding_window",
    "intermediate_size": "intermediate_size",
}  # fmt: skip


def _check_flat_llava(config: ConfigReader) -> None:
    """Refuse sizes that Transformers would not build: it ignores LLaVA's flat config and uses LLaMA-7B's sizes."""
    built = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    for key, value in {**built, "vocab_size": 32000}.items():
        if config.integer(key) != value:
            raise config.error(f"{key}: weights are not counted, because Transformers ignores LLaVA's flat config")


# Only Gemma 3 halves the window. PaliGemma sets the key for Gemma and Gemma 2, whose caches do not change by it.
_BIDIRECTIONAL = {"use_bidirectional_attention": "encoders, which halve the window, are not supported"}
# These families have no key for the number of KV heads.
_MULTI_HEAD = row(grouped=False, derives_head_dim=True)
# Published configs repeat head_dim as attention_head_dim.
_HUNYUAN = row(own_keys=("attention_head_dim",))
# The config must state num_key_value_heads, because the default of its class is not known here.
_STATED = row(states_kv_heads=True, is_remote=True)
_REMOTE = row(is_remote=True)
_REMOTE_MULTI_HEAD = row(_MULTI_HEAD, is_remote=True)

_ALL, _LISTED = pattern.all_layers, pattern.no_layers
# Gemma 3 and EXAONE have a key for the step. The other families do not.
_STEP_KEYS = ("sliding_window_pattern", "_sliding_window_pattern")
_W = ("w1", "w3", "w2")
_SANDWICH = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip

_LLAMA = row(vocab_size=32000, intermediate_size=11008, mlp_bias="mlp_bias")
_MISTRAL = row(slides=_ALL, kv_heads=8, window=4096)
# Qwen's window is used only with use_sliding_window, and then from layer max_window_layers on.
_QWEN_SWITCH = row(slides=pattern.from_max_window_layers, switch=True, has_layer_types=True)
_QWEN2 = row(
    _QWEN_SWITCH, qkv_bias=True, output_bias=False, kv_heads=32, window=4096, defaults={"max_window_layers": 28},
    vocab_size=151936, intermediate_size=22016,
)  # fmt: skip
_QWEN2_VL = row(_QWEN2, kv_heads=8, defaults={"max_window_layers": 80}, vocab_size=152064, intermediate_size=29568)
_QWEN3 = row(vocab_size=151936, intermediate_size=22016, qk_norm="head")
_QWEN3_MOE = row(
    _QWEN3, kv_heads=4, experts=Experts("num_experts", layers="step"),
    defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
)  # fmt: skip
_GEMMA = row(tied=True, vocab_size=256000, intermediate_size=24576, head_dim=256)
_GEMMA2 = row(
    _GEMMA, slides=pattern.full_every(2), has_layer_types=True, kv_heads=4, window=4096, intermediate_size=9216,
    norms=_SANDWICH,
)  # fmt: skip
_OLMO = row(vocab_size=50304, intermediate_size=11008, norms=(), final_norms=())
_OLMO2 = row(
    _OLMO, norms=("post_attention_layernorm", "post_feedforward_layernorm"), final_norms=("model.norm",),
    qk_norm="width",
)  # fmt: skip
_COHERE = row(
    defaults={"num_attention_heads": 64},
    vocab_size=256000,
    intermediate_size=22528,
    tied=True,
    norms=("input_layernorm",),
)
_GLM = row(
    qkv_bias="attention_bias", output_bias=False, kv_heads=2, head_dim=128, mlp="fused",
    vocab_size=151552, intermediate_size=13696, defaults={"attention_bias": True},
)  # fmt: skip
_GLM4_NORMS = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
_GLM4_MOE = row(
    kv_heads=8, floors_head_dim=True, qkv_bias="attention_bias", output_bias=False, vocab_size=151552,
    intermediate_size=10944, experts=Experts("n_routed_experts", layers="first_dense", shared=True),
    defaults={
        "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
        "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
)  # fmt: skip
_PHI3 = row(
    slides=_ALL, bias=False, mlp="fused", attention_names={"fused": "qkv_proj"}, vocab_size=32064,
    intermediate_size=8192,
)  # fmt: skip
_ERNIE = row(own_keys=("compression_ratio",))  # in ERNIE it scales the rotary positions
_EXAONE = row(
    slides=pattern.full_every(4, "sliding_window_pattern"), has_layer_types=True, kv_heads=32, window=4096,
    own_keys=("sliding_window_pattern",),
)  # fmt: skip
_GPT = row(
    layers=("n_layer", "num_hidden_layers"), heads=("n_head", "num_attention_heads"), hidden=("n_embd", "hidden_size"),
    positions=("n_positions", "max_position_embeddings"), inner=("n_inner",), inner_factor=4, head_dim_key="",
    kv_heads_key="", mlp="plain", mlp_bias=True, norm_bias=True,
    keys=frozenset(
        "n_layer num_hidden_layers n_head num_attention_heads n_embd hidden_size n_positions n_ctx n_inner "
        "add_cross_attention activation_function layer_norm_epsilon".split()
    ),
    refused={"add_cross_attention": "cross-attention caches of these decoders are not supported"},
    prefix="transformer.h.{}.", embedding="transformer.wte", final_norms=("transformer.ln_f",),
)  # fmt: skip
GPT2 = row(
    _GPT, bias=True, rotary=False, vocab_size=50257, tied=True, norms=("ln_1", "ln_2"),
    mlp_names=("mlp.c_fc", "mlp.c_proj"), attention_names={"prefix": "attn", "fused": "c_attn", "output": "c_proj"},
    tables=(("transformer.wpe", ("n_positions", "max_position_embeddings"), 1024, 0),),
)  # fmt: skip
_GPTJ = row(
    _GPT, bias=False, vocab_size=50400, norms=("ln_1",), mlp_names=("mlp.fc_in", "mlp.fc_out"), head_bias=True,
    attention_names={"prefix": "attn", "output": "out_proj"},
)  # fmt: skip
_FUSED = {"prefix": "self_attention", "fused": "query_key_value", "output": "dense"}
_4H = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
RENAMED_KEYS = frozenset(
    (
        "num_key_value_heads head_dim kv_channels multi_query multi_query_attention multi_query_group_num "
        "add_cross_attention"
    ).split()
)


def renamed(like: Mapping[str, Any] | None = None, /, *, knows: str = "", **own: Any) -> dict[str, Any]:
    """Return a row for a family whose config has other names for the plain facts.

    `knows` lists keys that this family supports. In the other families of this kind they may change the cache.
    """
    foreign = "multi_query multi_query_attention multi_query_group_num head_dim kv_channels".split()
    return row(
        {"head_dim_key": "", "qkv_bias": False, "output_bias": False, **(like or {})},
        **{
            "keys": RENAMED_KEYS, "foreign_keys": tuple(key for key in foreign if key not in knows.split()),
            "grouped": False, "kv_heads_key": "num_key_value_heads", "derives_head_dim": True, "refused": {
                "add_cross_attention": "cross-attention caches of these decoders are not supported",
                "pre_seq_len": "a trained prefix in the cache is not supported",
                "use_cache_quantization": "a cache of 8-bit integers with scales is not supported",
            }, **own,
        },
    )  # fmt: skip


_KOSMOS = {"layers": ("layers",), "heads": ("attention_heads",), "hidden": ("embed_dim",), "rotary": False}

DECODERS: dict[str, dict[str, Any]] = {
    "generic": row(slides=_ALL, gguf="bailingmoe2 codeshell grovemoe maincoder pangu-embedded plamo refact"),
    # LlamaAttention ignores both keys, but Transformers' caches and mlx-lm follow them.
    "llama": row(_LLAMA, slides=pattern.only_listed, has_layer_types=True),
    "mistral": row(_MISTRAL, bias=False, vocab_size=32000, intermediate_size=14336),
    "mixtral": row(
        slides=_ALL, kv_heads=8, bias=False, vocab_size=32000, intermediate_size=14336,
        experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", names=_W),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "ministral": row(_MISTRAL, has_layer_types=True),
    "ministral3": row(
        slides=_ALL, kv_heads=8, head_dim=128, bias=False, vocab_size=131072, intermediate_size=14336, gguf="mistral3"
    ),
    "starcoder2": row(
        slides=_ALL, kv_heads=2, bias="use_bias", mlp_bias="use_bias", norm_bias=True, mlp="plain", tied=True,
        mlp_names=("mlp.c_fc", "mlp.c_proj"), vocab_size=49152, intermediate_size=12288, defaults={"use_bias": True},
        gguf="starcoder2",
    ),
    "phi": row(
        bias=True, mlp_bias=True, norms=("input_layernorm",), norm_bias=True, final_norms=("model.final_layernorm",),
        qk_norm="head_bias", qk_norm_key="qk_layernorm", mlp="plain", mlp_names=("mlp.fc1", "mlp.fc2"),
        attention_names={"output": "dense", "qk_norms": ("q_layernorm", "k_layernorm")}, head_bias=True,
        vocab_size=51200, intermediate_size=8192, gguf="phi2",
    ),
    "phi3": _PHI3,
    "phi4_multimodal": row(_PHI3, kv_heads=8, vocab_size=200064),
    "phimoe": row(
        slides=_ALL, kv_heads=8, norm_bias=True, head_bias="lm_head_bias", vocab_size=32064, intermediate_size=6400,
        experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", names=_W),
        defaults={"num_local_experts": 16, "num_experts_per_tok": 2},
    ),
    "qwen2": row(_QWEN2, gguf="qwen2"),
    # Qwen2 with an additional layer for multi-token prediction.
    "mimo": _QWEN2,
    "qwen2_moe": row(
        _QWEN2, slides=pattern.every_other_below_max_window_layers, kv_heads=16, qkv_bias="qkv_bias",
        intermediate_size=5632, experts=Experts("num_experts", layers="step", gated_shared=True),
        defaults={
            "qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        gguf="qwen2moe",
    ),
    "qwen2_vl_text": row(_QWEN2_VL, gguf="qwen2vl"),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_5_omni_text": row(
        _QWEN_SWITCH, kv_heads=4, window=32768, defaults={"max_window_layers": 28}, qkv_bias=True
    ),
    "qwen3": row(
        {**_QWEN3, **_QWEN_SWITCH}, kv_heads=32, head_dim=128, window=4096,
        defaults={"max_window_layers": 28, **_QWEN3["defaults"]}, gguf="qwen3",
    ),
    # It ignores max_window_layers: with use_sliding_window, all layers have the window.
    "qwen3_moe": row(_QWEN3_MOE, slides=_ALL, switch=True, window=4096, intermediate_size=6144, gguf="qwen3moe"),
    "qwen3_omni_moe_text": row(_QWEN3_MOE, floors_head_dim=True, slides=_ALL, vocab_size=3584),
    "qwen3_vl_text": row(_QWEN3, kv_heads=32, head_dim=128, gguf="qwen3vl"),
    "qwen3_vl_moe_text": row(
        _QWEN3_MOE, kv_heads=16, intermediate_size=5632,
        defaults={"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}, gguf="qwen3vlmoe",
    ),
    "cosmos3_edge_text": row(
        kv_heads=8, head_dim=128, mlp="plain", mlp_bias="mlp_bias", mlp_names=("mlp.fc1", "mlp.fc2"), vocab_size=131072,
        intermediate_size=9216,
    ),
    "gemma": row(_GEMMA, kv_heads=16, gguf="gemma"),
    "gemma2": _GEMMA2,
    # Gemma 3 4B's published config leaves out even the number of heads.
    "gemma3_text": row(
        _GEMMA2, refused=_BIDIRECTIONAL, slides=pattern.full_every(6, *_STEP_KEYS), own_keys=_STEP_KEYS,
        vocab_size=262208, qk_norm="head", defaults={"num_attention_heads": 8},
    ),
    "vaultgemma": row(_GEMMA2, norms=("input_layernorm", "pre_feedforward_layernorm")),
    "gpt_oss": row(
        slides=pattern.full_every(2), has_layer_types=True, kv_heads=8, head_dim=64, window=128,
        attention_names={"has_sinks": True}, vocab_size=201088, intermediate_size=2880,
        experts=Experts(inner="intermediate_size", router="router", bias=True),
        defaults={"attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4},
    ),
    "olmo": row(_OLMO, gguf="olmo"),
    "olmo2": _OLMO2,
    "olmoe": row(
        _OLMO2, intermediate_size=2048, norms=("input_layernorm", "post_attention_layernorm"),
        experts=Experts("num_experts", "intermediate_size"), defaults={"num_experts": 64, "num_experts_per_tok": 8},
        gguf="olmoe",
    ),
    "flex_olmo": row(),
    "olmo3": row(_OLMO2, slides=pattern.full_every(4), has_layer_types=True, window=4096),
    "cohere": row(_COHERE, qk_norm="width", qk_norm_key="use_qk_norm", gguf="command-r"),
    "cohere2": row(
        _COHERE, slides=pattern.full_every(4, *_STEP_KEYS), has_layer_types=True, window=4096, own_keys=_STEP_KEYS
    ),
    "cohere2_moe": row(
        slides=pattern.after_dense_layers, has_layer_types=True, head_dim=128, window=4096,
        defaults={"sliding_window_pattern": 4, "prefix_dense_sliding_window_pattern": 1},
        own_keys=("sliding_window_pattern", "prefix_dense_sliding_window_pattern"),
    ),
    "cohere_compass_text": row(slides=_LISTED, has_layer_types=True, window=4096, derives_head_dim=True),
    "minimax_m2": row(
        kv_heads=8, head_dim=128, bias=False, qk_norm="width", vocab_size=200064, intermediate_size=1536,
        experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", names=_W),
        defaults={"num_local_experts": 256, "num_experts_per_tok": 8}, gguf="minimax-m2",
    ),
    "glm": _GLM,
    "glm4": row(
        _GLM, norms=_GLM4_NORMS, gguf="glm4"
    ),
    "glm4v_text": row(
        kv_heads=2, qkv_bias=True, output_bias=False, mlp="fused", norms=_GLM4_NORMS, vocab_size=151552,
        intermediate_size=13696,
    ),
    "glm4_moe": row(_GLM4_MOE, qk_norm="head", qk_norm_key="use_qk_norm", gguf="glm4moe"),
    "glm4v_moe_text": row(_GLM4_MOE, vocab_size=151424, defaults={"attention_bias": True}),
    "glm_ocr_text": row(
        kv_heads=8, bias=False, mlp="fused", norms=_GLM4_NORMS, vocab_size=59392, intermediate_size=4096
    ),
    "granite": row(_LLAMA, gguf="granite"),
    "granitemoe": row(
        vocab_size=32000, intermediate_size=11008,
        experts=Experts(inner="intermediate_size", prefix="block_sparse_moe", router="router"),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2}, gguf="granitemoe",
    ),
    "granitemoeshared": row(),
    "granite4_vision_text": _LLAMA,
    "granite_docling_text": row(_LLAMA, kv_heads=4, tied=True, vocab_size=133800, intermediate_size=2048),
    "granite_swa": row(slides=pattern.full_first_of(4), has_layer_types=True, kv_heads=4, window=128),
    "granitemoe_swa": row(slides=pattern.full_first_of(4), has_layer_types=True, window=128),
    "exaone4": row(
        _EXAONE, bias=False, norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="head",
        vocab_size=102400, intermediate_size=16384,
    ),
    "exaone_moe": row(
        _EXAONE, bias=False, qk_norm="head", vocab_size=102400, intermediate_size=16384,
        experts=Experts("num_experts", layers="listed", shared=True),
        defaults={
            "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "smollm3": row(
        _LLAMA, slides=pattern.without_rope, has_layer_types=True, kv_heads=4, vocab_size=128256, tied=True,
        defaults={"no_rope_layer_interval": 4}, own_keys=("use_sliding_window", "max_window_layers"), gguf="smollm3",
    ),
    "cwm": row(
        slides=pattern.full_first_of(4), has_layer_types=True, kv_heads=8, head_dim=128, window=8192, bias=False,
        mlp_bias="mlp_bias", vocab_size=128256, intermediate_size=21504,
    ),
    "dots1": row(
        slides=pattern.from_max_window_layers, has_layer_types=True, kv_heads=32, window=4096, qk_norm="head",
        own_keys=("max_window_layers",), vocab_size=152064, intermediate_size=10944,
        experts=Experts("n_routed_experts", layers="first_dense", shared=True),
        defaults={"max_window_layers": 62, "moe_intermediate_size": 1408, "first_k_dense_replace": 0},
    ),
    "afmoe": row(
        slides=pattern.full_every(4, "global_attn_every_n_layers"), has_layer_types=True, head_dim=128, window=1024,
        own_keys=("global_attn_every_n_layers",),
    ),
    "beam": row(
        slides=pattern.and_the_last(pattern.full_every(6)), has_layer_types=True, kv_heads=8, head_dim=128, window=512
    ),
    "flint": row(slides=pattern.flint, has_layer_types=True, kv_heads=4, head_dim=128, window=513),
    "kolibri1": row(slides=pattern.full_every(5), has_layer_types=True, kv_heads=4, head_dim=128, window=513),
    "laguna": row(slides=_LISTED, has_layer_types=True, kv_heads=8, head_dim=128, window=512),
    "mellum": row(slides=_LISTED, has_layer_types=True, kv_heads=4, head_dim=128, window=1024),
    "muse_glimmer_text": row(
        slides=pattern.full_last_of(4), has_layer_types=True, kv_heads=2, head_dim=128, window=2048
    ),
    "muse_spark_text": row(slides=pattern.full_last_of(4), has_layer_types=True, kv_heads=16, head_dim=64, window=2048),
    "aria_text": row(
        mlp_bias="mlp_bias", vocab_size=32000, intermediate_size=4096,
        experts=Experts("moe_num_experts", "intermediate_size", router="router", shared=True),
        defaults={"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2},
    ),
    "arcee": row(_LLAMA, intermediate_size=18432, mlp="plain", gguf="arcee"),
    "apertus": row(
        norms=("attention_layernorm", "feedforward_layernorm"), qk_norm="head", mlp="xielu", vocab_size=131072,
        intermediate_size=14336, gguf="apertus",
    ),
    "biogpt": row(_MULTI_HEAD, qkv_bias=True, rotary=False),
    "bitnet": row(kv_heads=5, gguf="bitnet"),
    "bloom": row(
        _MULTI_HEAD, bias=True, rotary=False, hidden=("hidden_size", "n_embed"), inner=(), inner_factor=4,
        norm_bias=True, mlp="plain", mlp_bias=True, mlp_names=_4H, attention_names=_FUSED, prefix="transformer.h.{}.",
        embedding="transformer.word_embeddings", tied=True, vocab_size=250880,
        final_norms=("transformer.word_embeddings_layernorm", "transformer.ln_f"), gguf="bloom",
    ),
    "chameleon": row(kv_heads=32, gguf="chameleon"),
    "deepseek_ocr2_text": row(derives_head_dim=True),
    "diffllama": row(),
    # keep_window_size limits which tokens a layer reads, not which tokens it keeps.
    "doge": row(slides=_ALL, own_keys=("keep_window_size",)),
    "emu3_text_model": row(kv_heads=8),
    "ernie4_5": row(
        _ERNIE, kv_heads=2, head_dim=128, bias="use_bias", mlp_bias="use_bias", tied=True, vocab_size=103424,
        intermediate_size=3072, gguf="ernie4_5",
    ),
    "ernie4_5_moe": row(
        _ERNIE, kv_heads=4, bias="use_bias", mlp_bias="use_bias", tied=True, vocab_size=103424, intermediate_size=12288,
        experts=Experts(
            "moe_num_experts", layers="interval", shared=True, corrects=True, shared_bias="use_bias"
        ),
        head_bias="use_bias",
        defaults={
            "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1, "moe_layer_interval": 1,
        },
        gguf="ernie4_5-moe",
    ),
    "ernie4_5_vl_moe_text": row(_ERNIE, kv_heads=4),
    "gpt_neox": row(
        _MULTI_HEAD, norm_bias=True, mlp="plain", mlp_bias=True, mlp_names=_4H,
        attention_names={**_FUSED, "prefix": "attention"}, prefix="gpt_neox.layers.{}.", embedding="gpt_neox.embed_in",
        head="embed_out", final_norms=("gpt_neox.final_layer_norm",), vocab_size=50432, intermediate_size=24576,
        defaults={"attention_bias": True}, gguf="gptneox",
    ),
    "gpt_neox_japanese": _MULTI_HEAD,
    "helium": row(
        kv_heads=20, head_dim=128, output_bias=False, mlp_bias="mlp_bias", vocab_size=48000, intermediate_size=7040
    ),
    "higgs_audio_v2": row(kv_heads=8, head_dim=128),
    "hunyuan_v1_dense": row(
        _HUNYUAN, qk_norm="head", attention_names={"qk_norms": ("query_layernorm", "key_layernorm")},
        vocab_size=290943, intermediate_size=11008, gguf="hunyuan-dense",
    ),
    "hunyuan_v1_moe": row(_HUNYUAN, gguf="hunyuan-moe"),
    "hunyuan_vl_text": row(_HUNYUAN, gguf="hunyuan_vl"),
    "hy_v3": row(kv_heads=8, head_dim=128, gguf="hy_v3"),
    "hyperclovax": row(),
    "internlm3": row(
        kv_heads=2, head_dim=128, qkv_bias="qkv_bias", output_bias="bias", mlp_bias="bias", vocab_size=128512,
        intermediate_size=10240,
    ),
    "iquestcoder": row(kv_heads=8, head_dim=128),
    "jais2": row(gguf="jais2"),
    "molmo2_text": row(kv_heads=8, head_dim=128),
    "nanochat": row(),
    "nemotron": row(
        _LLAMA, vocab_size=256000, intermediate_size=24576, norm_bias=True, mlp="plain", gguf="nemotron"
    ),
    "paddleocr_vl_text": row(
        kv_heads=2, head_dim=128, bias="use_bias", mlp_bias="use_bias", tied=True, vocab_size=103424,
        intermediate_size=3072, gguf="paddleocr",
    ),
    "persimmon": row(
        _MULTI_HEAD, bias=True, qk_norm="head_bias", qk_norm_key="qk_layernorm", mlp="plain", mlp_bias=True,
        mlp_names=_4H, norm_bias=True, final_norms=("model.final_layernorm",), vocab_size=262144,
        attention_names={**_FUSED, "prefix": "self_attn", "qk_norms": ("q_layernorm", "k_layernorm")},
        intermediate_size=16384, defaults={"attention_bias": True, "qk_layernorm": True},
    ),
    "seed_oss": row(
        kv_heads=8, head_dim=128, output_bias="attention_out_bias", mlp_bias="mlp_bias", vocab_size=155136,
        intermediate_size=27648, defaults={"attention_bias": True}, gguf="seed_oss",
    ),
    "solar_open": row(
        kv_heads=8, head_dim=128, output_bias=False, vocab_size=196608, intermediate_size=10240,
        experts=Experts("n_routed_experts", shared=True),
        defaults={
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1280,
        },
    ),
    "stablelm": row(
        kv_heads=32, qkv_bias="use_qkv_bias", output_bias=False, norm_bias=True, qk_norm="width",
        qk_norm_key="qk_layernorm", attention_names={"qk_norms": ("q_layernorm", "k_layernorm")},
        parallel_key="use_parallel_residual", vocab_size=50304, intermediate_size=6912, gguf="stablelm",
    ),
    # GPT-2 and similar models, with their own key names. Sources: GPT2Config, GPTJConfig, CodeGenConfig, CTRLConfig
    # and XGLMConfig.
    "gpt2": row(GPT2, gguf="gpt2"),
    "gpt-sw3": row(GPT2, vocab_size=None),
    "gptj": renamed(_GPTJ),
    "codegen": renamed(
        _GPTJ, attention_names={"prefix": "attn", "fused": "qkv_proj", "output": "out_proj"}
    ),
    "ctrl": renamed(_GPT, output_bias=True, rotary=False),
    "xglm": renamed(
        layers=("num_layers", "num_hidden_layers"), heads=("attention_heads", "num_attention_heads"),
        hidden=("d_model", "hidden_size"), bias=True, rotary=False,
    ),
    # Its learned prompt of prompt_length tokens comes before the text (CpmAntModel).
    "cpmant": renamed(
        layers=("num_hidden_layers",), heads=("num_attention_heads",), hidden=("hidden_size",), positions=(),
        head_dim_key="dim_head", derives_head_dim=False, rotary=False, defaults={"prompt_length": 32},
    ),
    # The language models of Kosmos-2 and Kosmos-2.5.
    "kosmos_2_text_model": renamed(_KOSMOS, defaults={"layers": 24, "embed_dim": 2048, "attention_heads": 32}),
    "kosmos_2_5_text_model": renamed(_KOSMOS, defaults={"layers": 24, "embed_dim": 1536, "attention_heads": 16}),
    # Speech and video models with a decoder of their own. Of CSM, Moshi and Kyutai's model this is the part that reads
    # the text; the small decoder that Moshi and CSM run for the codes of one moment is not counted.
    "csm": row(kv_heads=8),
    "gradium_phonon_tts": row(),
    "pocket_tts": row(),
    "kyutai_speech_to_text": row(slides=_ALL, window=375),
    "moshi": row(slides=_ALL, window=3000),
    "voxtral_realtime_text": row(_MISTRAL),
    # The language models of Evolla and IDEFICS. IDEFICS computes its attention to images anew in every step.
    "evolla": row(kv_heads=8),
    "idefics": row(_MULTI_HEAD),
    # Models published with their own code, in the repositories named here.
    # Qwen/Qwen-7B, LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct, inceptionai/jais-13b and Tele-AI/TeleChat2-7B.
    "qwen": renamed(
        layers=("num_hidden_layers", "n_layer"), heads=("num_attention_heads", "n_head"),
        hidden=("hidden_size", "n_embd"), positions=("seq_length",), head_dim_key="kv_channels", qkv_bias=True,
        knows="kv_channels", is_remote=True, gguf="qwen",
    ),
    "exaone": renamed(
        layers=("num_layers", "num_hidden_layers"), heads=("num_attention_heads",), hidden=("hidden_size",),
        head_dim_key="head_dim", grouped=True, knows="head_dim", is_remote=True, gguf="exaone",
    ),
    "jais": renamed(_GPT, bias=True, rotary=False, is_remote=True, gguf="jais"),
    "telechat": renamed(
        layers=("n_layer", "num_hidden_layers"), heads=("n_head", "num_attention_heads"), hidden=("hidden_size",),
        positions=("seq_length", "max_position_embeddings"), grouped=True, is_remote=True,
    ),
    # haotian-liu/LLaVA: flat configs, with the keys of the language model and of the vision tower on one level.
    "llava": row(_LLAMA, check=_check_flat_llava, is_remote=True),
    "llava_llama": row(_LLAMA, is_remote=True),
    "llava_mistral": row(_MISTRAL, bias=False, vocab_size=32000, intermediate_size=14336, is_remote=True),
    "llava_qwen": row(_QWEN2, is_remote=True),
    # BAAI/AquilaChat2-7B, inclusionAI/Ling-lite and OrionStarAI/Orion-14B-Base.
    "aquila": _STATED,
    "bailing_moe": row(_STATED, gguf="bailingmoe"),
    "orion": row(_STATED, gguf="orion"),
    # hpcai-tech/grok-1.
    "grok-1": row(_STATED, gguf="grok"),
    # Snowflake/snowflake-arctic-instruct.
    "arctic": row(_STATED, slides=_ALL, gguf="arctic"),
    # baichuan-inc/Baichuan2-7B-Base, internlm/internlm-7b and xverse/XVERSE-7B.
    "baichuan": row(_REMOTE_MULTI_HEAD, gguf="baichuan"),
    "internlm": _REMOTE_MULTI_HEAD,
    "xverse": row(_REMOTE_MULTI_HEAD, gguf="xverse"),
    # allenai/Molmo-7B-D-0924 (MolmoAttention, vLLM 0.33.0).
    "molmo": _REMOTE,
    # deepseek-ai/deepseek-moe-16b-base, internlm/internlm2-7b and openbmb/MiniCPM-2B-sft-bf16.
    "deepseek": row(_REMOTE, gguf="deepseek"),
    "internlm2": row(_REMOTE, gguf="internlm2"),
    "minicpm": row(_REMOTE, gguf="minicpm"),
    # Tele-AI/TeleChat3 and upstage/solar-pro-preview; sarvamai's and bharatgenai's experts. Attention like LLaMA's
    # (TeleChat3ForCausalLM, SolarForCausalLM, SarvamMoEForCausalLM and Param2MoEForCausalLM of vLLM 0.33.0).
    "telechat3": _STATED,
    "solar": row(_STATED, slides=_ALL),
    "sarvam_moe": _STATED,
    "param2moe": _STATED,
    # stepfun-ai's first models and Step 3, whose queries share one KV head (Step1Attention and Step3TextAttention, vLLM
    # 0.33.0).
    "step1": row(_STATED, kv_heads_key="num_attention_groups"),
    "step3_text": row(_REMOTE, kv_heads_key="num_attention_groups", num_kv_heads=1, head_dim=256),
    # microsoft/Phi-3-vision-128k-instruct and Phi-4-multimodal-instruct; pytorch/executorch's configs of Phi-4-mini.
    "phi3_v": row(_PHI3, is_remote=True),
    "phi4": row(_PHI3, is_remote=True, vocab_size=200064),
    "phi4mm": row(_PHI3, is_remote=True, vocab_size=200064),
}  # fmt: skip
