"""Read the header of a safetensors file: the names of its tensors and their bytes.

Format: the header's length in 8 bytes, little-endian; the header, a JSON object that maps each tensor's name to its
dtype, shape and data_offsets; the data. Source: the safetensors format, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from kvcalc.errors import UsageError
from kvcalc.model.files import opened

MAX_HEADER_BYTES = 100_000_000
"""The limit that the format sets."""

MAX_VALUES = 1_500_000
"""A limit on memory, in JSON values. A tensor has eight to ten of them, so this is a file of 150,000 tensors."""

# The first line of the pointer that Git LFS leaves until it fetches a file (Git LFS specification, version 1).
_POINTER = b"version https://git-lfs.github.com/spec/"


class Tensors(NamedTuple):
    """The tensors of one file: their names, and the bytes of all of them."""

    names: frozenset[str]
    bytes: int


def read_tensors(path: str) -> Tensors | None:
    """The tensors of the file at `path`, or None if it is missing or a pointer that Git LFS has not replaced yet.

    Only the header is read. The file's length must match it. Raises UsageError (exit 2) for an unreadable or damaged
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
    end = total = 0
    names = []
    for name, tensor in json_object(header, path, MAX_VALUES).items():
        if name == "__metadata__":
            continue
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not _are_offsets(offsets):
            raise UsageError(f"{path}: damaged: tensor {name[:60]!a} has no data_offsets")
        total += offsets[1] - offsets[0]  # type: ignore[index]  # checked above
        end = max(end, offsets[1])  # type: ignore[index]
        names.append(name)
    data = size - 8 - length
    if end != total or end != data:
        raise UsageError(f"{path}: damaged: the header describes {end:,} bytes of tensors, the file holds {data:,}")
    return Tensors(frozenset(names), total)


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
