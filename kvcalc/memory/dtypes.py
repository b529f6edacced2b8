"""Element types and their sizes in bytes, including block scales."""

from __future__ import annotations

from collections.abc import Iterable

from kvcalc.errors import UsageError, nearest
from kvcalc.records import NamedTuple


class Dtype(NamedTuple):
    """`block_elements` elements take `block_bytes` bytes, including the block's scale.

    `bits` is the width of one element without scales. Models compute in 16 or 32 bits. `v` is the type of V if it
    differs from the type of K (llama.cpp).
    """

    name: str
    bits: int
    block_elements: int = 1
    block_bytes: int = 1
    v: Dtype | None = None

    @property
    def is_float(self) -> bool:
        """Whether a model can compute in this type directly: 16 or 32 bits, no scales."""
        return self.bits >= 16


def by_name(*dtypes: Dtype) -> dict[str, Dtype]:
    """The types, keyed by name."""
    return {dtype.name: dtype for dtype in dtypes}


# Block formats: nvfp4 has an fp8 scale per 16 elements, mxfp4 and mxfp8 an 8-bit exponent per 32 (OCP Microscaling
# v1.0); q8_0 ... iq4_nl hold 32 elements with an fp16 scale (and minimum) per block (ggml-common.h, llama.cpp).
# int8, fp8 and int4 have no scales here. If an engine keeps scales for them, the engine's module counts the scales.
DTYPES = by_name(
    Dtype("fp32", 32, 1, 4),
    Dtype("fp16", 16, 1, 2),
    Dtype("bf16", 16, 1, 2),
    Dtype("fp8", 8, 1, 1),
    Dtype("int8", 8, 1, 1),
    Dtype("int4", 4, 2, 1),
    Dtype("mxfp8", 8, 32, 33),
    Dtype("mxfp4", 4, 32, 17),
    Dtype("nvfp4", 4, 16, 9),
    Dtype("q8_0", 8, 32, 34),
    Dtype("q5_1", 5, 32, 24),
    Dtype("q5_0", 5, 32, 22),
    Dtype("q4_1", 4, 32, 20),
    Dtype("q4_0", 4, 32, 18),
    Dtype("iq4_nl", 4, 32, 18),
)

# MLX's types for weights and caches: 2 to 8 bits, and a scale and a bias of 16 bits for each group of elements. Without
# a group size in the name, groups have 64 elements, which is mlx_lm.convert's default. Its other modes are mxfp4, mxfp8
# and nvfp4 (mx.quantize, MLX 0.32). kvcalc.memory.quantization.mlx says which matrices have the type.
MLX_BITS = (2, 3, 4, 5, 6, 8)
MLX_GROUPS = (32, 64, 128)


def mlx_name(bits: int, group: int) -> str:
    """The name of an MLX type: mlx-4bit, or mlx-4bit-g32 for groups of 32."""
    return f"mlx-{bits}bit" if group == 64 else f"mlx-{bits}bit-g{group}"


