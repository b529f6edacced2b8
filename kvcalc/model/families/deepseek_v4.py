"""What the rows of DeepSeek-V4 and V4.1 need besides formulas.

Every layer has a short window, and most layers also keep compressed entries of the whole context.
"""

from __future__ import annotations

from kvcalc.model.caches import CompressedAttention
from kvcalc.model.families.layer_functions import mixers_of
from kvcalc.model.families.layer_row import Row
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Flops
from kvcalc.model.tensors import Weight, norm, other, weights
from kvcalc.records import NamedTuple

_BY_RATIO = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


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
        width = 4 * max(1, self.num_heads // ranks) * self.cache.head_dim
        return ((width, width),)


def compressed(row: Row, cache: CompressedAttention, *parts: Weight | tuple[Weight, ...]) -> CompressedMixer:
    """Attention with this cache and these weights."""
    return CompressedMixer(cache, row["num_attention_heads"], weights(*parts))


def window(row: Row, rate: int = 0, index_head_dim: int = 0, index_topk: int = 0) -> CompressedAttention:
    """The cache of a layer with a window, and maybe one entry for `rate` tokens."""
    return CompressedAttention(row["sliding_window"], row["head_dim"], rate, index_head_dim, index_topk)


def entry_tokens(row: Row, key: str, kind: str, default: int) -> int:
    """The number of tokens per entry in a kind of layer: under the older key, or in compress_rates."""
    rates = row.reader.nested("compress_rates").with_defaults({kind: default})
    return row.reader.optional_integer(key) or rates.integer(kind)


def kinds_by_ratio(row: Row) -> list[str] | None:
    """The kinds by compress_ratios (0, 4 or 128), which may include layers for multi-token prediction."""
    config, num_layers = row.reader, row["num_layers"]
    must = f"must give 0, 4 or 128 for each of {num_layers} layers"
    kinds = config.chosen("compress_ratios", _BY_RATIO, must)
    if kinds is not None and len(kinds) < num_layers:
        raise config.error(f"compress_ratios {must}")
    return kinds and kinds[:num_layers]


def draft_mixers(row: Row) -> tuple[Mixer, ...]:
    """The mixers of the layer for multi-token prediction, if compress_ratios has an entry for it."""
    ahead = row.reader.integers("compress_ratios")[row["num_layers"] :]
    kind = _BY_RATIO.get(ahead[0]) if ahead else None
    return () if kind is None else mixers_of(row, kind)


def compressor(row: Row, prefix: str, head_dim: int, rate: int, overlap: int) -> tuple[Weight, ...]:
    """The weights of a compressor, which makes one entry from `rate` tokens.

    If entries overlap by half (`overlap` is 2), both halves have their own projections. The projections have 16 bits,
    although the other matrices of the layer have 8 (DeepseekCompressor, vLLM 0.33.0).
    """
    inner, width = overlap * head_dim, row["hidden_size"]
    return (
        other(f"{prefix}.kv_proj", inner, width),
        other(f"{prefix}.gate_proj", inner, width),
        norm(f"{prefix}.kv_norm", head_dim),
        other(f"{prefix}.position_bias", rate * inner),
    )


def caches_of_sources(row: Row) -> list[CompressedAttention]:
    """The cache of every layer of DeepSeek-V4.1: only `kv_source_layer_ids` keep entries and index keys.

    Later layers read them. An entry is made from as many tokens as compress_ratios says, one or two. Source:
    models/deepseek_v41/attention.py and compressor.py, vLLM 0.33.0.
    """
    config, num_layers = row.reader, row["num_layers"]
    sources = sorted(config.integers("kv_source_layer_ids", most=num_layers - 1))
    indexers = sorted(config.integers("index_source_layer_ids", most=num_layers - 1))
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
        readers, scorers = (sum(number <= layer < until for layer in layers) for layers in (compressed, indexers))
        plain = window(row, rates[number], row["index_head_dim"], row["index_topk"])
        return plain._replace(index_from_entries=True, readers=readers, scorers=scorers)

    return [of_source(number) if number in sources else window(row) for number in range(num_layers)]
