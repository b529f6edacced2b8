"""The size of the checkpoint in a folder, from the headers of its safetensors files.

A folder may hold a part of a checkpoint (a download that stopped), the same weights twice in two forms, or an adapter
beside them. A size is only given for files that are complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from kvcalc.errors import UsageError
from kvcalc.model.files import list_folder, opened
from kvcalc.records import NamedTuple
from kvcalc.units import format_size

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_INDEX_VALUES = 600_000
"""A limit on memory: one value per tensor. The largest published indexes name about 200,000 tensors."""

_SUFFIX = ".safetensors"
# PEFT's name, and a folder of an adapter that was saved in several files.
_ADAPTER = re.compile(r"adapter(_model)?[-_.]?.*\.safetensors")
_SHARD = re.compile(r"(.+?)[-.](\d{1,6})-of-(\d{1,6})\.safetensors")


class StoredWeights(NamedTuple):
    """The checkpoint in a folder.

    `bytes` is the size of all tensors, or None if there are only adapters or the files are not complete; then `trouble`
    says what is missing. `name` is the file that stands for them (an index for several files). `adapters` has a remark
    about each adapter beside the weights. `tower_bytes` is the part of `bytes` in vision and audio towers, and
    `draft_bytes` the part in layers for multi-token prediction, by the names of the tensors.
    """

    bytes: int | None
    name: str
    trouble: str | None = None
    adapters: tuple[str, ...] = ()
    tower_bytes: int = 0
    draft_bytes: int = 0


def read_checkpoint(folder: str, num_layers: int | None = None) -> StoredWeights | None:
    """The checkpoint in the folder's safetensors files, or None if there are no such files.

    `num_layers` is the number of the decoder's layers if its further layers are for multi-token prediction.

    With an index, the files that it names count, and no others. Its metadata.total_size is not read, because files that
    are missing cannot be loaded. Without an index, model.safetensors comes first, then a set of shards
    (`-00001-of-00017`), then Mistral's consolidated files, then all other files together. A file that Git LFS has not
    fetched counts as missing. Raises UsageError (exit 2) for an unreadable or damaged file.
    """
    entries = [entry for entry in list_folder(folder) if entry.endswith(_SUFFIX)]
    adapters = [entry for entry in entries if _ADAPTER.fullmatch(entry)]
    if os.path.lexists(os.path.join(folder, INDEX)):
        stored: StoredWeights | None = _read_indexed(folder, num_layers)
    else:
        stored = None
        for name, files, trouble in _forms([entry for entry in entries if entry not in adapters]):
            form = _read_files(folder, name, files, trouble, num_layers)
            if stored is None or form.bytes is not None:
                stored = form
            if form.bytes is not None:
                break
    if not adapters:
        return stored
    remarks = tuple(_adapter_remark(folder, entry) for entry in adapters)
    return (stored or StoredWeights(None, adapters[0]))._replace(adapters=remarks)


def _read_indexed(folder: str, num_layers: int | None) -> StoredWeights:
    """The checkpoint that the folder's index describes."""
    places = _read_index(os.path.join(folder, INDEX))
    shards = sorted(set(places.values()))
    held = {shard: read_tensors(os.path.join(folder, shard), num_layers) for shard in shards}
    missing = [shard for shard, tensors in held.items() if tensors is None]
    if missing:
        return StoredWeights(None, INDEX, _missing(missing, len(shards)))
    for name, shard in places.items():
        tensors = held[shard]
        if tensors is None or name not in tensors.names:
            return StoredWeights(None, INDEX, f"tensor {name[:100]!a} is not in {shard}")
    return _summed(INDEX, [tensors for tensors in held.values() if tensors is not None])


