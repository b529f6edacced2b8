"""Decoders whose configs give the plain facts other names: GPT-J, CodeGen, StarCoder, XGLM, Qwen, EXAONE 3, GLM-3."""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.errors import ModelError
from kvcalc.model.caches import FullAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, uniform_layers

KEYS = frozenset(
    (
        "n_layer num_layers num_hidden_layers n_head attention_heads num_attention_heads n_embd d_model "
        "hidden_size num_key_value_heads head_dim kv_channels multi_query multi_query_attention "
        "multi_query_group_num n_positions n_ctx n_inner dff ffn_dim ffn_hidden_size seq_length rotary_dim "
        "add_cross_attention activation_function layer_norm_epsilon use_cache_quantization use_cache_kernel "
        "rope_theta rope_scaling rope_parameters qkv_bias add_qkv_bias rope_ratio"
    ).split()
)


class Names(NamedTuple):
    """The keys a family uses, own name first. `head_width` and `kv_heads` are empty where it has none."""

    layers: tuple[str, ...]
    heads: tuple[str, ...]
    hidden: tuple[str, ...]
    positions: tuple[str, ...]
    kv_heads: str = ""
    head_width: str = ""
    qkv_bias: bool = False


_GPT = Names(
    ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"), ("n_embd", "hidden_size"),
    ("n_positions", "max_position_embeddings"),
)  # fmt: skip

# Sources: GPTJConfig, CodeGenConfig, CTRLConfig, GPTBigCodeConfig and XGLMConfig, Transformers 5.23.0; Qwen/Qwen-7B's
# modeling_qwen.py; LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct's modeling_exaone.py; zai-org/chatglm3-6b's
# modeling_chatglm.py; inceptionai/jais-13b's modeling_jais.py; Tele-AI/TeleChat2-7B's modeling_telechat2.py.
NAMES: dict[str, Names] = {
    "gptj": _GPT,
    "codegen": _GPT,
    "ctrl": _GPT,
    "gpt_bigcode": _GPT._replace(qkv_bias=True),
    "xglm": Names(
        ("num_layers", "num_hidden_layers"), ("attention_heads", "num_attention_heads"), ("d_model", "hidden_size"),
        ("max_position_embeddings",), qkv_bias=True,
    ),
    "qwen": Names(
        ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"), ("hidden_size", "n_embd"),
        ("seq_length",), head_width="kv_channels", qkv_bias=True,
    ),
    "exaone": Names(
        ("num_layers", "num_hidden_layers"), ("num_attention_heads",), ("hidden_size",), ("max_position_embeddings",),
        kv_heads="num_key_value_heads", head_width="head_dim",
    ),
    "jais": _GPT._replace(qkv_bias=True),
    "telechat": Names(
        ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"), ("hidden_size",),
        ("seq_length", "max_position_embeddings"), kv_heads="num_key_value_heads",
    ),
    "chatglm": Names(
        ("num_layers",), ("num_attention_heads",), ("hidden_size",), ("seq_length",), head_width="kv_channels",
        qkv_bias=True,
    ),
}  # fmt: skip


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V of every layer, for all heads but where the family shares them.

    All of these give a head hidden_size / heads elements; a stated width which says otherwise is refused.
    """
    names = NAMES[model_type]
    config.refuse("add_cross_attention", "cross-attention caches of these decoders are not modelled")
    config.refuse("pre_seq_len", "a trained prefix kept beside the tokens is not modelled")
    config.refuse("use_cache_quantization", "a cache of 8-bit integers with scales is not modelled")
    num_layers = config.num_layers(*names.layers)
    num_heads = config.integer(*names.heads)
    hidden_size = config.integer(*names.hidden)
    for key in {"head_dim", "kv_channels"} - {names.head_width}:
        config.refuse(key, f"may change the cache and {model_type}'s reader does not know it")
    head_dim = _head_dim(config, names, hidden_size, num_heads)
    num_kv_heads = config.check_groups(num_heads, _kv_heads(config, model_type, names, num_heads))
    rotary = model_type not in ("gpt_bigcode", "xglm", "ctrl", "jais")
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, hidden_size, qkv_bias=names.qkv_bias,
        output_bias=model_type in ("gpt_bigcode", "xglm", "ctrl", "jais"), rope_dim=head_dim if rotary else 0,
    )  # fmt: skip
    layers = uniform_layers(num_layers, FullAttention(num_kv_heads, head_dim, head_dim))
    return config.model(model_type, attention, layers, positions=names.positions)


def _head_dim(config: ConfigReader, names: Names, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ModelError(f"{config.name}: {names.heads[0]} {num_heads} does not divide {names.hidden[0]} {hidden_size}")
    stated = config.optional_integer(names.head_width) if names.head_width else None
    if stated not in (None, hidden_size // num_heads):
        raise ModelError(f"{config.name}: {names.head_width} is {stated}: this family derives it from the hidden size")
    return hidden_size // num_heads


def _kv_heads(config: ConfigReader, model_type: str, names: Names, num_heads: int) -> int:
    """StarCoder's multi_query is true where absent, ChatGLM's multi_query_attention false."""
    if names.kv_heads:
        return config.optional_integer(names.kv_heads) or num_heads
    shared = 1 if model_type == "gpt_bigcode" and config.boolean("multi_query", default=True) else num_heads
    if model_type == "chatglm" and config.boolean("multi_query_attention", default=False):
        shared = config.integer("multi_query_group_num")
    for key, owner in (
        ("multi_query", "gpt_bigcode"), ("multi_query_attention", "chatglm"), ("multi_query_group_num", "chatglm"),
    ):  # fmt: skip
        if model_type != owner:
            config.refuse(key, f"may change the cache and {model_type}'s reader does not know it")
    stated = config.optional_integer("num_key_value_heads")
    if stated not in (None, shared):
        raise ModelError(f"{config.name}: num_key_value_heads is {stated}: this family has {shared} by its own keys")
    return shared
