"""A GGUF file becomes a ModelSpec: its metadata, as the mapping a config.json would hold, through the same readers.

An architecture's entry names the model_type, and where its layers are not all alike the function that says how. What is
not known is refused: the architecture, a key that may change the cache, a shape the metadata do not explain. Source of
the tables: src/models of llama.cpp as it stands in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcalc.errors import ModelError, nearest
from kvcalc.model import gguf_latent as deep
from kvcalc.model import gguf_layers as layers
from kvcalc.model.gguf_files import GgufModel, read_files
from kvcalc.model.gguf_keys import Facts
from kvcalc.model.gguf_layers import Config
from kvcalc.model.gguf_weights import count_weights, expected_rows
from kvcalc.model.hf_config import read_config
from kvcalc.model.spec import GgufFacts, ModelSpec

Build = Callable[[Facts, Config], Config]

# Decoders with the same K and V in every layer.
_PLAIN: dict[str, str] = {
    "apertus": "apertus", "arcee": "arcee", "arctic": "arctic", "baichuan": "baichuan", "bailingmoe": "bailing_moe",
    "bitnet": "bitnet", "bloom": "bloom", "chameleon": "chameleon", "command-r": "cohere", "deepseek": "deepseek",
    "ernie4_5": "ernie4_5", "ernie4_5-moe": "ernie4_5_moe", "exaone": "exaone", "gemma": "gemma", "glm4": "glm4",
    "glm4moe": "glm4_moe", "gpt2": "gpt2", "gptneox": "gpt_neox", "granite": "granite", "granitemoe": "granitemoe",
    "grok": "grok-1", "hunyuan-dense": "hunyuan_v1_dense", "hunyuan-moe": "hunyuan_v1_moe",
    "hunyuan_vl": "hunyuan_vl_text", "hy_v3": "hy_v3", "internlm2": "internlm2", "jais": "jais", "jais2": "jais2",
    "minicpm": "minicpm", "minimax-m2": "minimax_m2", "mistral3": "ministral3", "nemotron": "nemotron", "olmo": "olmo",
    "olmoe": "olmoe", "orion": "orion", "paddleocr": "paddleocr_vl_text", "phi2": "phi", "qwen": "qwen",
    "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen2vl": "qwen2_vl_text", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
    "qwen3vl": "qwen3_vl_text", "qwen3vlmoe": "qwen3_vl_moe_text", "seed_oss": "seed_oss", "smollm3": "smollm3",
    "stablelm": "stablelm", "starcoder2": "starcoder2", "xverse": "xverse",
    # Of no model_type kvcalc knows, and as plain as the others: the documented type for such decoders.
    **dict.fromkeys(
        "bailingmoe2 codeshell grovemoe llama-embed maincoder pangu-embedded plamo refact".split(), "generic"
    ),
    # Multi-head attention of encoders.
    "bert": "bert", "jina-bert-v2": "bert", "jina-bert-v3": "xlm-roberta", "nomic-bert": "nomic_bert",
    "nomic-bert-moe": "nomic_bert",
}  # fmt: skip

_ENCODERS = ("bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe")

# Their readers derive the width of a head, and know no key for it.
_DERIVED_HEADS = ("dbrx", "falcon", "gpt2", "gpt_bigcode", "jais", "mpt", "qwen")
# Every query head has its own K and V, and there is no key that says so.
_OWN_HEADS = ("bert", "gpt2", "nomic_bert", "xlm-roberta")


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
    """block_count are the encoder's layers, and the decoder's where it states no number of its own."""
    decoder = facts.optional("decoder_block_count", least=1)
    return {
        "model_type": "t5", "num_layers": facts.num_layers, "num_decoder_layers": decoder or facts.num_layers,
        "num_heads": config["num_attention_heads"], "d_model": config["hidden_size"], "d_kv": config["head_dim"],
        "torch_dtype": config["torch_dtype"],
    }  # fmt: skip


def _window_of_all(facts: Facts, config: Config) -> Config:
    """Phi-3: a window in every layer, which llama.cpp keeps whole."""
    return {**config, "sliding_window": facts.optional("attention.sliding_window") or None}


def _windowed(
    step: int | None, *, full_first: bool = False, window: int | None = None, optional: bool = False
) -> Build:
    """Windows in all layers but one in `step`. `window` where the file may leave its size out; `optional`: a model
    without one has none."""

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
    """OLMo 3 is OLMo 2 with windows."""
    if facts.optional("attention.sliding_window"):
        return {**_windowed(4)(facts, config), "model_type": "olmo3"}
    return config


def _exaone4(facts: Facts, config: Config) -> Config:
    """llama.cpp gives windows to the model of 64 layers alone (32B), of 4,096 tokens where the file does not say."""
    if facts.num_layers == 64:
        return _windowed(4, window=4096)(facts, config)
    if facts.optional("attention.sliding_window"):
        raise facts.error("exaone4.attention.sliding_window: known of the model of 64 layers alone")
    return {**config, "sliding_window": 0, "layer_types": ["full_attention"] * facts.num_layers}


def _granite_swa(facts: Facts, config: Config) -> Config:
    name = "granitemoe_swa" if facts.optional("expert_count") else "granite_swa"
    return {**_windowed(None)(facts, config), "model_type": name}


# Architecture -> the model_type and what must be added to the facts all share.
_BUILDERS: dict[str, tuple[str, Build]] = {
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
    "minimax-m3": ("minimax_m3_vl_text", deep.minimax_m3),
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
    "starcoder": ("gpt_bigcode", _starcoder),
    "step35": ("step3p5", layers.step35),
    "t5": ("t5", _t5),
}

# KV heads by layer are the builder's to read.
_BY_LAYER = (
    "deci gemma4 granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe mamba mamba2 mimo2 nemotron_h nemotron_h_moe "
    "openelm step35"
).split()

_OTHER_FILES = {
    "mmproj": "a vision projector, and no language model", "adapter": "a LoRA adapter, and no model",
    "imatrix": "an importance matrix, and no model", "vocab": "a vocabulary, and no model",
}  # fmt: skip


def load_gguf(path: str, *, assume_full_attention: bool = False) -> ModelSpec:
    """The model of the GGUF file at `path`, any of its shards, or the folder that holds it.

    Raises UsageError (exit 2) for a file that is missing, cut off or damaged, ModelError (exit 3) for a model that is
    not understood, RunError (exit 1) without the extra `gguf`.
    """
    model = read_files(path)
    metadata, name, source = model.metadata, model.name, model.path
    kind, arch = metadata.get("general.type"), metadata.get("general.architecture")
    if kind not in (None, "model") or arch == "clip":
        what = _OTHER_FILES.get("mmproj" if arch == "clip" else str(kind), f"of type {ascii(kind)[:40]}")
        raise ModelError(f"{name}: {what}", "give the file of the language model")
    if not isinstance(arch, str):
        raise ModelError(f"{name}: general.architecture is missing or no text")
    if assume_full_attention:
        return _upper_bound(model, arch)
    facts = Facts(metadata, arch, name) if arch in _BUILDERS or arch in _PLAIN else None
    if facts is None:
        known = (*_BUILDERS, *_PLAIN)
        hint = nearest(arch, known) or "an upper bound: --assume-full-attention"
        raise ModelError(f"{name}: architecture {arch[:60]!a} is not known", hint)
    spec = read_config(_config(facts), name, source)
    facts.refuse_unread()
    _check_shapes(spec, model)
    remarks = [*spec.remarks]
    expands = arch in ("deepseek2", "minicpm3") and deep.expands_latent(facts)
    if expands:
        remarks.append(
            f"{name} states no key_length_mla: llama.cpp keeps K and V of every head for it, not the latent"
            if arch == "deepseek2"
            else "llama.cpp keeps K and V of every head of MiniCPM3, not the latent"
        )
    return spec._replace(gguf=GgufFacts(count_weights(model, facts), expands), remarks=tuple(remarks))


def _config(facts: Facts) -> Config:
    """The metadata under config.json's own keys."""
    arch = facts.arch
    model_type, build = _BUILDERS.get(arch, ("", None))
    config = shared(facts, model_type or _PLAIN[arch], by_layer=arch in _BY_LAYER)
    if build is not None:
        config = build(facts, config)
    if not facts.boolean("attention.causal", default=True) and arch not in _ENCODERS:
        raise facts.error(f"{arch}.attention.causal is false: an encoder of this architecture is not modelled")
    return config


