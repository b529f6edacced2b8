"""The weights of a GGUF file: parameters and bytes, from the description of the tensors in the header."""

from __future__ import annotations

from collections.abc import Iterator

from kvcalc.model.caches import HEADS_CACHES, CrossAttention, IndexerKeys, LatentAttention, RecurrentState
from kvcalc.model.gguf.file import Tensor, package
from kvcalc.model.gguf.files import GgufModel
from kvcalc.model.gguf.keys import Facts
from kvcalc.model.spec import FileBytes, FileWeights, ModelSpec

# Position tables that the converter computes from the config. They are not parameters of the model.
_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
# Tables from which a token reads one row.
_LOOKED_UP = ("position_embd.weight", "token_types.weight", "per_layer_token_embd.weight")
_FLOATS = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
# A flag in file_type: a tool guessed the type (LLAMA_FTYPE_GUESSED).
_GUESSED = 1024


def count_weights(model: GgufModel, facts: Facts) -> FileWeights | None:
    """Count parameters and bytes. Return None if the file has no tensors or if a shard is missing.

    The bytes are those of all tensors, without the padding between them. The parameters are those of the model that
    decodes, each counted once: tables of rotary positions and layers for multi-token prediction are left out. A step
    for one token reads only the experts that the token is routed to and only the rows of the embeddings that it looks
    up. In an encoder-decoder model it reads only the decoder.
    """
    if model.missing or not model.tensors:
        return None
    names = {tensor.name for tensor in model.tensors}
    tied = _HEAD not in names and not any(name.startswith("token_types") for name in names)
    experts = facts.optional("expert_count") or 0
    used = facts.by_layer("expert_used_count", 0) if experts else []
    total = active = stored = active_bytes = embedding = 0
    parts = _divide(model, experts, tied)
    for tensor in model.tensors:
        stored += tensor.bytes
        layer = _layer_of(tensor.name)
        if tensor.name in _TABLES or (layer is not None and layer >= facts.num_layers and tensor.name[:3] == "blk"):
            continue
        total += tensor.elements
        if tensor.name == _EMBEDDING:
            embedding = tensor.elements
        if not _is_read(tensor.name, tied):
            continue
        numerator, denominator = 1, 1
        if experts and layer is not None and layer < len(used) and _is_experts(tensor, experts):
            numerator, denominator = min(used[layer], experts), experts
        active += tensor.elements * numerator // denominator
        active_bytes += tensor.bytes * numerator // denominator
    return FileWeights(total, active, embedding, stored, active_bytes, _type_name(model), parts)


def _divide(model: GgufModel, experts: int, tied: bool) -> FileBytes | None:
    """The bytes of every layer, with the layers for multi-token prediction last, and of the tensors outside them.

    None for an encoder-decoder model.
    """
    layers: dict[int, list[int]] = {}
    looked_up = output = head = 0
    for tensor in model.tensors:
        layer = _layer_of(tensor.name)
        if layer is not None and tensor.name[:3] != "blk":
            return None
        if layer is not None:
            layers.setdefault(layer, [0, 0])[bool(experts and _is_experts(tensor, experts))] += tensor.bytes
        elif tensor.name == _EMBEDDING or tensor.name in _LOOKED_UP:
            looked_up += tensor.bytes
            head += tensor.bytes if tied and tensor.name == _EMBEDDING else 0
        else:
            output += tensor.bytes
    each_layer = [layers.get(number, (0, 0)) for number in range(max(layers, default=-1) + 1)]
    return FileBytes(tuple((other, routed) for other, routed in each_layer), looked_up, output, head)


def _is_read(name: str, tied: bool) -> bool:
    if name in _LOOKED_UP or name.startswith("enc."):
        return False
    # The projections of the encoder's output run only once, before the first step.
    if ".cross_attn_k." in name or ".cross_attn_v." in name:
        return False
    return tied if name == _EMBEDDING else True


def _is_experts(tensor: Tensor, experts: int) -> bool:
    """Return whether a tensor holds experts.

    All experts of a layer are in one tensor, along its last dimension. Old files have one tensor per expert.
    """
    parts = tensor.name.split(".")
    if "_exps" in tensor.name:
        return tensor.shape[-1] == experts
    return len(parts) == 5 and parts[2] in ("ffn_gate", "ffn_up", "ffn_down") and parts[3].isdecimal()


def _layer_of(name: str) -> int | None:
    """Return the number of the layer in blk.N.…, dec.blk.N.… and enc.blk.N.…, or None."""
    place = name.partition("blk.")[2].partition(".")[0]
    return int(place) if place.isdecimal() and len(place) < 6 else None


def _type_name(model: GgufModel) -> str:
    """Return the file's own name for its type (q4_k_m). If it has none, return the type of most of its bytes."""
    stated = model.metadata.get("general.file_type")
    kinds: dict[int, str] = {kind.value: kind.name for kind in package(model.path).LlamaFileType}
    if isinstance(stated, int) and not isinstance(stated, bool) and stated & ~_GUESSED in kinds:
        name = kinds[stated & ~_GUESSED].removeprefix("MOSTLY_").removeprefix("ALL_").lower()
        return _FLOATS.get(name, name)
    sizes: dict[str, int] = {}
    for tensor in model.tensors:
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.bytes
    largest = max(sizes, key=lambda kind: sizes[kind])
    return _FLOATS.get(largest, largest)


def expected_rows(spec: ModelSpec) -> Iterator[tuple[str, int, int, str]]:
    """Yield the tensors that produce what the caches keep: name, dimension, expected size and a description.

    Not every file has all of these tensors.
    """
    start = "dec.blk" if spec.model_type == "t5" else "blk"
    for group in spec.layers:
        for number in range(group.first, group.last + 1):
            block = f"{start}.{number}"
            for cache in group.caches:
                if isinstance(cache, CrossAttention):
                    continue
                if isinstance(cache, HEADS_CACHES):
                    yield f"{block}.attn_k.weight", 1, cache.num_kv_heads * cache.k_head_dim, "a K width of"
                    yield f"{block}.attn_v.weight", 1, cache.num_kv_heads * cache.v_head_dim, "a V width of"
                elif isinstance(cache, LatentAttention):
                    width = cache.kv_lora_rank + cache.qk_rope_head_dim
                    yield f"{block}.attn_kv_a_mqa.weight", 1, width, "a latent (with rotary key) width of"
                elif isinstance(cache, IndexerKeys):
                    yield f"{block}.indexer.attn_k.weight", 1, cache.head_dim, "an indexer key width of"
                elif isinstance(cache, RecurrentState):
                    yield f"{block}.ssm_conv1d.weight", 0, cache.conv_kernel, "a convolution kernel of"
                    yield f"{block}.ssm_conv1d.weight", 1, cache.conv_channels, "a number of convolution channels of"
                    yield f"{block}.shortconv.conv.weight", 0, cache.conv_kernel, "a convolution kernel of"
