"""Decoders that differ from a plain one in one respect. Their weights are not counted."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.families.common import grouped_shape
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.reader import MAX_LAYERS, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.type_tables import defaults_of

_KINDS_GPT_NEO = ("global", "local")


def read_gpt_neo(config: ConfigReader, model_type: str) -> ModelSpec:
    """GPT-Neo: layers with and without a window alternate, as attention_types states.

    K and V of every head, for all tokens or for the last window_size tokens (default 256).

    In local layers, Transformers also keeps all tokens and masks the older ones (see the engine's module). Source:
    GPTNeoConfig, Transformers 5.23.0.
    """
    num_layers = config.num_layers("num_layers", "num_hidden_layers")
    num_heads = config.integer("num_heads", "num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.head_dim(hidden_size, num_heads)
    shape = AttentionShape(num_heads, num_heads, head_dim, head_dim, hidden_size, output_bias=True)
    kept = {
        "global": (Attention(shape),),
        "local": (Attention(shape, config.optional_integer("window_size") or 256),),
    }
    return config.model(model_type, [kept[kind] for kind in _kinds_gpt_neo(config, num_layers)])


def _kinds_gpt_neo(config: ConfigReader, num_layers: int) -> list[str]:
    """Return the kind of every layer. attention_types repeats short lists, for example [[["global", "local"], 12]]."""
    stated = config.listed("attention_types")
    kinds: list[object] = []
    for group in [[["global", "local"], 12]] if stated is None else stated:
        if not isinstance(group, list) or len(group) != 2 or not isinstance(group[0], list):
            raise ModelError(f"{config.name}: attention_types must contain pairs of a list of kinds and a number")
        names, times = group
        if isinstance(times, bool) or not isinstance(times, int) or not 0 <= times <= num_layers:
            raise ModelError(f"{config.name}: attention_types must repeat a list at most as often as there are layers")
        kinds += [*names] * times
    found = [kind for kind in kinds if isinstance(kind, str) and kind in _KINDS_GPT_NEO]
    if not len(kinds) == len(found) == num_layers:
        raise ModelError(f"{config.name}: attention_types must name global or local for each of {num_layers} layers")
    listed = config.strings("attention_layers", num_layers, _KINDS_GPT_NEO)
    if listed not in (None, found):
        raise ModelError(f"{config.name}: attention_layers contradicts attention_types")
    return found


def read_hrm_text(config: ConfigReader, model_type: str) -> ModelSpec:
    """HRM-Text: two stacks of layers that run several times for each token, with a cache for every pass.

    A token passes the stacks H_cycles x (L_cycles + 1) times, and every pass of a layer keeps its own K and V.

    A saved config has the number of passes in num_hidden_layers and the size of a stack in num_layers_per_stack. The
    weights are not counted. Source: HrmTextConfig, Transformers 5.23.0.
    """
    config = config.with_defaults(defaults_of(model_type))
    passes = config.num_layers("num_hidden_layers")
    if not config.has("num_layers_per_stack"):
        passes *= config.integer("H_cycles", most=MAX_LAYERS) * (config.integer("L_cycles", most=MAX_LAYERS) + 1)
    shape = grouped_shape(config)
    return config.model(model_type, [(Attention(shape),)] * passes, attention=shape)


def read_jetmoe(config: ConfigReader, model_type: str) -> ModelSpec:
    """JetMoE: attention has experts too. All experts of a token share one set of K and V heads.

    K and V of num_key_value_heads heads, each kv_channels wide. Source: JetMoeAttention, Transformers 5.23.0.

    The number of query heads is num_key_value_heads * num_experts_per_tok, whatever num_attention_heads says.
    """
    config = config.with_defaults(defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    num_kv_heads = config.integer("num_key_value_heads")
    num_heads = num_kv_heads * config.integer("num_experts_per_tok")
    width = config.integer("kv_channels", "head_dim")
    shape = AttentionShape(
        num_heads, num_kv_heads, width, width, config.integer("hidden_size"), rope_dim=width,
        rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    return config.model(model_type, [(Attention(shape),)] * num_layers)


def read_modernbert(config: ConfigReader, model_type: str) -> ModelSpec:
    """ModernBERT, also as a decoder (Ettin): every third layer attends to all tokens, the others have a window.

    K and V of every head.

    A decoder's window is half of local_attention (default 128), because an encoder splits local_attention between both
    sides of a token. Source: ModernBertConfig and ModernBertDecoderConfig, Transformers 5.23.0.
    """
    decodes = model_type == "modernbert-decoder"
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.head_dim(hidden_size, num_heads)
    window = (config.optional_integer("local_attention", least=2) or 128) // 2
    if config.optional_integer("sliding_window") not in (None, window):
        raise ModelError(f"{config.name}: sliding_window is not half of local_attention")
    window = window if decodes else 2 * window + 1
    kinds = config.strings("layer_types", num_layers, ("full_attention", "sliding_attention"))
    if kinds is None:
        step = config.optional_integer("global_attn_every_n_layers") or 3
        kinds = ["sliding_attention" if number % step else "full_attention" for number in range(num_layers)]
    bias = config.boolean("attention_bias", default=False)
    shape = AttentionShape(
        num_heads, num_heads, head_dim, head_dim, hidden_size, qkv_bias=bias, output_bias=bias, rope_dim=head_dim
    )
    full, windowed = (Attention(shape),), (Attention(shape, window),)
    mixers = [full if kind == "full_attention" else windowed for kind in kinds]
    return config.model(model_type, mixers, is_encoder=not decodes)


def read_openelm(config: ConfigReader, model_type: str) -> ModelSpec:
    """OpenELM: every layer has its own number of heads and of KV heads.

    K and V of num_kv_heads heads, listed per layer. Source: modeling_openelm.py of apple/OpenELM-3B."""
    num_layers = config.num_layers("num_transformer_layers")
    head_dim = config.integer("head_dim")
    query_heads, kv_heads = (_by_layer(config, key, num_layers) for key in ("num_query_heads", "num_kv_heads"))
    width, theta = config.integer("model_dim"), config.number("rope_freq_constant", default=10_000.0)

    def attention(heads: int, kept: int) -> tuple[Attention]:
        kept = config.check_groups(heads, kept)
        return (Attention(AttentionShape(heads, kept, head_dim, head_dim, width, rope_dim=head_dim, rope_theta=theta)),)

    made = {pair: attention(*pair) for pair in dict.fromkeys(zip(query_heads, kv_heads))}
    mixers = [made[pair] for pair in zip(query_heads, kv_heads)]
    return config.model(model_type, mixers, positions=("max_context_length",))


def _by_layer(config: ConfigReader, key: str, num_layers: int) -> list[int]:
    listed = config.integers(key, least=1)
    if len(listed) != num_layers:
        raise config.error(f"{key} must be a list of {num_layers}, one per layer")
    return listed


def read_plamo3(config: ConfigReader, model_type: str) -> ModelSpec:
    """PLaMo 3: seven of eight layers have a window.

    Every sliding_window_pattern-th layer keeps all tokens, and the others keep window_size tokens.

    Older configs state the window in sliding_window, for all layers or with null in the layers without one. The weights
    are not counted. Source: Plamo3Config, published with pfnet's PLaMo 3; Plamo3AttentionMixer, vLLM 0.33.0.
    """
    if config.is_list("sliding_window"):
        windows = [window for window in config.items("sliding_window") if window is not None]
        if not windows or any(window != windows[0] for window in windows):
            raise config.error("sliding_window: all layers with a window must have the same one")
        config = config.with_values({"sliding_window": windows[0]})
    config = config.with_defaults(defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    window = config.optional_integer("sliding_window") or config.integer("window_size")
    full, windowed = (Attention(shape),), (Attention(shape, window),)
    step = config.integer("sliding_window_pattern")
    mixers = [full if (number + 1) % step == 0 else windowed for number in range(num_layers)]
    return config.model(model_type, mixers, attention=shape)


_KINDS_UNLIMITED_OCR = ("full_attention", "reference_sliding_attention")


def read_unlimited_ocr(config: ConfigReader, model_type: str) -> ModelSpec:
    """Unlimited-OCR: every layer keeps the whole prompt, and a window of what it generates.

    The context is counted as a prompt, so all of its tokens are kept. The weights are not counted.

    It keeps the last sliding_window generated tokens. Source: UnlimitedOcrTextConfig and
    UnlimitedOcrDynamicReferenceSlidingWindowLayer, Transformers 5.23.0.
    """
    config = config.with_defaults(defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    config.strings("layer_types", num_layers, _KINDS_UNLIMITED_OCR)
    shape = grouped_shape(config)
    return config.model(model_type, [(Attention(shape),)] * num_layers, attention=shape)


# Keys of a layer's attention that would make it keep something other than all of its K and V.
_OTHER_CACHES = (
    "sparsify",
    "window_length",
    "num_sink_tokens",
    "unshifted_sink",
    "use_prefill_window_in_sink_attention",
)


def read_nas(config: ConfigReader, model_type: str) -> ModelSpec:
    """Nemotron-NAS (Llama-3.3-Nemotron-Super and Ultra) and DeciLM: a search chose the attention of each layer.

    K and V of heads / n_heads_in_group heads. A layer with no attention, or a linear map instead, keeps nothing.

    Source: modeling_decilm.py of nvidia/Llama-3_3-Nemotron-Super-49B-v1, and of Deci/DeciLM-7B, which lists
    num_key_value_heads_per_layer instead of block_configs.
    """
    num_layers = config.num_layers("num_hidden_layers")
    plain = grouped_shape(config.without("num_key_value_heads"))
    num_heads = plain.num_heads
    counts = _kv_heads(config, num_layers, num_heads)
    kept: dict[int, tuple[Attention, ...]] = {0: ()}
    for heads in counts:
        if heads not in kept:
            kept[heads] = (Attention(plain._replace(num_kv_heads=config.check_groups(num_heads, heads))),)
    first = next((heads for heads in counts if heads), num_heads)
    return config.model(model_type, [kept[n] for n in counts], attention=plain._replace(num_kv_heads=first))


def _kv_heads(config: ConfigReader, num_layers: int, num_heads: int) -> list[int]:
    """Return the number of KV heads of every layer, 0 if it keeps nothing."""
    key = "block_configs" if config.has("block_configs") else "num_key_value_heads_per_layer"
    if config.number_of(key, 0) != num_layers:
        raise config.error(f"{key} must be a list of {num_layers}, one per layer")
    if key == "block_configs":
        return [_block_kv_heads(config, block, num_heads) for block in config.objects(key)]
    return config.integers(key, least=1)


def _block_kv_heads(config: ConfigReader, block: ConfigReader, num_heads: int) -> int:
    attention = block.nested("attention")
    if not block.has("attention"):
        raise config.error("block_configs: a layer has no attention object")
    if attention.boolean("no_op", default=False) or attention.boolean("replace_with_linear", default=False):
        return 0
    for key in _OTHER_CACHES:
        attention.refuse(key, "block_configs: the cache of this layer is not supported")
    group = attention.integer("n_heads_in_group")
    return num_heads // config.check_groups(num_heads, group)


def read_step(config: ConfigReader, model_type: str) -> ModelSpec:
    """Step 3.5, 3.7 and 5: layer_types lists the layers with a window, which have more query heads.

    All layers have the same number of KV heads. Layers with a window differ only in their number of query heads.

    layer_types may include layers for multi-token prediction, which are not part of the model that decodes.
    Source: Step3p7TextConfig, Transformers 5.23.0; for Step 5, Step5Config and Step5Attention of vLLM 0.33.0. There,
    every second layer has a window by default, the first one included. Its sparse attention is refused by its keys.
    """
    if model_type == "step5":
        config = config.with_defaults({"head_dim": config.head_dim(
            config.integer("hidden_size"), config.integer("num_attention_heads")
        ), "num_attention_groups": 8})  # fmt: skip
    if not config.mentions("num_attention_groups"):
        config = config.with_defaults({"num_key_value_heads": 8})
    config = config.with_defaults({"head_dim": 128})
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.check_groups(num_heads, config.integer("num_key_value_heads", "num_attention_groups"))
    head_dim = config.integer("head_dim")
    kinds = _kinds_step(config, model_type, num_layers)
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, config.integer("hidden_size"), rope_dim=head_dim
    )
    full = windowed = (Attention(shape),)
    sliding_heads = _sliding_heads(config, num_heads, num_kv_heads)
    if "sliding_attention" in kinds:
        windowed = (Attention(shape._replace(num_heads=sliding_heads), config.integer("sliding_window")),)
    return config.model(model_type, [full if kind == "full_attention" else windowed for kind in kinds], attention=shape)


def _kinds_step(config: ConfigReader, model_type: str, num_layers: int) -> list[str]:
    allowed = ("full_attention", "sliding_attention")
    if not config.has("layer_types"):
        if model_type == "step5" and config.is_set("sliding_window"):
            return [allowed[number % 2 == 0] for number in range(num_layers)]
        return ["full_attention"] * num_layers
    listed = len(config.items("layer_types"))
    ahead = config.optional_integer("num_nextn_predict_layers", least=0) or 0
    kinds = config.strings("layer_types", num_layers + ahead if listed != num_layers else num_layers, allowed)
    return (kinds or [])[:num_layers]


def _sliding_heads(config: ConfigReader, num_heads: int, num_kv_heads: int) -> int:
    """Return the number of query heads of the layers with a window.

    attention_other_setting may also state KV heads and a head width. They must be the same as in the other layers.
    """
    other = config.nested("attention_other_setting")
    groups, width = other.optional_integer("num_attention_groups"), other.optional_integer("head_dim")
    if groups not in (None, num_kv_heads) or width not in (None, config.integer("head_dim")):
        raise config.error("attention_other_setting changes K and V of the sliding layers: not supported")
    heads = config.optional_integer("num_sliding_attention_heads") or other.optional_integer("num_attention_heads")
    config.check_groups(heads or num_heads, num_kv_heads)
    return heads or num_heads
