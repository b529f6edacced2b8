"""Read the header of a safetensors file: the names of its tensors and their bytes.

Format: the header's length in 8 bytes, little-endian; the header, a JSON object that maps each tensor's name to its
dtype, shape and data_offsets; the data. Source: the safetensors format, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import os
import re

from kvcalc.errors import UsageError
from kvcalc.model.files import opened
from kvcalc.records import NamedTuple

MAX_HEADER_BYTES = 100_000_000
"""The limit that the format sets."""

MAX_VALUES = 1_500_000
"""A limit on memory, in JSON values. A tensor has eight to ten of them, so this is a file of 150,000 tensors."""

# The first line of the pointer that Git LFS leaves until it fetches a file (Git LFS specification, version 1).
_POINTER = b"version https://git-lfs.github.com/spec/"


# Modules of vision and audio towers and of their projectors: a part of a tensor's name. Sources: the classes of
# Transformers 5.23 (Qwen-VL: visual; LLaVA, Gemma 3, Mistral 3: vision_tower, multi_modal_projector; Llama 4:
# vision_model; Gemma 3n: embed_vision, embed_audio; Qwen2-Audio, Qwen-Omni: audio_tower; Kimi K2.5: mm_projector;
# Idefics3: connector; Gemma 4: multimodal_embedder), and the published tensors of InternVL (mlp1) and Mistral's own
# format (vision_encoder, vision_language_adapter, patch_merger).
_TOWER_MODULES = frozenset(
    "visual vision_tower vision_model vision_encoder vision_language_adapter audio_tower audio_encoder audio_model "
    "multi_modal_projector mm_projector mlp1 connector patch_merger multimodal_embedder embed_vision "
    "embed_audio".split()
)


# Layers for multi-token prediction: modules of their own (mtp.layers.0 in Qwen3-Next and Qwen3.5, model.mtp_layers.0 in
# MiMo), or layers of the decoder after its last one (model.layers.61 in DeepSeek-V3, as its README_WEIGHTS.md says).
_DRAFTING = re.compile(r"(?:.*\.)?mtp(?:_\w+)?\..*")
_LAYER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d{1,6})\..*")


class Tensors(NamedTuple):
    """The tensors of one file: their names and the bytes of all of them.

    `tower_bytes` are in vision and audio towers, and `draft_bytes` in layers for multi-token prediction.
    """

    names: frozenset[str]
    bytes: int
    tower_bytes: int = 0
    draft_bytes: int = 0


def read_tensors(path: str, num_layers: int | None = None) -> Tensors | None:
    """The tensors of the file at `path`, or None if it is missing or a pointer that Git LFS has not replaced yet.

    `num_layers` is the number of the decoder's layers if its further layers are for multi-token prediction. Only the
    header is read. The file's length must match it. Raises UsageError (exit 2) for an unreadable or damaged
    file, and for a header with more than MAX_VALUES values.
    """
    if not os.path.lexists(path):
        return None
    with opened(path) as (file, size):
        start = file.read(len(_POINTER))
        if start == _POINTER:
            return None
        file.seek(8)
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise UsageError(f"{path}: damaged: the header's length is {length:,} bytes, the file's {size:,}")
        header = file.read(length)
    end = total = towers = drafting = 0
    names = []
    for name, tensor in json_object(header, path, MAX_VALUES).items():
        if name == "__metadata__":
            continue
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not _are_offsets(offsets):
            raise UsageError(f"{path}: damaged: tensor {name[:60]!a} has no data_offsets")
        size_of_tensor: int = offsets[1] - offsets[0]  # type: ignore[index]  # checked above
        total += size_of_tensor
        if not _TOWER_MODULES.isdisjoint(name.split(".")):
            towers += size_of_tensor
        elif _drafts(name, num_layers):
            drafting += size_of_tensor
        end = max(end, offsets[1])  # type: ignore[index]
        names.append(name)
    data = size - 8 - length
    if end != total or end != data:
        raise UsageError(f"{path}: damaged: the header describes {end:,} bytes of tensors, the file holds {data:,}")
    return Tensors(frozenset(names), total, towers, drafting)


def _drafts(name: str, num_layers: int | None) -> bool:
    """Whether a tensor of this name is in a layer for multi-token prediction."""
    if _DRAFTING.fullmatch(name):
        return True
    layer = _LAYER.fullmatch(name) if num_layers is not None else None
    return layer is not None and num_layers is not None and int(layer[1]) >= num_layers


def json_object(data: bytes, path: str, most_values: int) -> dict[str, object]:
    """The JSON object in `data`, from the file at `path`. Its values are counted before it is parsed.

    Raises UsageError (exit 2) if it is not UTF-8, not a JSON object, or has more than `most_values` values.
    """
    import json

    if sum(map(data.count, (b",", b"[", b"{"))) > most_values:
        raise UsageError(f"{path}: more than {most_values:,} values, the maximum")
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UsageError(f"{path}: damaged: the header is not text") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: damaged: not JSON") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: damaged: not a JSON object")
    return found


def _are_offsets(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value) and 0 <= value[0] <= value[1]
    )
