"""What TensorRT-LLM does not support (`engines/starts.py`), counted for every release.

Source: the precisions of each architecture in docs/source/legacy/reference/support-matrix.md, 2026. Scales of partial
blocks of fp8 are rounded up (modules/linear.py and fused_moe/quantization.py in tensorrt_llm/_torch), so no layout is
refused for them.
"""

from __future__ import annotations

from kvcalc.engines.starts import Rules

_CAPABILITIES = {
    "": 80, "fp8": 89, "compressed-tensors fp8": 89, "modelopt fp8": 89, "nvfp4": 100, "modelopt nvfp4": 100,
    "compressed-tensors nvfp4": 100,
}  # fmt: skip

RULES = Rules(None, inputs=False, outputs=False, joined=False, experts=False, capabilities=_CAPABILITIES)
