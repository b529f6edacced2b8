"""The type of a model's weights in MLX, which has types of its own."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import parse_weight_dtype
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note

# The MLX type with as many bits as a type of other engines. mlx_lm.convert makes these types (--q-bits, --q-mode). MLX
# runs none of llama.cpp's types.
_SAME_BITS = {
    "q4_0": "mlx-4bit", "q4_1": "mlx-4bit", "q4_k_s": "mlx-4bit", "q4_k_m": "mlx-4bit", "iq4_nl": "mlx-4bit",
    "int4": "mlx-4bit", "q5_0": "mlx-5bit", "q5_1": "mlx-5bit", "q5_k_s": "mlx-5bit", "q5_k_m": "mlx-5bit",
    "q6_k": "mlx-6bit", "q8_0": "mlx-8bit", "int8": "mlx-8bit", "mxfp4": "mlx-mxfp4", "mxfp8": "mlx-mxfp8",
    "nvfp4": "mlx-nvfp4",
}  # fmt: skip

# Methods whose weights MLX keeps as they are (load_model, mlx_lm/utils.py). None is MLX's own.
_KEPT = (None, "mxfp4")


def weight_dtype(spec: ModelSpec, asked: str | None) -> tuple[str | None, Note | None]:
    """The weight type that counts for `asked` (None: the config's own type), and a note if it is another one.

    Classes whose checkpoints are fp8 convert them to bf16 (`sanitize` of deepseek_v3, minimax and others). Raises
    UsageError (exit 2) for a type that MLX does not have, and ModelError (exit 3) if the bytes of the config's
    quantization are not known in MLX.
    """
    if asked is None:
        return _own(spec)
    found = parse_weight_dtype(asked)
    if found is None or found.is_float or found.name.startswith("mlx-"):
        return asked, None
    if found.name not in _SAME_BITS:
        raise UsageError(f"--dtype {asked}: MLX has no {found.name} weights", "for example --dtype mlx-8bit or bf16")
    same = _SAME_BITS[found.name]
    return same, Note("weights", "mlx-type", f"MLX has no {found.name}: the weights are counted as {same}")


def _own(spec: ModelSpec) -> tuple[str | None, Note | None]:
    stated = spec.quantization
    if not isinstance(stated, Mapping) or stated.get("quant_method") in _KEPT:
        return None, None
    method = stated.get("quant_method")
    if method == "fp8":
        dtype = spec.torch_dtype or "bf16"
        text = f"MLX has no fp8: the weights are counted as {dtype}. --dtype mlx-4bit counts a 4-bit conversion"
        return dtype, Note("weights", "mlx-type", text)
    raise ModelError(
        f"{spec.name}: the bytes of {ascii(method)[:40]} weights in MLX are not modelled",
        "for a conversion to 4 bits, use --dtype mlx-4bit",
    )
