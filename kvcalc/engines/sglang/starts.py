"""What SGLang refuses to start (`engines/starts.py`). Read from the wheel of 0.5.23, and counted for every release.

- Blocks of fp8: `validate_block_quant_shapes` and the experts' `create_weights` (srt/layers/quantization/fp8.py).
- Compute capabilities: `maybe_downgrade_dtype_for_legacy_gpu` (srt/model_executor/model_runner_components), which takes
  fp16 for bf16 before 8.0, and `get_min_capability` of each method (srt/layers/quantization), as model_loader/loader.py
  asks for them.
"""

from __future__ import annotations

from kvcalc.engines.starts import Rules

_CAPABILITIES = {
    "": 75, "fp8": 80, "awq": 75, "gptq": 60, "bitsandbytes": 70, "mxfp4": 80, "modelopt fp8": 89, "modelopt nvfp4": 80,
    "compressed-tensors": 70, "compressed-tensors fp8": 80, "compressed-tensors nvfp4": 100,
    "compressed-tensors int4": 80, "compressed-tensors int8": 80, "mxfp8": 100,
}  # fmt: skip

RULES = Rules(None, capabilities=_CAPABILITIES)
