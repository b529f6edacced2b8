"""The default size of a block, which the kernels of attention decide by model, cache type and device.

Source: update_block_size_for_backend (platforms/interface.py), _get_backend_priorities (platforms/cuda.py) and
get_supported_kernel_block_sizes of every kernel (v1/attention/backends), vLLM 0.33.0. The order of the kernels is the
same since 0.18. Before that, check_and_update_config (platforms/cuda.py of 0.11.2 to 0.16.0) set the size.
"""

from __future__ import annotations

from kvcalc.engines.place import Place, is_fp8
from kvcalc.engines.vllm.defaults import is_sparse
from kvcalc.model.caches import HEADS_CACHES
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, all_caches, has_compressed, latent_of

# Of most kernels, and of MiniMax-M3's: a block has 128 tokens, like the blocks that the indexer selects
# (MiniMaxM3IndexerCache of models/minimax_m3/common/indexer.py).
BLOCK, M3_BLOCK = 16, 128
# All kernels for DeepSeek-V4 need blocks of a multiple of 256 tokens. Windows and states have smaller blocks.
COMPRESSED_BLOCK = 256
MINIMAX_M3 = ("minimax_m3", "minimax_m3_vl_text")

# The indexer of sparse attention reads blocks of 64 tokens, and so does FlashMLA. FlashInfer's MLA reads 32 or 64, and
# CUTLASS's 128.
_SPARSE, _FLASHMLA, _FLASHINFER_MLA, _CUTLASS_MLA = 64, 64, 32, 128
_BY_KERNEL, _FLASHINFER_SINCE = (0, 18), (0, 15)
# FlashAttention 4 reads an fp8 cache of heads of 512 elements in blocks of 64 on Hopper (Gemma 4).
_WIDE_HEADS, _WIDE_BLOCK, _WIDE_SINCE = 512, 64, (0, 31)


@remembered
def step_of(spec: ModelSpec) -> int:
    """The smallest block, of which all others are multiples."""
    if spec.model_type in MINIMAX_M3:
        return M3_BLOCK
    return COMPRESSED_BLOCK if has_compressed(spec) else BLOCK


@remembered
def default_block(spec: ModelSpec, kv_type: object, place: Place) -> int:
    """The tokens of a block if none are given. `kv_type` is the name of the cache's type.

    Without a device, only what the model decides on every device counts.
    """
    if is_sparse(spec):
        return _SPARSE
    if latent_of(spec) is not None:
        return _latent_block(kv_type, place)
    wide = place.device_class == "hopper" and is_fp8(kv_type) and place.since(*_WIDE_SINCE)
    return _WIDE_BLOCK if wide and _has_wide_heads(spec) else step_of(spec)


def _latent_block(kv_type: object, place: Place) -> int:
    """Of MLA in all layers. FlashAttention's kernel for Hopper reads no fp8, and older releases preferred FlashMLA."""
    if place.is_sm100:
        if place.since(*_BY_KERNEL):
            return _FLASHINFER_MLA
        return _FLASHMLA if place.since(*_FLASHINFER_SINCE) else _CUTLASS_MLA
    takes_flashmla = is_fp8(kv_type) or not place.since(*_BY_KERNEL)
    return _FLASHMLA if place.device_class == "hopper" and takes_flashmla else BLOCK


def _has_wide_heads(spec: ModelSpec) -> bool:
    return any(isinstance(cache, HEADS_CACHES) and cache.k_head_dim == _WIDE_HEADS for cache in all_caches(spec))
