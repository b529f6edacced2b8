"""The header of a .gguf file: its metadata and what it says of its tensors, never the tensors themselves.

Layout, little-endian: the magic `GGUF`, a version, the number of tensors and of metadata pairs; the pairs, each a key,
a type and a value; of every tensor a name, its shape, a type and where its data begin. Source: docs/gguf.md of ggml
(https://github.com/ggml-org/ggml), and gguf_init_from_file (ggml/src/gguf.cpp) for what is refused.

The types of tensors and their sizes are the `gguf` package's (ggml-org). Its GGUFReader is not used: it makes numpy
arrays of every string, and a vocabulary of 262,144 tokens with 450,000 merges took it 19 seconds and 1.3 GiB, where
stepping over them takes 0.2 seconds and no memory.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, BinaryIO, NamedTuple

from kvcalc.errors import ModelError, RunError, UsageError
from kvcalc.model.files import opened
from kvcalc.model.reader import MAX_LAYERS

MAGIC = b"GGUF"
MAX_PAIRS = 2_000
MAX_TENSORS = 100_000
MAX_STRINGS = 4_000_000
"""In all arrays together: more than four times the largest vocabulary with its merges."""

_MAX_NAME_BYTES = 65_535
_MAX_TEXT_BYTES = 4_096
_MAX_DIMENSIONS = 4
_PIECE_BYTES = 1 << 20
# What stands in the place of a file that Git LFS has not fetched. Source: the Git LFS specification, version 1.
_POINTER = b"version https://git-lfs"

_COUNT, _U32 = Struct("<Q"), Struct("<I")
# GGUFValueType by number; strings (8) and arrays (9) have a length of their own.
_SCALARS = {
    0: Struct("<B"), 1: Struct("<b"), 2: Struct("<H"), 3: Struct("<h"), 4: Struct("<I"), 5: Struct("<i"),
    6: Struct("<f"), 7: Struct("<?"), 10: Struct("<Q"), 11: Struct("<q"), 12: Struct("<d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class Unread(NamedTuple):
    """A value that was stepped over: an array of `length` items (a vocabulary), or a text of `length` bytes."""

    length: int

    def __repr__(self) -> str:
        return f"a list of {self.length:,}"


class Tensor(NamedTuple):
    """What the header says of a tensor: `shape` as ggml has it (the row first), the type's name, the bytes it takes."""

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
    """One file's metadata, by full key, and tensors. Arrays of numbers are lists up to the length of a layer list."""

    path: str
    metadata: dict[str, object]
    tensors: tuple[Tensor, ...]


def is_gguf(path: str) -> bool:
    """Whether a regular file begins with the magic; False where it cannot be opened, which its reader will say."""
    try:
        with opened(path) as (file, _):
            return file.read(len(MAGIC)) == MAGIC
    except UsageError:
        return False


def read_header(path: str) -> Header:
    """The header of the GGUF file at `path`; of the tensors' data nothing is read, but they must be there.

    Raises UsageError (exit 2) where the file is missing, no GGUF file, cut off or damaged; ModelError (exit 3) for a
    version, byte order or type that is not known; RunError (exit 1) without the extra `gguf`.
    """
    with opened(path) as (file, size):
        return _read(_Bytes(file, path, size))


def package(path: str) -> Any:
    """The `gguf` package's constants; RunError (exit 1) with what to type where it is not installed."""
    try:
        # It imports numpy, so it is imported where a GGUF file is read and nowhere else.
        import gguf
    except ImportError:
        raise RunError(f"{path}: gguf is not installed", "type: pip install 'kvcalc[gguf]'") from None
    constants: Any = gguf
    return constants


class _Bytes:
    """The bytes of a file in order, read a piece at a time."""

    def __init__(self, file: BinaryIO | Any, path: str, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.piece, self.start, self.at = b"", 0, 0

    @property
    def position(self) -> int:
        return self.start + self.at

    def damaged(self, why: str) -> UsageError:
        return UsageError(f"{self.path}: damaged: {why}")

    def take(self, count: int) -> bytes:
        """The next `count` bytes, fewer than a piece holds."""
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
        """A string; None where it is longer than `most` bytes. UsageError where it is no UTF-8."""
        length = self.number(_COUNT)
        if length > most:
            self.skip(length)
            return None
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"a text at byte {self.position - length:,} is no UTF-8") from None

    def skip_strings(self, count: int) -> None:
        """Step over an array's strings: a vocabulary has hundreds of thousands, and none is needed."""
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
        while length < count:  # a raw file may return less than it was asked for
            read = self.file.read(max(count, _PIECE_BYTES) - length)
            if not read:
                raise self._cut_off()
            pieces.append(read)
            length += len(read)
        self.piece, self.start, self.at = b"".join(pieces), position, 0

    def _cut_off(self) -> UsageError:
        return UsageError(f"{self.path}: cut off after {self.size:,} bytes", "download it again, or get the whole file")


