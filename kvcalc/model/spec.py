"""The description of a model: its layers, with their caches, attention modules and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import lcm

from kvcalc.model.caches import (
    HEADS_CACHES,
    Cache,
    CompressedAttention,
    CrossAttention,
    IndexerKeys,
    LatentAttention,
    RecurrentState,
)
from kvcalc.model.layers import Layer, LayerGroup, Mixer, weights_of_layers
from kvcalc.model.memo import remembered
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.tensors import Around, Block, ModelWeights
from kvcalc.records import NamedTuple

ORIGINAL = "original_max_position_embeddings"
# Kinds of rotation whose factor max_position_embeddings already has in it.
_ALREADY_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "telechat3-yarn")
_OF_ROTATION = ("rope_parameters", "rope_scaling")


class FileBytes(NamedTuple):
    """Where the bytes of a weights file belong.

    `layers` has the bytes of every layer without its routed experts, and those of the experts. `input` are the tables
    that a token looks up, `tied_head` is the input embedding if it is also the output head, else 0, and `output` are
    all other tensors outside the layers.
    """

    layers: tuple[tuple[int, int], ...]
    input: int
    output: int
    tied_head: int


class FileWeights(NamedTuple):
    """Parameters and bytes as stated in the header of a weights file. `dtype` is the file's own name for its type.

    `parts` divides `bytes` among the layers; None if that is not known.
    """

    parameters: int
    active_parameters_per_token: int
    input_embedding_parameters: int
    bytes: int
    active_bytes_per_token: int
    dtype: str
    parts: FileBytes | None = None


class GgufFacts(NamedTuple):
    """Facts from a GGUF file that are not part of the model's config.

    `weights` is None if some of the tensors are missing. `expands_latent`: for this MLA file, llama.cpp keeps K and V
    of every head instead of the latent.
    """

    weights: FileWeights | None
    expands_latent: bool = False


class NamedFile(NamedTuple):
    """What is known of the GGUF file that a model's name stands for (`gguf` in presets/types/names.yaml).

    `has_draft_layers`: it holds the model's layers for multi-token prediction. `expands_latent` is as in `GgufFacts`.
    `size_range`: its publisher chooses the types of its tensors, so its size is a multiple of a plain file's,
    and the ends of its 80 % range are multiples too.
    """

    has_draft_layers: bool
    expands_latent: bool
    size_range: tuple[float, float, float] | None = None


class ModelSpec(NamedTuple):
    """A model, read from a preset, a config.json, a GGUF file or flags.

    `attention` is the shape of most of the attention modules; each layer's mixers have their own shape. `torch_dtype`
    is the dtype in the config, or None if the config does not name one. `is_encoder`: the model never decodes, so no
    engine keeps its K and V. `is_bidirectional`: the config of a decoder says so (is_causal: false), and an engine
    whose class for it reads that keeps none either (`Engine.kept`).
    `encoder_tokens` is the length of the encoder's output if the workload does not give one; None means that the
    workload must give it. `has_fixed_encoder`: the workload cannot change that length (Whisper).
    `around` holds the weights outside the layers. It is None if the model's weights are not counted, and
    `weights_reason` says why.
    `quantization` is the config's quantization_config, and `expert_dtype` the type that the config names separately
    for experts.
    `num_draft_layers` is the number of layers for multi-token prediction (MTP), which speculative decoding runs.
    `draft_mixers` are the mixers of such a layer if the config describes them; else it is like the model's own layers.
    `first_draft_layer` is set if tokens are drafted: the layers from this number on belong to what drafts them, and not
    to the model (`kvcalc.model.drafting`).
    `state_dtype` is the type that the config names for recurrent states (for example float32). `stated` holds the
    published keys that an engine or its converter reads by its own rules; families.yaml lists them by model type.
    `checkpoint` is the folder of the config.json, which may also hold the weights, or None. `in_transformers` is
    whether Transformers has a class that reads such a config, and `as_transformers` is the model that this class makes
    of it, or None if it is the same. `with_its_classes` says who runs that model too: "transformers", with its models,
    and "config", who reads configs through its classes. `remarks` are sentences that an answer must include.
    `gguf` holds further facts if the model was read from a GGUF file, else None. `whole` is the complete model if this
    is one pipeline stage: an engine lays out a stage by properties of all layers (the widest window, the widest layer).
    `reference` is MODEL as the user typed it (for a Hub id its publisher's spelling, without `hf:`), or empty if the
    model was not loaded by a name or a path.
    `named_dtype` is the type of the weights that the model's name says, as in --dtype: `gguf:q8_0` is that file type of
    llama.cpp. None if the name says none, or if `quantization` has it. `named_file` is set if the name stands for such
    a file.
    `multimodal` is the published config if it describes vision or audio towers (`kvcalc.model.towers`), else None.
    `has_unknown_tower` is whether the checkpoint has a tower that nothing describes: a preset has `tower: unknown`, or
    the config of a model around a language model has only that language model.
    `published_bytes` is the size of a quantized release's weights with its towers, if somebody published it, and
    `has_unread_recipe` whether the release may leave modules in 16 bits that its recipe does not name.
    """

    name: str
    source: str
    model_type: str
    attention: AttentionShape
    layers: tuple[LayerGroup, ...]
    max_position_embeddings: int | None
    torch_dtype: str | None
    is_encoder: bool = False
    is_bidirectional: bool = False
    encoder_tokens: int | None = None
    has_fixed_encoder: bool = False
    around: Around | None = None
    weights_reason: str | None = None
    quantization: object = None
    expert_dtype: object = None
    num_draft_layers: int | None = None
    draft_mixers: tuple[Mixer, ...] = ()
    first_draft_layer: int | None = None
    state_dtype: str | None = None
    stated: Mapping[str, object] = {}
    checkpoint: str | None = None
    in_transformers: bool = True
    as_transformers: ModelSpec | None = None
    with_its_classes: tuple[str, ...] = ("transformers",)
    remarks: tuple[str, ...] = ()
    gguf: GgufFacts | None = None
    whole: ModelSpec | None = None
    reference: str = ""
    named_dtype: str | None = None
    named_file: NamedFile | None = None
    multimodal: Mapping[str, object] | None = None
    has_unknown_tower: bool = False
    published_bytes: int | None = None
    has_unread_recipe: bool = False

    @property
    def has_towers(self) -> bool:
        """Whether the model has a vision or audio tower, described or not."""
        return self.multimodal is not None or self.has_unknown_tower

    @property
    def expands_latent(self) -> bool:
        """Whether its GGUF file, read or named, makes llama.cpp keep K and V of every head instead of the latent."""
        facts = self.gguf or self.named_file
        return facts is not None and facts.expands_latent

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.layers)

    @property
    def rotations(self) -> list[Mapping[str, object]]:
        """What the config says about the rotation: one mapping for all layers, or one for each type of layer."""
        stated = self.stated.get("rope_parameters") or self.stated.get("rope_scaling")
        if not isinstance(stated, Mapping):
            return []
        return [each for each in stated.values() if isinstance(each, Mapping)] or [stated]

    @property
    def longest_context(self) -> int | None:
        """max_position_embeddings times the factor of linear or dynamic scaling, as servers derive it, or None.

        Other kinds are counted in max_position_embeddings, and Gemma 3's factor is too. Source:
        _get_and_verify_max_len (config/model.py, vLLM 0.33.0), get_context_length (utils/hf_transformers/common.py,
        SGLang 0.5.23) and _infer_max_seq_len_from_config (TensorRT-LLM, _torch/pyexecutor/model_engine.py).
        """
        factors = [r.get("factor") for r in self.rotations if rotation_type(r) not in _ALREADY_SCALED]
        factor = next((f for f in reversed(factors) if isinstance(f, (int, float))), 1)
        if self.max_position_embeddings is None or self.model_type.startswith("gemma3"):
            return self.max_position_embeddings
        return int(self.max_position_embeddings * factor)

    def head(self, num_layers: int) -> ModelSpec:
        """Return the model cut to its first `num_layers` layers."""
        kept = [g._replace(last=min(g.last, num_layers - 1)) for g in self.layers if g.first < num_layers]
        return self._replace(layers=tuple(kept))


@remembered
def weights_of(spec: ModelSpec) -> ModelWeights | None:
    """Return all weights of the language model, or None if they are not counted (see `ModelSpec.weights_reason`)."""
    return None if spec.around is None else weights_of_layers(spec.layers, spec.around)


def blocks_of(spec: ModelSpec) -> tuple[Block, ...]:
    """Return the blocks of all weights, and none if they are not counted."""
    weights = weights_of(spec)
    return () if weights is None else weights.blocks


def map_caches(spec: ModelSpec, change: Callable[[Cache], Cache]) -> ModelSpec:
    """Return `spec` with `change` applied to every cache of every layer."""
    groups = (group._replace(caches=tuple(map(change, group.caches))) for group in spec.layers)
    return spec._replace(layers=tuple(groups))


def map_attention(spec: ModelSpec, change: Callable[[Attention], Attention]) -> ModelSpec:
    """Return `spec` with `change` applied to every attention module.

    The caches do not change, because they may already be bound to a workload.
    """
    changed: dict[int, Layer] = {}
    groups = []
    for group in spec.layers:
        layer = changed.get(id(group.layer))
        if layer is None:
            mixers = (change(mixer) if isinstance(mixer, Attention) else mixer for mixer in group.layer.mixers)
            layer = changed[id(group.layer)] = group.layer._replace(mixers=tuple(mixers))
        groups.append(group._replace(layer=layer))
    return spec._replace(layers=tuple(groups))


def distinct_caches(spec: ModelSpec) -> list[tuple[Cache, int]]:
    """Return each distinct cache of a model once, in layer order, with the number of layers that have it."""
    counts: dict[tuple[type[Cache], Cache], int] = {}
    for group in spec.layers:
        for cache in group.caches:
            key = (type(cache), cache)
            counts[key] = counts.get(key, 0) + group.num_layers
    return [(cache, num_layers) for (_, cache), num_layers in counts.items()]


@remembered
def cache_runs(spec: ModelSpec) -> list[tuple[int, int, tuple[Cache, ...]]]:
    """Return the runs of layers with the same caches, whatever their MLPs: first layer, last layer and caches.

    Layers that draft tokens are runs of their own.
    """
    runs: list[tuple[int, int, tuple[Cache, ...]]] = []
    for group in spec.layers:
        is_alike = runs and group.first != spec.first_draft_layer
        if is_alike and runs[-1][2] == group.caches and [*map(type, runs[-1][2])] == [*map(type, group.caches)]:
            runs[-1] = (runs[-1][0], group.last, group.caches)
        else:
            runs.append((group.first, group.last, group.caches))
    return runs


def kv_head_counts(spec: ModelSpec) -> list[int]:
    """Return the distinct numbers of KV heads in a model, smallest first; empty if no layer keeps K and V per head."""
    return sorted({cache.num_kv_heads for cache in all_caches(spec) if isinstance(cache, HEADS_CACHES)})


def windows(spec: ModelSpec) -> list[int]:
    """Return the distinct attention windows in tokens, smallest first; empty if every layer attends to all tokens."""
    return sorted({cache.window for cache in all_caches(spec) if cache.window is not None})


def latent_of(spec: ModelSpec) -> LatentAttention | None:
    """Return the latent cache of an MLA model, or None."""
    return next((cache for cache in all_caches(spec) if isinstance(cache, LatentAttention)), None)


def rotation_type(rotation: Mapping[str, object]) -> str:
    """The kind of a rotation (rope_type, or `type` in older configs)."""
    return str(rotation.get("rope_type", rotation.get("type", "default")))


def with_config(spec: ModelSpec, changes: Mapping[str, object]) -> ModelSpec:
    """The model with other values for the keys of its config that describe its positions. Other keys are left out."""
    if not changes:
        return spec
    replaced = _OF_ROTATION if any(key in changes for key in _OF_ROTATION) else ()
    stated = {key: value for key, value in spec.stated.items() if key not in replaced}
    stated |= {key: changes[key] for key in (*_OF_ROTATION, ORIGINAL) if key in changes}
    positions = changes.get("max_position_embeddings", spec.max_position_embeddings)
    return spec._replace(
        stated=stated, max_position_embeddings=positions if isinstance(positions, int) else spec.max_position_embeddings
    )


def is_sparse(spec: ModelSpec) -> bool:
    """Whether attention over a latent chooses the rows that it reads by index keys (DeepSeek-V3.2, GLM-5)."""
    kinds = {type(cache) for cache in all_caches(spec)}
    return IndexerKeys in kinds and LatentAttention in kinds


def has_compressed(spec: ModelSpec) -> bool:
    """Whether a layer keeps compressed entries beside its window (DeepSeek-V4)."""
    return any(isinstance(cache, CompressedAttention) for cache in all_caches(spec))


def all_caches(spec: ModelSpec) -> list[Cache]:
    """Return the caches of every run of layers, in order."""
    return [cache for group in spec.layers for cache in group.caches]


@remembered
def has_states(spec: ModelSpec) -> bool:
    """Return whether any layer keeps a recurrent state."""
    return any(isinstance(cache, RecurrentState) for cache in all_caches(spec))


@remembered
def has_cross_attention(spec: ModelSpec) -> bool:
    """Return whether any layer keeps K and V of an encoder's output."""
    return any(isinstance(cache, CrossAttention) for cache in all_caches(spec))


@remembered
def period(spec: ModelSpec) -> int:
    """Return the number of tokens after which the growth of the cache repeats.

    This is the least common multiple of the compression rates, or 1 if there are none.
    """
    return lcm(*_compress_rates(spec))


def largest_at(spec: ModelSpec, tokens: int) -> set[int]:
    """Return the lengths up to `tokens` of which one has the largest cache.

    These are `tokens`, and the last lengths at which the buffers of compressors are full: they are empty one token
    later.
    """
    return {tokens, *(last for rate in _compress_rates(spec) if (last := tokens // rate * rate - 1) > 0)}


def _compress_rates(spec: ModelSpec) -> set[int]:
    rates = {cache.compress_rate for cache in all_caches(spec) if isinstance(cache, CompressedAttention)}
    return rates - {0}