def shared(facts: Facts, model_type: str, *, by_layer: bool) -> Config:
    """What all architectures state alike. `by_layer`: heads are left to the architecture's own function.

    The cache's type is llama.cpp's default, f16, whatever the weights are in.
    """
    hidden_size = facts.integer("embedding_length")
    config: Config = {
        "model_type": model_type, "num_hidden_layers": facts.num_layers, "hidden_size": hidden_size,
        "max_position_embeddings": facts.optional("context_length") or None, "torch_dtype": "float16",
    }  # fmt: skip
    theta = facts.number("rope.freq_base")
    if theta is not None:
        config["rope_theta"] = theta
    heads = max(facts.by_layer("attention.head_count", 0)) if by_layer else facts.same_in_all("attention.head_count")
    if not heads:
        return config
    config["num_attention_heads"] = heads
    kv_heads = None if by_layer else facts.same_in_all("attention.head_count_kv", heads)
    config["num_key_value_heads"] = kv_heads
    # What llama.cpp divides out stands in files whose heads are of another width.
    derived = hidden_size // heads if hidden_size % heads == 0 else None
    width = facts.optional("attention.key_length", least=1) or derived
    value = facts.optional("attention.value_length") or derived
    if width != derived or model_type not in _DERIVED_HEADS:
        config["head_dim"] = width
    if value != width:
        config["v_head_dim"] = value
    if model_type in _OWN_HEADS and kv_heads == heads:
        del config["num_key_value_heads"]
    return config


