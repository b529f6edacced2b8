"""Decoders that differ from a plain one in one respect."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.experts import Experts, choose, moe, sparse_layers
from kvcalc.model.families.common import decoder_body, grouped_shape
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.reader import MAX_LAYERS, Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import around, gated_mlp, lookup, norm, plain_mlp
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
    mixers = [kept[kind] for kind in _kinds_gpt_neo(config, num_layers)]
    return config.model(model_type, mixers, lambda: _body_of_gpt_neo(config, hidden_size, num_layers))


def _body_of_gpt_neo(config: ConfigReader, width: int, num_layers: int) -> Body:
    """Source: GPTNeoBlock and GPTNeoModel, Transformers 5.23.0."""
    inner = config.optional_integer("intermediate_size") or 4 * width
    outer = (
        norm("transformer.ln_f", width, bias=True),
        lookup("transformer.wpe", config.optional_integer("max_position_embeddings") or 2048, width),
    )
    tied = config.boolean("tie_word_embeddings", default=True)
    outside = around(
        config.optional_integer("vocab_size") or 50257, width, tied, *outer, embedding="transformer.wte",
        prefix="transformer.h.{}.",
    )  # fmt: skip
    mlp = plain_mlp("mlp.c_fc", "mlp.c_proj", width, inner, bias=True)
    return Body(outside, [mlp] * num_layers, (norm("ln_1", width, bias=True), norm("ln_2", width, bias=True)))


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


# The key that says how often the layers of a looped decoder run for each token.
_LOOPS = {"iquestloopcoder": "loop_num", "nanbeige": "num_loops", "ouro": "total_ut_steps"}


def read_looped(config: ConfigReader, model_type: str) -> ModelSpec:
    """Nanbeige, Ouro and IQuest-Loop-Coder: all layers run several times for each token, and each time keep K and V.

    After its first pass, a layer of IQuest-Loop-Coder attends to the last loop_window_size tokens (default 64). The
    weights are not counted. Source: NanbeigeAttention, SGLang 0.5.23; LoopCoderAttention, vLLM 0.33.0; OuroAttention,
    vLLM 0.26.
    """
    num_layers = config.num_layers("num_hidden_layers")
    later = config.integer(_LOOPS[model_type], most=MAX_LAYERS) - 1
    shape = grouped_shape(config)
    window = (config.optional_integer("loop_window_size") or 64) if model_type == "iquestloopcoder" else None
    again = Attention(shape) if window is None else Attention(shape, window)
    mixers = [(Attention(shape),)] * num_layers + [(again,)] * (later * num_layers)
    return config.model(model_type, mixers, attention=shape)


def read_dory(config: ConfigReader, model_type: str) -> ModelSpec:
    """Dory: a layer has attention, attention with a window, or an MLP. The layers in the middle may run several times.

    Each time, they keep their own K and V, or with recurrent_kv_cache_mode last_loop those of the last time. Released
    configs list the layers. The weights are not counted. Source: DoryConfig and DoryModel, Transformers 5.24.0.
    """
    config = config.with_defaults(defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    kinds = config.strings("layer_types", num_layers, ("full_attention", "sliding_attention", "mlp"))
    if kinds is None:
        raise ModelError(f"{config.name}: layer_types is missing, and the classes disagree about what it means")
    shape = grouped_shape(config)
    kept: dict[str, tuple[Mixer, ...]] = {
        "mlp": (),
        "full_attention": (Attention(shape),),
        "sliding_attention": (Attention(shape, config.integer("sliding_window")),),
    }
    first, last = config.integer("n_input_layers", least=0), config.integer("n_output_layers", least=0)
    is_once = config.is_any("recurrent_kv_cache_mode", "last_loop")
    again = 0 if is_once else config.integer("n_recurrent_loops", most=MAX_LAYERS) - 1
    repeated = [kind for kind in kinds[first : num_layers - last] if kind != "mlp"] * again
    return config.model(model_type, [kept[kind] for kind in (*kinds, *repeated)], attention=shape)


def read_domynedge(config: ConfigReader, model_type: str) -> ModelSpec:
    """Domyn Edge: each layer has a head width and a window of its own.

    A window of w in window_sizes is w tokens before a token. The weights are not counted. Source: DomynEdgeAttention,
    vLLM 0.33.0; DomynEdgeConfig of its own vLLM plugin, which lists the widths as head_sizes.
    """
    num_layers = config.num_layers("num_hidden_layers")
    stated, windows = config.per_layer(num_layers), config.items("window_sizes")
    own = config.optional_integer("head_dim")
    widths = [layer.get("head_dim", own) for layer in stated] if stated else config.integers("head_sizes", least=1)
    firsts = [pair[0] if isinstance(pair, list) and pair else None for pair in windows]
    if not len(widths) == len(firsts) == num_layers:
        raise config.error(f"the widths and window_sizes must list {num_layers} layers")
    mixers = []
    for width, window in zip(widths, firsts):
        if not isinstance(width, int) or not isinstance(window, int):
            raise config.error("the widths of heads and the windows must be numbers")
        mixers.append((Attention(grouped_shape(config, head_dim=width), window + 1 if window > 0 else None),))
    return config.model(model_type, mixers)


def read_iquest_q1(config: ConfigReader, model_type: str) -> ModelSpec:
    """IQuest-Q1: some first layers, a block of layers that repeats, and some last layers, with or without a window.

    The weights are not counted. Source: IQuestQ1Config, SGLang 0.5.23.
    """
    config = config.with_defaults(defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    full = (Attention(shape),)
    if not all(config.boolean(key, default=True) for key in ("use_hybrid_layers", "use_sliding_window")):
        return config.model(model_type, [full] * num_layers, attention=shape)
    times = config.integer("num_hybrid_layers_block", most=MAX_LAYERS)
    parts = [config.items(key) for key in ("first_layers_types", "hybrid_layers_types_block", "last_layers_types")]
    kinds = [*parts[0], *parts[1] * times, *parts[2]]
    if len(kinds) != num_layers or not {"full_attention", "sliding_attention"}.issuperset(map(str, kinds)):
        raise config.error(f"the lists of layer types must name {num_layers} layers with or without a window")
    slides = (Attention(shape, config.integer("sliding_window")),)
    return config.model(model_type, [full if kind == "full_attention" else slides for kind in kinds], attention=shape)


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

    The context is counted as a prompt, so all of its tokens are kept.

    It keeps the last sliding_window generated tokens. Source: UnlimitedOcrTextConfig and
    UnlimitedOcrDynamicReferenceSlidingWindowLayer, Transformers 5.23.0.
    """
    config = config.with_defaults(defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    config.strings("layer_types", num_layers, _KINDS_UNLIMITED_OCR)
    shape = grouped_shape(config)

    def body() -> Body:
        """Source: UnlimitedOcrTextDecoderLayer, Transformers 5.23.0."""
        width = config.integer("hidden_size")
        rule = Experts("n_routed_experts", layers="listed", shared=True)
        dense = gated_mlp("mlp", width, config.integer("intermediate_size"))
        mlps = choose(num_layers, sparse_layers(config, rule, num_layers), moe(config, rule, width), dense)
        return decoder_body(config, mlps)

    return config.model(model_type, [(Attention(shape),)] * num_layers, body, attention=shape)
