"""What vLLM refuses to start (`engines/starts.py`).

Read from the wheels of 0.11.0, 0.12.0, 0.13.0, 0.14.0, 0.19.0, 0.25.0, 0.27.0 to 0.31.0 and 0.33.0; of the releases
between two of them, what both refuse is refused.

- Blocks of fp8: `validate_fp8_block_shape` (layers/quantization/utils/fp8_utils.py). Since 0.14, parts of
  joined matrices are let through (`_maybe_allow_fp8_block_shape_mismatch`, layers/linear.py). Since 0.29, the blocks
  of experts are refined to 32 or more (`refine_fp8_moe_block_shape`, layers/fused_moe/oracle/fp8.py).
- Compute capabilities: `get_min_capability` of each method (layers/quantization); bf16: `check_if_supports_dtype`
  (platforms/cuda.py); sparse latent attention: `supports_compute_capability` of the backends in
  `_get_backend_priorities` (platforms/cuda.py, v1/attention/backends/mla).
"""

from __future__ import annotations

from kvcalc.engines.starts import Rules
from kvcalc.releases import Release

_BF16 = 80
_OF_0_11 = {
    "fp8": 80, "fbgemm_fp8": 80, "awq": 75, "gptq": 60, "bitsandbytes": 70, "mxfp4": 80, "modelopt fp8": 89,
    "modelopt nvfp4": 80, "compressed-tensors": 70, "compressed-tensors fp8": 80, "compressed-tensors nvfp4": 80,
    "compressed-tensors int4": 80, "compressed-tensors int8": 75,
}  # fmt: skip
_OF_0_12 = {
    **_OF_0_11, "fp8": 75, "modelopt nvfp4": 75, "compressed-tensors fp8": 75, "compressed-tensors nvfp4": 75,
    "compressed-tensors int4": 75,
}  # fmt: skip
_OF_0_26 = {**_OF_0_12, "modelopt fp8": 80}

_NEWEST = Rules(
    Release.of(0, 29), joined=False, least_block=32, capabilities=_OF_0_26, bf16=_BF16, sparse_latent=(9, 10, 12)
)
RULES = (
    _NEWEST,
    _NEWEST._replace(since=Release.of(0, 26), least_block=0),
    _NEWEST._replace(since=Release.of(0, 20), least_block=0, capabilities=_OF_0_12),
    _NEWEST._replace(since=Release.of(0, 14), least_block=0, capabilities=_OF_0_12, sparse_latent=(9, 10)),
    _NEWEST._replace(since=Release.of(0, 12), least_block=0, joined=True, capabilities=_OF_0_12, sparse_latent=(9, 10)),
    Rules(Release.of(0, 11), capabilities=_OF_0_11, bf16=_BF16, sparse_latent=(9, 10)),
    Rules(None),  # blocks of fp8 alone (vllm-project/vllm#17569)
)
