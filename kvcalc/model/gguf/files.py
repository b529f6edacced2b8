"""Find the GGUF file or files that a path refers to: one file, the shards of a model, or a folder with one model.

The shards of a model are called NAME-00001-of-00003.gguf and so on. The first shard has the metadata, and each shard
has its own tensors. Source: llama_split_path (src/llama.cpp) and gguf-split (tools/gguf-split) of llama.cpp.
"""

from __future__ import annotations

import os

from kvcalc.errors import UsageError
from kvcalc.model.files import list_folder, one_of
from kvcalc.model.gguf.file import Header, Tensor, is_gguf, read_header
from kvcalc.records import NamedTuple

SUFFIX = ".gguf"
MAX_SHARDS = 1_000


class GgufModel(NamedTuple):
    """The metadata of a model and the tensors of all its files. `missing` lists the names of missing shards."""

    path: str
    name: str
    metadata: dict[str, object]
    tensors: tuple[Tensor, ...]
    missing: tuple[str, ...] = ()


class _Shard(NamedTuple):
    """The parts of a shard's file name. `number` counts from 1."""

    stem: str
    number: int
    of: int

    def file(self, number: int) -> str:
        return f"{self.stem}-{number:05d}-of-{self.of:05d}{SUFFIX}"


def read_files(path: str) -> GgufModel:
    """Return the model at `path`: a file, a shard or a folder. Only the headers of the existing shards are read.

    Raises UsageError (exit 2) if a file is missing or damaged or if shards contradict each other, and the errors of
    `read_header`.
    """
    if os.path.isdir(path):
        path = os.path.join(path, gguf_in(path))
    folder, file = os.path.split(path)
    shard = _shard_of(file)
    if shard is None:
        header = read_header(path)
        if _split(header, "split.count") > 1:
            raise UsageError(
                f"{path}: this is a shard, but its name is not like NAME-00001-of-00002{SUFFIX}", "rename the shards"
            )
        stem = file[: -len(SUFFIX)] if file.endswith(SUFFIX) else file
        return GgufModel(path, stem or file, header.metadata, header.tensors)
    first = os.path.join(folder, shard.file(1))
    if not os.path.lexists(first):
        raise UsageError(f"{first}: missing: the first shard has the model's metadata")
    header = _check_shard(read_header(first), shard, 1)
    tensors, missing = [*header.tensors], []
    for number in range(2, shard.of + 1):
        other = os.path.join(folder, shard.file(number))
        if os.path.lexists(other):
            tensors += _check_shard(read_header(other), shard, number).tensors
        else:
            missing.append(shard.file(number))
    stated = _split(header, "split.tensors.count")
    if not missing and stated not in (0, len(tensors)):
        raise UsageError(f"{first}: split.tensors.count is {stated:,}, but the shards have {len(tensors):,} tensors")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise UsageError(f"{first}: two shards contain the same tensor")
    return GgufModel(first, shard.stem, header.metadata, tuple(tensors), tuple(missing))


def gguf_in(folder: str) -> str:
    """Return the file of the only model in a folder, or one of its shards. Vision projectors are ignored.

    Raises UsageError (exit 2) if there is no model, or with the names of the models if there are several.
    """
    files: dict[str, str] = {}
    for entry in list_folder(folder):
        if entry.endswith(SUFFIX) and "mmproj" not in entry.casefold():
            shard = _shard_of(entry)
            files.setdefault(shard.file(0) if shard else entry, entry)
    names = [*files.values()]
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError(f"{folder}: no config.json and no GGUF file of a model")
    raise one_of(folder, f"{len(names)} GGUF models:", names)


def means_gguf(path: str) -> bool:
    """Return whether a path refers to a GGUF file, by its name or by its content."""
    return path.endswith(SUFFIX) or is_gguf(path)


def _shard_of(file: str) -> _Shard | None:
    """Return the parts of NAME-00001-of-00003.gguf, or None for any other name."""
    parts = file[: -len(SUFFIX)].rsplit("-", 3) if file.endswith(SUFFIX) else []
    if len(parts) != 4 or parts[2] != "of" or any(len(n) != 5 or not n.isdecimal() for n in (parts[1], parts[3])):
        return None
    shard = _Shard(parts[0], int(parts[1]), int(parts[3]))
    if not 1 <= shard.number <= shard.of <= MAX_SHARDS:
        raise UsageError(f"{file}: the name says shard {shard.number} of {shard.of}, which is not possible")
    return shard


def _check_shard(header: Header, shard: _Shard, number: int) -> Header:
    """Return the header. Raises UsageError if its shard number or count differs from that in the file name."""
    if shard.of == 1 and "split.count" not in header.metadata:
        return header
    count, place = _split(header, "split.count"), _split(header, "split.no") + 1
    if (count, place) != (shard.of, number):
        raise UsageError(
            f"{header.path}: the metadata say shard {place} of {count}, but the name says {number} of {shard.of}"
        )
    return header


def _split(header: Header, key: str) -> int:
    value = header.metadata.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{header.path}: damaged: {key} is not an integer")
    return value
