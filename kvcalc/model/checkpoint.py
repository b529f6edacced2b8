"""The bytes of a checkpoint that lies in a folder, read from the headers of its safetensors files.

Format: 8 bytes, the header's length, little-endian; then the header, a JSON object: tensor name -> dtype, shape and
data_offsets; then the data. Source: the safetensors format, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import os

from kvcalc.errors import UsageError
from kvcalc.model.files import list_folder, opened, read_text

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 * 1024 * 1024
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

# What stands in the place of a file that Git LFS has not fetched. Source: the Git LFS specification, version 1.
_POINTER = b"version https://git-lfs.github.com/spec/"


def read_checkpoint(folder: str) -> int | None:
    """The bytes of all tensors in the folder's safetensors files; None where there are none.

    An index names the shards; where one of them is missing its metadata.total_size is the answer, which is the sum as
    the checkpoint's author wrote it. A file which Git LFS has not fetched is missing. Raises UsageError (exit 2) for an
    unreadable or damaged file.
    """
    shards, stated = _shards(folder)
    sizes = [_tensor_bytes(os.path.join(folder, shard)) for shard in shards]
    if None in sizes:
        return stated
    return sum(size for size in sizes if size is not None) if sizes else None


def _shards(folder: str) -> tuple[list[str], int | None]:
    """The names of the safetensors files, and the total size where an index states it."""
    index = os.path.join(folder, INDEX)
    if not os.path.lexists(index):
        # A folder may hold a second form of the same weights; the Hub's own name is the one that is loaded.
        found = [entry for entry in list_folder(folder) if entry.endswith(".safetensors")]
        return (["model.safetensors"] if "model.safetensors" in found else found), None
    data = _json_object(read_text(index, MAX_INDEX_BYTES), index)
    places, metadata = data.get("weight_map"), data.get("metadata")
    if not isinstance(places, dict) or not places or not all(_is_file_name(shard) for shard in places.values()):
        raise UsageError(f"{index}: weight_map must name the file of every tensor")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some tools write a float.
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    return sorted(set(places.values())), total if type(total) is int and total > 0 else None


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and os.path.basename(value) == value


def _tensor_bytes(path: str) -> int | None:
    """The bytes of the tensors in one file, which must be as long as its header says; None where it is missing."""
    if not os.path.lexists(path):
        return None
    with opened(path) as (file, size):
        start = file.read(len(_POINTER))
        if start == _POINTER:
            return None
        file.seek(8)
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise UsageError(f"{path}: damaged: the header's length is {length:,} bytes in {size:,}")
        header = file.read(length)
    try:
        text = header.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path}: damaged: the header is no text") from None
    end = 0
    total = 0
    for name, tensor in _json_object(text, path).items():
        if name == "__metadata__":
            continue
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not _are_offsets(offsets):
            raise UsageError(f"{path}: damaged: tensor {name[:60]!a} has no data_offsets")
        total += offsets[1] - offsets[0]  # type: ignore[index]  # checked above
        end = max(end, offsets[1])  # type: ignore[index]
    data = size - 8 - length
    if end != total or end != data:
        raise UsageError(f"{path}: damaged: the header describes {end:,} bytes of tensors, the file holds {data:,}")
    return total


def _are_offsets(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value) and 0 <= value[0] <= value[1]
    )


def _json_object(text: str, path: str) -> dict[str, object]:
    import json

    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: damaged: no JSON") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: damaged: no JSON object")
    return data
