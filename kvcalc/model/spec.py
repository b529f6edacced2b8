"""What a model is, as far as its cache, its attention modules and their weights are concerned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import lcm
from typing import NamedTuple

from kvcalc.model.caches import HEADS_CACHES, Cache, CompressedAttention, CrossAttention, LatentAttention
from kvcalc.model.memo import remembered


class LayerGroup(NamedTuple):
    """A run of consecutive layers, `first` to `last` inclusive (from 0), which hold the same caches each.

    `caches` is empty where a layer keeps nothing: it shares an earlier layer's cache, or has no attention.
    """

    first: int
    last: int
    caches: tuple[Cache, ...]

    @property
    def num_layers(self) -> int:
        return self.last - self.first + 1


class AttentionShape(NamedTuple):
    """The dimensions of the attention modules themselves, the same in every attention layer.

    `qk_head_dim` is the width of a query head and of a key head as attention sees them; with MLA it is
    qk_nope_head_dim + qk_rope_head_dim. `kv_lora_rank` is 0 where there is no latent, `q_lora_rank` 0 where the query
    is not compressed. `rope_dim` counts the rotated dimensions of a head, 0 where positions are added elsewhere.
    """

    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    hidden_size: int | None
    qkv_bias: bool = False
    output_bias: bool = False
    rope_dim: int = 0
    rope_theta: float = 10_000.0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope_head_dim: int = 0

    @property
    def is_latent(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def qk_nope_head_dim(self) -> int:
        return self.qk_head_dim - self.qk_rope_head_dim

    @property
    def kind(self) -> str:
        """`mla`, or by the number of KV heads `mha`, `mqa` or `gqa`."""
        if self.is_latent:
            return "mla"
        if self.num_kv_heads == self.num_heads:
            return "mha"
        return "mqa" if self.num_kv_heads == 1 else "gqa"


class FileWeights(NamedTuple):
    """Parameters and bytes as a weights file's own header gives them. `dtype` is what the file calls its type."""

    parameters: int
    active_parameters_per_token: int
    input_embedding_parameters: int
    bytes: int
    active_bytes_per_token: int
    dtype: str


class GgufFacts(NamedTuple):
    """What a GGUF file says beside the model: `weights`, None where they are not all there.

    `expands_latent`: llama.cpp keeps K and V of every head of this MLA file, and not the latent.
    """

    weights: FileWeights | None
    expands_latent: bool = False


class ModelSpec(NamedTuple):
    """A model, read from a preset, a config.json or flags.

    `torch_dtype` is the config's own, None where it names none. `is_encoder`: it never decodes, so no engine keeps its
    K and V. `config` is what it was read from, the family's defaults filled in: the weights are counted from it.
    `encoder_tokens`: the length of the encoder's output cross-attention sees where the workload does not say, None
    where it must; `has_fixed_encoder`: the workload cannot say otherwise (Whisper).
    `checkpoint` is the folder its config.json was read from, where its weights may lie beside it, or None.
    `in_transformers`: whether Transformers has a class that reads such a config. `remarks`: what an answer must say.
    `gguf`: what the GGUF file it was read from says beside that, or None.
    """

    name: str
    source: str
    model_type: str
    attention: AttentionShape
    layers: tuple[LayerGroup, ...]
    max_position_embeddings: int | None
    torch_dtype: str | None
    is_encoder: bool = False
    config: Mapping[str, object] = {}
    encoder_tokens: int | None = None
    has_fixed_encoder: bool = False
    checkpoint: str | None = None
    in_transformers: bool = True
    remarks: tuple[str, ...] = ()
    gguf: GgufFacts | None = None

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.layers)

    def head(self, num_layers: int) -> ModelSpec:
        """The model cut to its first `num_layers` layers."""
        kept = [g._replace(last=min(g.last, num_layers - 1)) for g in self.layers if g.first < num_layers]
        return self._replace(layers=tuple(kept))


def uniform_layers(num_layers: int, *caches: Cache) -> tuple[LayerGroup, ...]:
    """Layers which all hold the same caches."""
    return (LayerGroup(0, num_layers - 1, caches),)


def group_layers(layers: Iterable[tuple[Cache, ...]]) -> tuple[LayerGroup, ...]:
    """Runs of like layers, from the caches of every layer in order."""
    groups: list[LayerGroup] = []
    for number, caches in enumerate(layers):
        last = groups[-1] if groups else None
        if last is not None and last.caches == caches and [*map(type, last.caches)] == [*map(type, caches)]:
            groups[-1] = last._replace(last=number)
        else:
            groups.append(LayerGroup(number, number, caches))
    return tuple(groups)


def map_caches(spec: ModelSpec, change: Callable[[Cache], Cache]) -> ModelSpec:
    """`spec` with `change` applied to every cache of every layer."""
    groups = (group._replace(caches=tuple(map(change, group.caches))) for group in spec.layers)
    return spec._replace(layers=tuple(groups))


def distinct_caches(spec: ModelSpec) -> list[tuple[Cache, int]]:
    """Every cache that stands in a model once, in the order of layers, with the number of its layers."""
    found: dict[tuple[type[Cache], Cache], int] = {}
    for group in spec.layers:
        for cache in group.caches:
            key = (type(cache), cache)
            found[key] = found.get(key, 0) + group.num_layers
    return [(cache, num_layers) for (_, cache), num_layers in found.items()]


def kv_head_counts(spec: ModelSpec) -> list[int]:
    """The distinct numbers of KV heads of a model's layers, smallest first; empty where none keeps K and V by head."""
    return sorted({cache.num_kv_heads for cache in all_caches(spec) if isinstance(cache, HEADS_CACHES)})


def windows(spec: ModelSpec) -> list[int]:
    """The distinct attention windows of a model, in tokens, smallest first; empty where every layer sees all."""
    return sorted({cache.window for cache in all_caches(spec) if cache.window is not None})


def latent_of(spec: ModelSpec) -> LatentAttention | None:
    """The latent cache of an MLA model, or None."""
    return next((cache for cache in all_caches(spec) if isinstance(cache, LatentAttention)), None)


def all_caches(spec: ModelSpec) -> list[Cache]:
    """The caches of every run of layers, in order."""
    return [cache for group in spec.layers for cache in group.caches]


def has_cross_attention(spec: ModelSpec) -> bool:
    """Whether any layer keeps K and V of an encoder's output."""
    return any(isinstance(cache, CrossAttention) for cache in all_caches(spec))


@remembered
def period(spec: ModelSpec) -> int:
    """After how many tokens the cache's growth repeats itself: 1, or the least common multiple of compression rates."""
    rates = (cache.compress_rate for cache in all_caches(spec) if isinstance(cache, CompressedAttention))
    return lcm(*(rate for rate in rates if rate))