MLX_TYPES = by_name(
    *(Dtype(mlx_name(bits, group), bits, group, group * bits // 8 + 4) for group in (64, 32, 128) for bits in MLX_BITS),
    Dtype("mlx-mxfp4", 4, 32, 17),
    Dtype("mlx-mxfp8", 8, 32, 33),
    Dtype("mlx-nvfp4", 4, 16, 9),
)

# llama.cpp's file types for weights, with the sizes of the type that most matrices have: bits, and bytes of a block of
# 256 elements. They are never used for a cache. kvcalc.memory.quantization.gguf_types gives the type of each matrix.
FILE_TYPES = by_name(*(
    Dtype(name, bits, 256, size)
    for bits, size, names in (
        (1, 50, "iq1_s"), (1, 56, "iq1_m"), (2, 66, "iq2_xxs"), (2, 74, "iq2_xs iq2_s"), (2, 82, "iq2_m"),
        (2, 84, "q2_k_s q2_k"), (3, 98, "iq3_xxs"), (3, 110, "iq3_xs iq3_s iq3_m q3_k_s q3_k_m q3_k_l"),
        (4, 136, "iq4_xs"), (4, 144, "q4_k_s q4_k_m"), (5, 176, "q5_k_s q5_k_m"), (6, 210, "q6_k"),
        (2, 54, "tq1_0"), (2, 66, "tq2_0"),
    )
    for name in names.split()
))  # fmt: skip

# File types that have the name of an element type, as llama-quantize writes them: some matrices, such as the output
# head, have another type. The engine llama.cpp means these files by --dtype. kvcalc.memory.quantization.gguf_types
# gives the type of each matrix.
_WITH_FILES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "mxfp4")
GGUF_TYPES = by_name(*(DTYPES[name]._replace(name=f"gguf-{name}") for name in _WITH_FILES))


def gguf_type(name: str) -> str | None:
    """The file type called `name`, ignoring case. None if there is none, or it is one of `FILE_TYPES`."""
    gguf_name = f"gguf-{name.casefold()}"
    return gguf_name if gguf_name in GGUF_TYPES else None


# Other spellings of the same types, used by torch, vLLM and users.
_ALIASES = {
    "float32": "fp32", "f32": "fp32", "float": "fp32", "float16": "fp16", "f16": "fp16", "half": "fp16",
    "bfloat16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip


# What users call types of weights: methods that make them, and the bits of llama.cpp's files. They say too little to be
# a type, and are hints.
_LIKELY = {
    **dict.fromkeys(("awq", "gptq", "w4a16", "autoround"), "int4"), **dict.fromkeys(("w8a8", "w8a16"), "int8"),
    "q2": "q2_k", "q3": "q3_k_m", "q4": "q4_k_m", "q5": "q5_k_m", "q6": "q6_k", "q8": "q8_0",
}  # fmt: skip


def parse_dtype(text: str, option: str, others: Iterable[str] = ()) -> Dtype:
    """The type called `text`, ignoring case. Raises UsageError with the nearest names if it is unknown.

    `others` are names that would also be right.
    """
    name = text.casefold()
    dtype = DTYPES.get(_ALIASES.get(name, name))
    if dtype is None:
        known = (*DTYPES, *others)
        likely = _LIKELY.get(name)
        hint = f"did you mean {likely}?" if likely in known else nearest(text, (*known, *_ALIASES))
        raise UsageError(f"{option} {text[:40]!a}: not a dtype", hint or f"one of {', '.join(known)}")
    return dtype


def parse_weight_dtype(text: str | None) -> Dtype | None:
    """The type of the weights given by --dtype: an element type, a llama.cpp file type or an MLX type.

    `4bit` means mlx-4bit, as in the names of mlx-community. None if it is not given. Raises UsageError with the nearest
    names if the type is unknown.
    """
    if text is None:
        return None
    name = text.casefold()
    scheme = FILE_TYPES.get(name) or GGUF_TYPES.get(name) or MLX_TYPES.get(name)
    scheme = scheme or MLX_TYPES.get(f"mlx-{name}" if "bit" in name else "")
    return scheme or parse_dtype(text, "--dtype", (*FILE_TYPES, *MLX_TYPES))


def pair(k: Dtype, v: Dtype) -> Dtype:
    """The type of a cache that keeps K in type `k` and V in type `v`. Returns `k` if they are the same."""
    return k if k == v else k._replace(name=f"{k.name}/{v.name}", v=v)


def bytes_of(elements: int, dtype: Dtype) -> int:
    """The bytes of `elements` elements, which must fill whole blocks. `check_rows` checks this first for a cache."""
    blocks, rest = divmod(elements, dtype.block_elements)
    if rest:
        raise UsageError(f"{elements} elements do not fill whole blocks of {dtype.block_elements} ({dtype.name})")
    return blocks * dtype.block_bytes


def check_rows(rows: tuple[int, ...], dtype: Dtype) -> None:
    """Raise UsageError if the dtype's blocks do not divide the rows of K and V that one token adds.

    Blocks run along a row and never across tokens.
    """
    for place, row in enumerate(rows):
        used = dtype.v or dtype if place else dtype
        if row % used.block_elements:
            raise UsageError(
                f"{used.name}: blocks of {used.block_elements} do not divide a token's row of {row} elements"
            )
