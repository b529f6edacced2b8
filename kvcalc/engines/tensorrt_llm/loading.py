"""The sizes to which TensorRT-LLM rounds experts in MXFP4.

Source: create_weights of MXFP4WeightFusedMoEMethod and its classes (_torch/modules/fused_moe/quantization.py at commit
002366a4074c), and resolve_moe_backend (_torch/model_config.py), which takes TRTLLM's kernels on B200 and CUTLASS's on
RTX Blackwell. On a GB10, 63.52 GiB of gpt-oss-120b are loaded instead of 60.77.
"""

from __future__ import annotations

from kvcalc.engines.weight_padding import Tile
from kvcalc.throughput.hardware import Gpu

_BY_CLASS = {"blackwell": Tile(512, 128, outputs=128), "blackwell-rtx": Tile(128, 128)}


def tile_of(gpu: Gpu) -> Tile | None:
    """The sizes of the kernels for this device. None if they are not known, as on Hopper (Triton)."""
    return _BY_CLASS.get(gpu.device_class or "")
