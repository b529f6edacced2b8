"""Read the header of a GGUF file: the metadata and the description of the tensors, but not the tensors' data.

The layout is little-endian: the magic `GGUF`, a version, the number of tensors and the number of metadata pairs; then
the pairs, each with a key, a type and a value; then for every tensor its name, shape, type and data offset. Source:
docs/gguf.md of ggml (https://github.com/ggml-org/ggml), and gguf_init_from_file (ggml/src/gguf.cpp) for the checks.

The tensor types and their sizes come from the `gguf` package (ggml-org). Its GGUFReader is not used because it makes
numpy arrays of every string: a vocabulary of 262,144 tokens with 450,000 merges took 19 seconds and 1.3 GiB. Skipping
the strings takes 0.2 seconds and no memory.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, BinaryIO

from kvcalc.errors import ModelError, RunError, UsageError
from kvcalc.model.files import opened
from kvcalc.model.reader import MAX_LAYERS
from kvcalc.records import NamedTuple

MAGIC = b"GGUF"
MAX_PAIRS = 2_000
MAX_TENSORS = 100_000
MAX_STRINGS = 4_000_000
"""The limit for all arrays together: more than four times the largest vocabulary with its merges."""

# llama.cpp refuses names of tensors with 64 bytes or more (GGML_MAX_NAME), and its forks with 128. The format allows
# keys of 65,535 bytes, but the longest known one has fewer than 100.
_MAX_NAME_BYTES = 1024
_MAX_TEXT_BYTES = 4_096
_MAX_DIMENSIONS = 4
_PIECE_BYTES = 1 << 20
# The first bytes of the pointer file that Git LFS leaves until the file is fetched. Source: the Git LFS specification,
# version 1.
_POINTER = b"version https://git-lfs"

_COUNT, _U32 = Struct("<Q"), Struct("<I")
# GGUFValueType by number. Strings (8) and arrays (9) begin with their length.
_SCALARS = {
    0: Struct("<B"), 1: Struct("<b"), 2: Struct("<H"), 3: Struct("<h"), 4: Struct("<I"), 5: Struct("<i"),
    6: Struct("<f"), 7: Struct("<?"), 10: Struct("<Q"), 11: Struct("<q"), 12: Struct("<d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class Unread(NamedTuple):
    """A value that was skipped: an array of `length` items (such as a vocabulary), or a string of `length` bytes."""

    length: int

    def __repr__(self) -> str:
        return f"a list of {self.length:,}"


class Tensor(NamedTuple):
    """A tensor as described in the header: `shape` in ggml's order (row first), the name of the type, the size."""

    name: str
    shape: tuple[int, ...]
    type: str
    bytes: int

    @property
    def elements(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return elements


class Header(NamedTuple):
    """The metadata of a file, by full key, and its tensors.

    An array of numbers is a list if it has at most MAX_LAYERS items, otherwise it is `Unread`.
    """

    path: str
    metadata: dict[str, object]
    tensors: tuple[Tensor, ...]


def is_gguf(path: str) -> bool:
    """Return whether a regular file begins with the magic.

    False if the file cannot be opened. The function that reads the file then reports the error.
    """
    try:
        with opened(path) as (file, _):
            return file.read(len(MAGIC)) == MAGIC
    except UsageError:
        return False


def read_header(path: str) -> Header:
    """Return the header of the GGUF file at `path`. The tensors' data are not read, but must be present.

    Raises UsageError (exit 2) if the file is missing, not a GGUF file, truncated or damaged; ModelError (exit 3) if its
    version, byte order or a type is not supported; RunError (exit 1) if the extra `gguf` is not installed.
    """
    with opened(path) as (file, size):
        return _read(_Bytes(file, path, size))


def package(path: str) -> Any:
    """Return the constants of the `gguf` package. Raises RunError (exit 1) with a hint if it is not installed."""
    try:
        # The package imports numpy, so it is imported only when a GGUF file is read.
        import gguf
    except ImportError:
        raise RunError(f"{path}: gguf is not installed", "type: pip install 'kvcalc[gguf]'") from None
    constants: Any = gguf
    return constants


class _Bytes:
    """The bytes of a file in order, read in chunks."""

    def __init__(self, file: BinaryIO | Any, path: str, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.piece, self.start, self.at = b"", 0, 0

    @property
    def position(self) -> int:
        return self.start + self.at

    def damaged(self, why: str) -> UsageError:
        return UsageError(f"{self.path}: damaged: {why}")

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, at most one chunk."""
        if self.at + count > len(self.piece):
            self._fill(count)
        self.at += count
        return self.piece[self.at - count : self.at]

    def skip(self, count: int) -> None:
        if self.position + count > self.size:
            raise self._cut_off()
        self.at += count

    def number(self, form: Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def text(self, most: int) -> str | None:
        """Return a string, or None if it is longer than `most` bytes. Raises UsageError if it is not UTF-8."""
        length = self.number(_COUNT)
        if length > most:
            self.skip(length)
            return None
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"the string at byte {self.position - length:,} is not UTF-8") from None

    def skip_strings(self, count: int) -> None:
        """Skip the strings of an array. A vocabulary has hundreds of thousands, and kvcalc needs none of them."""
        length_at = _COUNT.unpack_from
        while count:
            if self.at + _COUNT.size > len(self.piece):
                self._fill(_COUNT.size)
            piece, at, last = self.piece, self.at, len(self.piece) - _COUNT.size
            while count and at <= last:
                at += _COUNT.size + length_at(piece, at)[0]
                count -= 1
            self.at = at
            if self.position > self.size:
                raise self._cut_off()

    def _fill(self, count: int) -> None:
        position = self.position
        if position + count > self.size:
            raise self._cut_off()
        self.file.seek(position)
        pieces, length = [], 0
        while length < count:  # a raw file may return fewer bytes than requested
            read = self.file.read(max(count, _PIECE_BYTES) - length)
            if not read:
                raise self._cut_off()
            pieces.append(read)
            length += len(read)
        self.piece, self.start, self.at = b"".join(pieces), position, 0

    def _cut_off(self) -> UsageError:
        return UsageError(f"{self.path}: truncated after {self.size:,} bytes", "download the complete file again")


def _read(file: _Bytes) -> Header:
    if file.size < 4 or file.take(len(MAGIC)) != MAGIC:
        file.at = 0
        if file.size >= len(_POINTER) and file.take(len(_POINTER)) == _POINTER:
            raise UsageError(f"{file.path}: this is a Git LFS pointer, not a model", "fetch the file: git lfs pull")
        raise UsageError(f"{file.path}: not a GGUF file")
    _check_version(file, file.number(_U32))
    tensor_count, pair_count = file.number(_COUNT), file.number(_COUNT)
    if pair_count > MAX_PAIRS or tensor_count > MAX_TENSORS:
        raise file.damaged(f"{pair_count:,} metadata pairs and {tensor_count:,} tensors")
    constants = package(file.path)
    metadata = _read_pairs(file, pair_count)
    alignment = metadata.get("general.alignment", constants.GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise file.damaged(f"general.alignment is {alignment!a}"[:200])
    return Header(file.path, metadata, _read_tensors(file, tensor_count, alignment, constants))


def _check_version(file: _Bytes, version: int) -> None:
    """Accept versions 2 and 3, which have the same layout. The version also reveals a big-endian file."""
    if version not in (2, 3):
        if int.from_bytes(_U32.pack(version), "big") in (2, 3):
            raise ModelError(
                f"{file.path}: big-endian GGUF files are not supported",
                "convert it with gguf-convert-endian from the gguf package",
            )
        raise ModelError(f"{file.path}: GGUF version {version} is not supported: must be 2 or 3")


def _read_pairs(file: _Bytes, count: int) -> dict[str, object]:
    values: dict[str, object] = {}
    strings = 0
    for _ in range(count):
        key = file.text(_MAX_NAME_BYTES)
        if not key:
            raise file.damaged("a metadata key is empty or longer than 1,024 bytes")
        if key in values:
            raise file.damaged(f"key {key[:60]!a} appears twice")
        kind = file.number(_U32)
        if kind == _ARRAY:
            value, strings = _read_array(file, key, strings)
            values[key] = value
        else:
            values[key] = _read_value(file, key, kind)
    return values


def _read_value(file: _Bytes, key: str, kind: int) -> object:
    if kind == _STRING:
        at = file.position + _COUNT.size
        # Chat templates and tokenizers are not needed. They are skipped, so they need not be valid UTF-8.
        text = file.text(0 if key.startswith("tokenizer.") else _MAX_TEXT_BYTES)
        return Unread(file.position - at) if text is None else text
    form = _SCALARS.get(kind)
    if form is None:
        raise file.damaged(f"key {key[:60]!a} has type {kind}")
    return file.number(form)


def _read_array(file: _Bytes, key: str, strings: int) -> tuple[object, int]:
    """Return the items of an array, if there may be one per layer, and the number of strings skipped so far."""
    kind, length = file.number(_U32), file.number(_COUNT)
    if kind == _STRING:
        strings += length
        if strings > MAX_STRINGS:
            raise file.damaged(f"key {key[:60]!a} has {length:,} strings")
        file.skip_strings(length)
        return Unread(length), strings
    form = _SCALARS.get(kind)
    if form is None:
        # Nested arrays too: ggml does not read them.
        raise file.damaged(f"key {key[:60]!a} is an array of type {kind}")
    if length > MAX_LAYERS:
        file.skip(length * form.size)
        return Unread(length), strings
    return [item for (item,) in form.iter_unpack(file.take(length * form.size))], strings


def _read_tensors(file: _Bytes, count: int, alignment: int, constants: Any) -> tuple[Tensor, ...]:
    """Return the tensors in the order of their data. Between them is only the padding for the alignment."""
    sizes = {kind.value: (kind.name.lower(), *size) for kind, size in constants.GGML_QUANT_SIZES.items()}
    tensors: list[Tensor] = []
    names: set[str] = set()
    end = 0
    for _ in range(count):
        name = file.text(_MAX_NAME_BYTES)
        dimensions = file.number(_U32)
        if not name or name in names or dimensions > _MAX_DIMENSIONS:
            raise file.damaged(f"tensor {(name or '')[:60]!a} has {dimensions} dimensions, or its name appears twice")
        names.add(name)
        shape = tuple(file.number(_COUNT) for _ in range(dimensions))
        kind, offset = file.number(_U32), file.number(_COUNT)
        if kind not in sizes:
            raise ModelError(
                f"{file.path}: tensor {name[:60]!a} has type {kind}, which the installed gguf package does not know",
                "a newer release may know it: pip install -U gguf",
            )
        type_name, block_elements, block_bytes = sizes[kind]
        tensor = Tensor(name, shape, type_name, 0)
        if shape and shape[0] % block_elements:
            raise file.damaged(f"tensor {name[:60]!a}: blocks of {block_elements} do not divide a row of {shape[0]:,}")
        tensor = tensor._replace(bytes=tensor.elements // block_elements * block_bytes)
        if offset != end:
            raise file.damaged(f"the data of tensor {name[:60]!a} do not follow those of the previous tensor")
        # The padding after the last tensor may be missing.
        last = end + tensor.bytes
        end = -(-last // alignment) * alignment
        tensors.append(tensor)
    start = -(-file.position // alignment) * alignment
    if tensors and last and start + last > file.size:
        raise UsageError(
            f"{file.path}: truncated: the header describes {last:,} bytes of tensors, but the file has only "
            f"{max(file.size - start, 0):,}",
            "download the complete file again",
        )
    return tuple(tensors)