def _check_shapes(spec: ModelSpec, model: GgufModel) -> None:
    """Hold the caches against the tensors that make K, V and states; ModelError (exit 3) where they disagree."""
    tensors = {tensor.name: tensor for tensor in model.tensors}
    for name, place, size, what in expected_rows(spec):
        tensor = tensors.get(name)
        if tensor is not None and (len(tensor.shape) <= place or tensor.shape[place] != size):
            raise ModelError(
                f"{spec.name}: the metadata give {what} {size:,}, and tensor {name} has the shape "
                f"{' x '.join(map(str, tensor.shape))}"
            )


def _upper_bound(model: GgufModel, arch: str) -> ModelSpec:
    """The model as `read_upper_bound` reads a config; an architecture that is not understood as a plain decoder."""
    from kvcalc.model.upper_bound import read_upper_bound

    facts = Facts(model.metadata, arch, model.name)
    why = ""
    try:
        if arch not in known_architectures():
            raise ModelError(f"architecture {arch[:60]!a} is not known")
        config = _config(facts)
        facts.refuse_unread()
    except ModelError as error:
        why = f" ({error.message.removeprefix(f'{model.name}: ')})"
        config = shared(facts, "generic", by_layer=True)
        config["num_key_value_heads"] = max(facts.by_layer("attention.head_count_kv", config["num_attention_heads"]))
    spec = read_upper_bound(config, model.name, model.path)
    remarks = tuple(f"{remark}{why}" for remark in spec.remarks)
    return spec._replace(gguf=GgufFacts(count_weights(model, facts)), remarks=remarks)


def known_architectures() -> Mapping[str, str]:
    """Architecture -> the model_type it is read as."""
    return {**_PLAIN, **{arch: name for arch, (name, _) in _BUILDERS.items()}}
