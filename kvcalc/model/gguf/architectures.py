"""The architectures of GGUF files, with the model_type of each and the facts that its metadata leave out.

Source: load_arch_hparams in src/models and the tables in src/llama-arch.cpp of llama.cpp, in the version that
llama-cpp-python 0.3.36 ships.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcalc.model.families.decoder_table import architectures
from kvcalc.model.gguf import latent as deep
from kvcalc.model.gguf import layers
from kvcalc.model.gguf.keys import Facts
from kvcalc.model.gguf.layers import Config

Build = Callable[[Facts, Config], Config]

# Architectures that have only the common metadata: plain decoders, named in the rows of the table, and encoders.
PLAIN: dict[str, str] = {
    **architectures(),
    "bert": "bert", "jina-bert-v2": "bert", "jina-bert-v3": "xlm-roberta", "nomic-bert": "nomic_bert",
    "nomic-bert-moe": "nomic_bert",
}  # fmt: skip

ENCODERS = ("bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe")

# Types whose readers compute the width of a head and have no key for it.
DERIVED_HEADS = ("dbrx", "falcon", "gpt2", "gpt_bigcode", "jais", "mpt", "qwen")
# Types in which every query head has its own K and V. There is no key for this.
OWN_HEADS = ("bert", "gpt2", "nomic_bert", "xlm-roberta")


def _llama(facts: Facts, config: Config) -> Config:
    return {**config, "model_type": "mixtral"} if facts.optional("expert_count") else config


def _falcon(facts: Facts, config: Config) -> Config:
    heads = config.pop("num_key_value_heads")
    grouped = heads not in (1, config["num_attention_heads"])
    return {**config, "new_decoder_architecture": grouped, "num_kv_heads": heads, "multi_query": heads == 1}


def _starcoder(facts: Facts, config: Config) -> Config:
    return {**config, "multi_query": config["num_key_value_heads"] == 1}


def _attn_config(facts: Facts, config: Config) -> Config:
    return {**config, "attn_config": {"kv_n_heads": config["num_key_value_heads"]}}


def _chatglm(facts: Facts, config: Config) -> Config:
    return {
        "model_type": "chatglm", "num_layers": facts.num_layers, "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"], "kv_channels": config["head_dim"],
        "multi_query_attention": True, "multi_query_group_num": config["num_key_value_heads"],
        "seq_length": config["max_position_embeddings"], "torch_dtype": config["torch_dtype"],
    }  # fmt: skip


def _t5(facts: Facts, config: Config) -> Config:
    """block_count is the number of encoder layers, and of decoder layers if the file has no decoder_block_count."""
    decoder = facts.optional("decoder_block_count", least=1)
    return {
        "model_type": "t5", "num_layers": facts.num_layers, "num_decoder_layers": decoder or facts.num_layers,
        "num_heads": config["num_attention_heads"], "d_model": config["hidden_size"], "d_kv": config["head_dim"],
        "torch_dtype": config["torch_dtype"],
    }  # fmt: skip


def _window_of_all(facts: Facts, config: Config) -> Config:
    """Phi-3: every layer has a window, which llama.cpp ignores: it keeps all tokens."""
    return {**config, "sliding_window": facts.optional("attention.sliding_window") or None}


def _windowed(
    step: int | None, *, full_first: bool = False, window: int | None = None, optional: bool = False
) -> Build:
    """Return a builder for models with windows in all layers except one in every `step`.

    `window` is the default size if the file may leave it out. `optional`: without a size, the model has no windows.
    """

    def build(facts: Facts, config: Config) -> Config:
        size = facts.optional("attention.sliding_window")
        if size is None and not optional:
            size = window or facts.integer("attention.sliding_window")
        flags = [False] * facts.num_layers
        if size:
            flags = layers.sliding(facts, step, full_first=full_first)
        return {**config, "sliding_window": size or 0, "layer_types": layers.layer_kinds(flags)}

    return build


def _no_windows(facts: Facts, config: Config) -> Config:
    return {**config, "layer_types": ["full_attention"] * facts.num_layers}


def _olmo2(facts: Facts, config: Config) -> Config:
    """With a window the file is OLMo 3, which is OLMo 2 with windows."""
    if facts.optional("attention.sliding_window"):
        return {**_windowed(4)(facts, config), "model_type": "olmo3"}
    return config


def _exaone4(facts: Facts, config: Config) -> Config:
    """In llama.cpp, only the 64-layer model (32B) has windows: 4,096 tokens if the file does not state the size."""
    if facts.num_layers == 64:
        return _windowed(4, window=4096)(facts, config)
    if facts.optional("attention.sliding_window"):
        raise facts.error("exaone4.attention.sliding_window: supported only for the 64-layer model")
    return {**config, "sliding_window": 0, "layer_types": ["full_attention"] * facts.num_layers}


def _granite_swa(facts: Facts, config: Config) -> Config:
    name = "granitemoe_swa" if facts.optional("expert_count") else "granite_swa"
    return {**_windowed(None)(facts, config), "model_type": name}


# Architecture -> the model_type, and the function that adds to the common facts.
BUILDERS: dict[str, tuple[str, Build]] = {
    "afmoe": ("afmoe", _windowed(4, optional=True)),
    "chatglm": ("chatglm", _chatglm),
    "cohere2": ("cohere2", _windowed(4)),
    "cohere2moe": ("cohere2_moe", _windowed(4, full_first=True)),
    "dbrx": ("dbrx", _attn_config),
    "deci": ("nemotron-nas", layers.deci),
    "deepseek2": ("deepseek_v2", deep.latent),
    "deepseek32": ("deepseek_v32", deep.indexed),
    "deepseek4": ("deepseek_v4", deep.deepseek4),
    "dots1": ("dots1", _no_windows),
    "exaone-moe": ("exaone_moe", _windowed(4, window=128)),
    "exaone4": ("exaone4", _exaone4),
    "falcon": ("falcon", _falcon),
    "falcon-h1": ("falcon_h1", layers.falcon_h1),
    "gemma2": ("gemma2", _windowed(2, window=4096)),
    "gemma3": ("gemma3_text", _windowed(6, optional=True)),
    "gemma3n": ("gemma3n_text", layers.gemma3n),
    "gemma4": ("gemma4_text", layers.gemma4),
    "glm-dsa": ("glm_moe_dsa", deep.glm_dsa),
    "gpt-oss": ("gpt_oss", _windowed(2)),
    "granite_swa": ("granite_swa", _granite_swa),
    "granitehybrid": ("granitemoehybrid", layers.granite_hybrid),
    "jamba": ("jamba", layers.jamba),
    "kimi-k3": ("kimi_linear", deep.kimi_linear),
    "kimi-linear": ("kimi_linear", deep.kimi_linear),
    "laguna": ("laguna", _windowed(4, full_first=True, optional=True)),
    "lfm2": ("lfm2", layers.lfm2),
    "lfm2moe": ("lfm2_moe", layers.lfm2),
    "llama": ("llama", _llama),
    "llama4": ("llama4_text", layers.llama4),
    "mamba": ("mamba", layers.mamba),
    "mamba2": ("mamba2", layers.mamba2),
    "mellum": ("mellum", _windowed(4, optional=True)),
    "mimo2": ("mimo_v2_flash", layers.mimo2),
    "minicpm3": ("minicpm3", deep.latent),
    "minimax-01": ("minimax", layers.minimax),
    "minimax-m3": ("minimax_m3", deep.minimax_m3),
    "mistral4": ("mistral4", deep.latent),
    "mpt": ("mpt", _attn_config),
    "muse-glimmer": ("muse_glimmer_text", _windowed(4)),
    "nemotron_h": ("nemotron_h", layers.nemotron_h),
    "nemotron_h_moe": ("nemotron_h", layers.nemotron_h),
    "olmo2": ("olmo2", _olmo2),
    "openelm": ("openelm", layers.openelm),
    "phi3": ("phi3", _window_of_all),
    "phimoe": ("phimoe", _window_of_all),
    "qwen35": ("qwen3_5_text", layers.delta_net),
    "qwen35moe": ("qwen3_5_moe_text", layers.delta_net),
    "qwen3next": ("qwen3_next", layers.delta_net),
    "rwkv6": ("rwkv6", layers.rwkv6),
    "starcoder": ("gpt_bigcode", _starcoder),
    "step35": ("step3p5", layers.step35),
    "t5": ("t5", _t5),
}

# Architectures whose builders read the number of KV heads of each layer.
BY_LAYER = (
    "deci gemma4 granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe mamba mamba2 mimo2 nemotron_h nemotron_h_moe "
    "openelm rwkv6 step35"
).split()


def known_architectures() -> dict[str, str]:
    """Return every supported architecture with the model_type it is read as."""
    return {**PLAIN, **{arch: name for arch, (name, _) in BUILDERS.items()}}