def _read_index(path: str) -> dict[str, str]:
    """The file of every tensor."""
    with opened(path) as (file, size):
        if size > MAX_INDEX_BYTES:
            raise UsageError(f"{path}: {size:,} bytes; at most {MAX_INDEX_BYTES:,} are read")
        text = file.read(MAX_INDEX_BYTES)
    data = json_object(text, path, MAX_INDEX_VALUES)
    places = data.get("weight_map")
    if not isinstance(places, dict) or not places or not all(map(_is_file_name, places.values())):
        raise UsageError(f"{path}: weight_map must name the file of every tensor")
    return places


def _is_file_name(value: object) -> bool:
    """Whether the value can name a file in the same folder."""
    if not isinstance(value, str) or value in ("", ".", "..") or os.path.basename(value) != value:
        return False
    # Lone surrogates are valid in JSON, and cannot be encoded.
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _forms(entries: Sequence[str]) -> list[tuple[str, list[str], str | None]]:
    """The forms of a checkpoint among the files, in the order in which loaders prefer them.

    Each form has the name that stands for it, its files, and what is missing.
    """
    sets: dict[tuple[str, int], dict[int, str]] = {}
    others = []
    for entry in entries:
        shard = _SHARD.fullmatch(entry)
        if shard is None:
            others.append(entry)
        else:
            sets.setdefault((shard[1], int(shard[3])), {})[int(shard[2])] = entry
    forms: list[tuple[str, list[str], str | None]] = []
    for (_, count), numbered in sorted(sets.items(), key=lambda item: (item[0][0] != "model", item[0])):
        names = [numbered[number] for number in sorted(numbered)]
        # Shards are numbered from 1, and in Mistral's own format from 0.
        whole = len(names) == count and max(numbered) - min(numbered) == count - 1 and min(numbered) <= 1
        forms.append((names[0], names, None if whole else f"{len(names)} of {count:,} files are there"))
    for name in ("consolidated.safetensors", "model.safetensors"):
        if name in others:
            others.remove(name)
            forms.insert(0 if name.startswith("model") else len(forms), (name, [name], None))
    if others:
        forms.append((others[0], others, None))
    return forms


def _read_files(
    folder: str, name: str, files: Sequence[str], trouble: str | None, num_layers: int | None
) -> StoredWeights:
    """One form of a checkpoint. `trouble` says that files are missing."""
    headers: list[Tensors] = []
    missing = []
    for file in files:
        held = read_tensors(os.path.join(folder, file), num_layers)
        if held is None:
            missing.append(file)
        else:
            headers.append(held)
    if trouble is None and missing:
        trouble = _missing(missing, len(files))
    elif trouble is None and not any(tensors.bytes for tensors in headers):
        trouble = "it has no tensors"
    if trouble is not None:
        return StoredWeights(None, name, trouble)
    return _summed(name, headers)


def _summed(name: str, found: Sequence[Tensors]) -> StoredWeights:
    """The weights in several files together."""
    size, towers, drafting = (sum(sizes) for sizes in zip(*(tensors[1:] for tensors in found)))
    return StoredWeights(size, name, tower_bytes=towers, draft_bytes=drafting)


def _missing(files: Sequence[str], count: int) -> str:
    if count == 1:
        return f"{files[0]} is missing, or not fetched by Git LFS"
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more} of {count} files {'are' if more else 'is'} missing, or not fetched by Git LFS"


def _adapter_remark(folder: str, name: str) -> str:
    held = read_tensors(os.path.join(folder, name))
    size = "" if held is None else f" of {format_size(held.bytes)}"
    return f"{name}: an adapter{size}, which is not counted with the model's weights"


# Read the header of a safetensors file: the names of its tensors and their bytes.
# Format: the header's length in 8 bytes, little-endian; the header, a JSON object that maps each tensor's name to its
# dtype, shape and data_offsets; the data. Source: the safetensors format, https://github.com/huggingface/safetensors.

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
        document = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UsageError(f"{path}: damaged: the header is not text") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: damaged: not JSON") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: damaged: not a JSON object")
    return document


def _are_offsets(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value) and 0 <= value[0] <= value[1]
    )