def _read(file: _Bytes) -> Header:
    if file.size < 4 or file.take(len(MAGIC)) != MAGIC:
        file.at = 0
        if file.size >= len(_POINTER) and file.take(len(_POINTER)) == _POINTER:
            raise UsageError(f"{file.path}: a pointer of Git LFS, and no model", "fetch the file: git lfs pull")
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
    """Versions 2 and 3 are laid out alike; a big-endian file is told by its version."""
    if version not in (2, 3):
        if int.from_bytes(_U32.pack(version), "big") in (2, 3):
            raise ModelError(f"{file.path}: a big-endian GGUF file", "gguf-convert-endian of the gguf package turns it")
        raise ModelError(f"{file.path}: GGUF version {version}: only 2 and 3 are known")


def _read_pairs(file: _Bytes, count: int) -> dict[str, object]:
    found: dict[str, object] = {}
    strings = 0
    for _ in range(count):
        key = file.text(_MAX_NAME_BYTES)
        if not key:
            raise file.damaged("a metadata key of no length, or of more than 65,535 bytes")
        if key in found:
            raise file.damaged(f"key {key[:60]!a} stands twice")
        kind = file.number(_U32)
        if kind == _ARRAY:
            value, strings = _read_array(file, key, strings)
            found[key] = value
        else:
            found[key] = _read_value(file, key, kind)
    return found


def _read_value(file: _Bytes, key: str, kind: int) -> object:
    if kind == _STRING:
        at = file.position + _COUNT.size
        # Chat templates and whole tokenizers are of no use here, and need not be UTF-8 to be stepped over.
        text = file.text(0 if key.startswith("tokenizer.") else _MAX_TEXT_BYTES)
        return Unread(file.position - at) if text is None else text
    form = _SCALARS.get(kind)
    if form is None:
        raise file.damaged(f"key {key[:60]!a} has type {kind}")
    return file.number(form)


def _read_array(file: _Bytes, key: str, strings: int) -> tuple[object, int]:
    """An array's items where they may be one for each layer, and how many strings were stepped over so far."""
    kind, length = file.number(_U32), file.number(_COUNT)
    if kind == _STRING:
        strings += length
        if strings > MAX_STRINGS:
            raise file.damaged(f"key {key[:60]!a} holds {length:,} strings")
        file.skip_strings(length)
        return Unread(length), strings
    form = _SCALARS.get(kind)
    if form is None:
        # Arrays in arrays too, which ggml does not read.
        raise file.damaged(f"key {key[:60]!a} is an array of type {kind}")
    if length > MAX_LAYERS:
        file.skip(length * form.size)
        return Unread(length), strings
    return [item for (item,) in form.iter_unpack(file.take(length * form.size))], strings


def _read_tensors(file: _Bytes, count: int, alignment: int, constants: Any) -> tuple[Tensor, ...]:
    """The tensors in the order of their data, which follow each other without a gap but for the alignment."""
    sizes = {kind.value: (kind.name.lower(), *size) for kind, size in constants.GGML_QUANT_SIZES.items()}
    tensors: list[Tensor] = []
    names: set[str] = set()
    end = 0
    for _ in range(count):
        name = file.text(_MAX_NAME_BYTES)
        dimensions = file.number(_U32)
        if not name or name in names or dimensions > _MAX_DIMENSIONS:
            raise file.damaged(f"tensor {(name or '')[:60]!a} of {dimensions} dimensions, or named twice")
        names.add(name)
        shape = tuple(file.number(_COUNT) for _ in range(dimensions))
        kind, offset = file.number(_U32), file.number(_COUNT)
        if kind not in sizes:
            raise ModelError(
                f"{file.path}: tensor {name[:60]!a} has type {kind}: not known to the installed gguf package",
                "a newer one may know it: pip install -U gguf",
            )
        type_name, block_elements, block_bytes = sizes[kind]
        tensor = Tensor(name, shape, type_name, 0)
        if shape and shape[0] % block_elements:
            raise file.damaged(f"tensor {name[:60]!a}: blocks of {block_elements} do not divide a row of {shape[0]:,}")
        tensor = tensor._replace(bytes=tensor.elements // block_elements * block_bytes)
        if offset != end:
            raise file.damaged(f"the data of tensor {name[:60]!a} do not follow the one before")
        # The last tensor's padding need not be there.
        last = end + tensor.bytes
        end = -(-last // alignment) * alignment
        tensors.append(tensor)
    start = -(-file.position // alignment) * alignment
    if tensors and last and start + last > file.size:
        raise UsageError(
            f"{file.path}: cut off: the header describes {last:,} bytes of tensors, the file holds "
            f"{max(file.size - start, 0):,}",
            "download it again, or get the whole file",
        )
    return tuple(tensors)
