"""The bytes of one quantised matrix, including its scales and zero points."""

from __future__ import annotations

from kvcalc.records import NamedTuple


class Format(NamedTuple):
    """How a matrix of `rows` outputs by `columns` inputs is stored.

    - Elements of `bits` bits are packed along a row into words of `word_bits`.
    - A scale of `scale_bytes` covers `group` columns of a row (0: the whole row), a block of `block` (rows, columns),
      or with `per_tensor` the whole matrix.
    - With `zero_points`, each scale has a zero point of `bits` bits, packed like the elements.
    - Each column has `index_bytes` more (GPTQ's g_idx).
    - The matrix has `constant_bytes` more: global and activation scales, and a stored shape.
    - With `nested`, that many scales share an fp32 scale of their own (bitsandbytes).
    - With `plain_bytes`, a matrix whose columns `group` does not divide is not quantised. Its elements have that size.
    - With `otherwise`, such a matrix is stored in that format.
    """

    name: str
    bits: int
    word_bits: int = 8
    scale_bytes: int = 0
    group: int = 0
    block: tuple[int, int] | None = None
    per_tensor: bool = False
    zero_points: bool = False
    index_bytes: int = 0
    constant_bytes: int = 0
    nested: int = 0
    plain_bytes: int = 0
    otherwise: Format | None = None

    def bytes_of(self, rows: int, columns: int) -> int:
        """The bytes of one matrix without its bias."""
        if self.group and columns % self.group:
            if self.otherwise is not None:
                return self.otherwise.bytes_of(rows, columns)
            if self.plain_bytes:
                return rows * columns * self.plain_bytes
        word_bytes = self.word_bits // 8
        payload = rows * _ceil(columns * self.bits, self.word_bits) * word_bytes
        groups = _ceil(columns, self.group) if self.group else 1
        if self.per_tensor:
            scales = 1
        elif self.block is not None:
            scales = _ceil(rows, self.block[0]) * _ceil(columns, self.block[1])
        else:
            scales = rows * groups
        above = _ceil(scales, self.nested) * 4 if self.nested else 0
        zeros = groups * _ceil(rows * self.bits, self.word_bits) * word_bytes if self.zero_points else 0
        return payload + scales * self.scale_bytes + above + zeros + columns * self.index_bytes + self.constant_bytes


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def fp8_block(rows: int, columns: int) -> Format:
    """fp8 with one fp32 scale (weight_scale_inv) per block. DeepSeek-V3 is published in this format."""
    return Format("fp8", 8, scale_bytes=4, block=(rows, columns))


# modelopt stores one fp32 scale for the weights and one for the inputs. Its W4A16 format has no scale for the inputs.
FP8_TENSOR = Format("fp8", 8, scale_bytes=4, per_tensor=True)
FP8_MODELOPT = FP8_TENSOR._replace(constant_bytes=4)
NVFP4 = Format("nvfp4", 4, scale_bytes=1, group=16, constant_bytes=8)
NVFP4_WEIGHT_ONLY = NVFP4._replace(constant_bytes=4)
MXFP4 = Format("mxfp4", 4, scale_bytes=1, group=32)
MXFP8 = Format("mxfp8", 8, scale_bytes=1, group=32)
FP8_CHANNEL = Format("fp8", 8, scale_bytes=4)
FP32 = Format("fp32", 32)
INT8_ROW = Format("int8", 8, scale_bytes=4)
BNB_4BIT = Format("int4", 4, scale_bytes=4, group=64, constant_bytes=16 * 4)
BNB_4BIT_TWICE = BNB_4BIT._replace(scale_bytes=1, nested=256, constant_bytes=(16 + 256 + 1) * 4)
