"""What vLLM loads beside the weights: the padding of experts in MXFP4, and tables.

Source: mxfp4_round_up_hidden_size_and_intermediate_size and the order of the backends (fused_moe/oracle/mxfp4.py, vLLM
0.33.0). gpt-oss's matrices of 2,880 become 3,072 x 2,944 with Marlin: 13.72 GiB of gpt-oss-20b are loaded on an A100,
and 65.97 GiB of gpt-oss-120b (vllm-project/vllm#23278), instead of 12.82 and 60.77. On Hopper, Triton's layout pads the
inputs of the values only (hopper_value.py, triton_kernels): 64.38 GiB (vllm-project/vllm#33155).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from kvcalc.engines.weight_padding import Tile
from kvcalc.model.spec import ORIGINAL, ModelSpec, rotation_type
from kvcalc.throughput.hardware import Gpu

_MARLIN = _TRTLLM = Tile(256, 128)
_BY_CLASS: dict[str | None, Tile] = {
    "turing": _MARLIN, "ampere": _MARLIN, "ada": _MARLIN, "blackwell-rtx": _MARLIN, "blackwell": _TRTLLM,
    "hopper": Tile(256, 256, inputs_only=True),
}  # fmt: skip
_OF_AMD = Tile(256, 256)


def tile_of(gpu: Gpu) -> Tile | None:
    """The sizes of the kernels for this device. None if they are not known."""
    return _OF_AMD if gpu.vendor == "AMD" else _BY_CLASS.get(gpu.device_class)


# The tables of cosines and sines that vLLM makes while it loads a model: bytes on every device.
# A table has a row for each of the model's max_position_embeddings, whatever --max-model-len is, and an element for
# each rotated dimension of a head. It has the model's 16-bit type, all layers with the same rotation share it, and no
# rank has only a part of it. It is in "Model loading took". Source: get_rope and RotaryEmbeddingBase
# (model_executor/layers/rotary_embedding, vLLM 0.14.1, 0.19.0 and 0.33.0); vllm-project/vllm#44738 measures it.

_ELEMENT_BYTES = 2
# The part of a head that is rotated, where the class of a type has a default that is not the whole head.
_ROTATED = {
    "glm": Fraction(1, 2), "glm4": Fraction(1, 2), "glm4_moe": Fraction(1, 2), "glm4v_moe_text": Fraction(1, 2),
    "gpt_neox": Fraction(1, 4), "nemotron": Fraction(1, 2), "persimmon": Fraction(1, 2), "phi": Fraction(1, 2),
    "qwen3_next": Fraction(1, 4), "qwen3_5_text": Fraction(1, 4), "qwen3_5_moe_text": Fraction(1, 4),
    "stablelm": Fraction(1, 4),
}  # fmt: skip
# Types that rotate by the place in an image. Their tables have four times the rows (mrope.py).
_BY_PLACE = (
    "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text",
)  # fmt: skip
_PLACE_ROWS = 4


def rotary_tables(spec: ModelSpec) -> tuple[tuple[str, int], ...]:
    """The name and the bytes of all tables of a model, or nothing if its layers rotate nothing."""
    shapes = [mixer.shape for group in spec.layers for mixer in group.layer.attention]
    dimensions = sum(int(width * _rotated(spec, width)) for width, _ in {(s.rope_dim, s.rope_theta) for s in shapes})
    size = _rows(spec) * dimensions * _ELEMENT_BYTES
    return (("rotary tables", size),) if size else ()


def _rotated(spec: ModelSpec, width: int) -> Fraction:
    """The part of `width` dimensions that is rotated. Gemma 4 fills its tables up to the head (gemma4_rope.py)."""
    if spec.attention.is_latent or spec.model_type.startswith("gemma4"):
        return Fraction(1)
    scaling, whole = _scaling(spec), spec.attention.qk_head_dim
    for key in ("partial_rotary_factor", "rotary_pct"):
        stated = scaling.get(key, spec.stated.get(key))
        if isinstance(stated, (int, float)) and 0 < stated <= 1:
            return Fraction(stated)
    dimensions = spec.stated.get("rotary_dim")
    if isinstance(dimensions, int) and 0 < dimensions <= whole:
        return Fraction(dimensions, whole)
    return _ROTATED.get(spec.model_type, Fraction(1))


def _rows(spec: ModelSpec) -> int:
    """The positions that a table has. A longer context by a factor counts from the length before it."""
    rows, scaling = spec.max_position_embeddings or 0, _scaling(spec)
    kind, factor = rotation_type(scaling), scaling.get("factor")
    # Phi-3 has the original length beside the rotation.
    original = scaling.get(ORIGINAL, spec.stated.get(ORIGINAL))
    before = original if isinstance(original, int) else rows
    if kind in ("yarn", "deepseek_yarn") and isinstance(factor, (int, float)):
        rows = int(before * factor)
    elif kind in ("linear", "dynamic") and isinstance(factor, (int, float)) and "alpha" not in scaling:
        rows = int(rows * factor)
    elif kind in ("longrope", "su") and isinstance(original, int):
        rows += original
    return rows * (_PLACE_ROWS if "mrope_section" in scaling or spec.model_type in _BY_PLACE else 1)


def _scaling(spec: ModelSpec) -> Mapping[str, object]:
    """What the config says about the rotation."""
    rotations = spec.rotations
    return rotations[0] if len(rotations) == 1 else {}
