"""DeepSeek-V4: every layer has a short window, and most layers also keep compressed entries of the whole context."""

from __future__ import annotations

from kvcalc.model.caches import CompressedAttention
from kvcalc.model.experts import Experts, moe, with_defaults
from kvcalc.model.families.common import decoder_body, hyper_connection
from kvcalc.model.mixers.attention import AttentionShape, Flops
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Weight, linear, norm, other, replicated
from kvcalc.model.type_tables import defaults_of
from kvcalc.records import NamedTuple

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SPARSE: 4, _HEAVY: 128}
_BY_RATIO = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}


class CompressedMixer(NamedTuple):
    """Attention over a window and compressed entries.

    K and V of a token are one vector, which all `num_heads` heads share.
    """

    cache: CompressedAttention
    num_heads: int
    weights: tuple[Weight, ...] = ()

    @property
    def caches(self) -> tuple[CompressedAttention]:
        return (self.cache,)

    @property
    def launches(self) -> int:
        """The kernels of a decode step besides the matrices and norms, in units of a small kernel (about 2 us).

        The attention is like MLA's, and each layer mixes the residual streams before and after its two parts. Layers
        with compressed entries also compress, and sparse ones pick entries with an indexer. Source: kernel tables
        (aiconfigurator, commit 095f58a): 52 to 66 us with compression, 76 to 95 us with an indexer too, 50 us for the
        streams.
        """
        return 36 + (8 if self.cache.compress_rate else 0) + (18 if self.cache.index_head_dim else 0)

    def flops(self, ranks: int) -> tuple[Flops, ...]:
        """Return the operations for one token in the window."""
        own = 4 * max(1, self.num_heads // ranks) * self.cache.head_dim
        return ((own, own),)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V of a token are one vector, shared by all heads. compress_ratios gives the number of tokens per entry.

    Layers for multi-token prediction are not part of the model that decodes. compress_ratios may include them.
    Source: DeepSeek-V4 paper, section 2.3; DeepseekV4Attention, Transformers 5.23.0.
    """
    config = with_defaults(config, defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    num_heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
    if config.optional_integer("num_key_value_heads") not in (None, 1):
        raise config.error("num_key_value_heads is not 1: K and V are shared by all heads in this family")
    window, rates, width = config.integer("sliding_window"), _compress_rates(config), config.integer("hidden_size")
    shape = AttentionShape(
        num_heads, 1, head_dim, head_dim, width, q_lora_rank=config.optional_integer("q_lora_rank") or 0,
        rope_dim=config.optional_integer("qk_rope_head_dim") or 0,
        rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    index = config.integer("index_head_dim")
    plain, prefix = _attention(config, shape, width), "self_attn.compressor"
    caches = {
        _WINDOW: CompressedAttention(window, head_dim),
        _HEAVY: CompressedAttention(window, head_dim, rates[_HEAVY]),
        _SPARSE: CompressedAttention(window, head_dim, rates[_SPARSE], index, config.integer("index_topk")),
    }
    weights = {
        _WINDOW: plain,
        _HEAVY: (*plain, *_compressor(prefix, width, head_dim, rates[_HEAVY], 1)),
        _SPARSE: (
            *plain, *_compressor(prefix, width, head_dim, rates[_SPARSE], 2), *_indexer(config, shape, rates[_SPARSE]),
        ),
    }  # fmt: skip
    kept = {kind: (CompressedMixer(caches[kind], num_heads, weights[kind]),) for kind in caches}
    mixers = [kept[kind] for kind in _layer_kinds(config, model_type, num_layers)]
    ahead = _draft_kind(config, num_layers)
    body = (lambda: _body(config, width, num_layers)) if model_type == "deepseek_v4" else None
    spec = config.model(model_type, mixers, body, attention=shape)
    return spec if ahead is None else spec._replace(draft_mixers=kept[ahead])


def read_deepseek_v41(config: ConfigReader, model_type: str) -> ModelSpec:
    """Every layer has a window. Only `kv_source_layer_ids` keep entries and index keys, which later layers read.

    An entry is made from as many tokens as compress_ratios says, one or two. Source: models/deepseek_v41/attention.py
    and compressor.py, vLLM 0.33.0.
    """
    num_layers, num_heads = config.num_layers("num_hidden_layers"), config.integer("num_attention_heads")
    if config.optional_integer("num_key_value_heads") not in (None, 1):
        raise config.error("num_key_value_heads is not 1: K and V are shared by all heads in this family")
    head_dim, window, last = config.integer("head_dim"), config.integer("sliding_window"), num_layers - 1
    sources = sorted(config.integers("kv_source_layer_ids", most=last))
    indexers = sorted(config.integers("index_source_layer_ids", most=last))
    rates = config.integers("compress_ratios")[:num_layers]
    if len(rates) < num_layers or not {*rates} <= {0, 1, 2}:
        raise config.error(f"compress_ratios must give 0, 1 or 2 for each of {num_layers} layers")
    if not {*sources} <= {*indexers} or any(rates[number] == 0 for number in indexers):
        raise config.error("kv_source_layer_ids must be in index_source_layer_ids, and these must compress")
    compressed = [number for number, rate in enumerate(rates) if rate]
    if compressed and (not sources or compressed[0] < sources[0]):
        raise config.error("kv_source_layer_ids must have a layer before each that compresses")

    def of_source(number: int) -> CompressedAttention:
        until = next((later for later in sources if later > number), num_layers)
        readers, scorers = (sum(number <= one < until for one in layers) for layers in (compressed, indexers))
        return CompressedAttention(
            window, head_dim, rates[number], config.integer("index_head_dim"), config.integer("index_topk"), True,
            readers, scorers,
        )  # fmt: skip

    plain = CompressedAttention(window, head_dim)
    caches = [of_source(number) if number in sources else plain for number in range(num_layers)]
    shape = AttentionShape(
        num_heads, 1, head_dim, head_dim, config.integer("hidden_size"),
        q_lora_rank=config.optional_integer("q_lora_rank") or 0, rope_dim=config.integer("qk_rope_head_dim"),
    )  # fmt: skip
    spec = config.model(model_type, [(CompressedMixer(cache, num_heads),) for cache in caches], attention=shape)
    return spec._replace(draft_mixers=(CompressedMixer(plain, num_heads),))


def _body(config: ConfigReader, width: int, num_layers: int) -> Body:
    """Experts, and the weights that mix the residual streams. Source: DeepseekV4DecoderLayer, Transformers 5.23.0."""
    for key in ("attention_bias", "mlp_bias"):
        config.refuse(key, "biases of this family are not counted")
    config.integer("q_lora_rank")  # the queries are computed from it
    # The same width has two names.
    inner = config.optional_integer("moe_intermediate_size", "intermediate_size") or 2048
    sized = config.with_defaults({"moe_intermediate_size": inner})
    streams = config.integer("hc_mult")
    mlp = (
        *moe(sized, Experts("n_routed_experts", shared=True), width),
        # Manifold hyper-connections combine the streams into the input of a block and distribute its output to them.
        *hyper_connection("attn_hc", width, streams, streams * (2 + streams), 3),
        *hyper_connection("ffn_hc", width, streams, streams * (2 + streams), 3),
    )
    outer = (
        other("model.hc_head.hc_fn", streams, streams * width),
        other("model.hc_head.hc_base", streams),
        other("model.hc_head.hc_scale", 1),
    )
    return decoder_body(config, [mlp] * num_layers, *outer)


def _attention(config: ConfigReader, shape: AttentionShape, width: int) -> tuple[Weight, ...]:
    """The weights of attention. The output is projected in groups of heads, each through its own low rank."""
    heads, head_dim = shape.num_heads, shape.qk_head_dim
    rank, groups, o_rank = shape.q_lora_rank, config.integer("o_groups"), config.integer("o_lora_rank")
    return (
        replicated("self_attn.q_a_proj", width, rank),
        norm("self_attn.q_a_norm", rank),
        linear("self_attn.q_b_proj", rank, heads * head_dim),
        replicated("self_attn.kv_proj", width, head_dim),
        norm("self_attn.kv_norm", head_dim),
        linear("self_attn.o_a_proj", heads * head_dim // groups, groups * o_rank),
        linear("self_attn.o_b_proj", groups * o_rank, width),
        other("self_attn.sinks", heads),
    )


def _compressor(prefix: str, width: int, head_dim: int, rate: int, overlap: int) -> tuple[Weight, ...]:
    """The weights of a compressor, which makes one entry from `rate` tokens.

    If entries overlap by half (`overlap` is 2), both halves have their own projections. The projections have 16 bits,
    although the other matrices of the layer have 8 (DeepseekCompressor, vLLM 0.33.0).
    """
    inner = overlap * head_dim
    return (
        other(f"{prefix}.kv_proj", inner, width),
        other(f"{prefix}.gate_proj", inner, width),
        norm(f"{prefix}.kv_norm", head_dim),
        other(f"{prefix}.position_bias", rate * inner),
    )


def _indexer(config: ConfigReader, shape: AttentionShape, rate: int) -> tuple[Weight, ...]:
    width = shape.hidden_size or 0
    heads, head_dim = config.integer("index_n_heads"), config.integer("index_head_dim")
    prefix = "self_attn.compressor.indexer"
    return (
        *_compressor(prefix, width, head_dim, rate, 2),
        replicated(f"{prefix}.q_b_proj", shape.q_lora_rank, heads * head_dim),
        other(f"{prefix}.scorer.weights_proj", heads, width),
    )


def _draft_kind(config: ConfigReader, num_layers: int) -> str | None:
    """Return the kind of the layer for multi-token prediction, if compress_ratios has an entry for it."""
    ratios = config.integers("compress_ratios")
    return _BY_RATIO.get(ratios[num_layers]) if len(ratios) > num_layers else None


def _compress_rates(config: ConfigReader) -> dict[str, int]:
    """Return the number of tokens per entry for each kind of layer: from compress_rates, or from the older keys."""
    rates = config.nested("compress_rates").with_defaults(_RATES)
    return {
        _SPARSE: config.optional_integer("compress_rate_csa") or rates.integer(_SPARSE),
        _HEAVY: config.optional_integer("compress_rate_hca") or rates.integer(_HEAVY),
    }


def _layer_kinds(config: ConfigReader, model_type: str, num_layers: int) -> list[str]:
    """Return the kind of every layer: by layer_types, by compress_ratios (0, 4 or 128), or as in V4-Pro."""
    kinds = config.strings("layer_types", num_layers, tuple(_BY_RATIO.values()))
    if kinds is not None:
        return kinds
    must = f"must give 0, 4 or 128 for each of {num_layers} layers"
    kinds = config.chosen("compress_ratios", _BY_RATIO, must)
    if kinds is None and model_type != "deepseek_v4":
        raise config.error("compress_ratios is missing")
    if kinds is None:
        return [_HEAVY if number < 2 or number % 2 else _SPARSE for number in range(num_layers)]
    if len(kinds) < num_layers:
        raise config.error(f"compress_ratios {must}")
    return kinds[:num_layers]
