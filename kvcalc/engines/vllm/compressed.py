"""DeepSeek-V4's layers in vLLM: a window, compressed entries, index keys, and the states of the compressors.

Source: DeepseekV4Attention, DeepseekV4IndexerCache (models/deepseek_v4/attention.py), CompressorStateCache
(models/deepseek_v4/compressor.py) and DeepseekV4SWACache (v1/attention/backends/mla/sparse_swa.py), vLLM 0.33.0. The
pages are the same since 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.engines.vllm.blocks import COMPRESSED_BLOCK
from kvcalc.engines.vllm.pages import MLA, SLIDING, Page
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.model.caches import CompressedAttention
from kvcalc.model.spec import ModelSpec

_WINDOW_BLOCK = 64
_STATE_BLOCKS: Mapping[int, int] = {4: 4, 128: 8}

# fp8_ds_mla: 448 of 512 elements in fp8, the 64 rotary ones in 16 bits, and 8 bytes of scales. FlashMLA needs pages of
# a multiple of 576 bytes.
_HEAD_DIM, _ROPE_DIM, _ROW_BYTES, _ALIGNMENT = 512, 64, 584, 576


def compressed_pages(
    spec: ModelSpec, cache: CompressedAttention, dtype: Dtype, block_size: int
) -> list[tuple[str, Page]]:
    """The pages of one layer, each with the part of the cache that it stores (`CompressedAttention.stored_parts`).

    A compressor keeps keys and gates in fp32 for the tokens of one entry, or of two if entries overlap. The buffers of
    the two compressors are one part of the cache, which counts for the first of their pages.

    Raises UsageError (exit 2) for types that the kernels do not read, and ModelError (exit 3) for other dimensions.
    """
    if dtype.name not in ("fp8", "fp8_ds_mla"):
        raise UsageError(f"--kv-dtype {dtype.name}: vLLM keeps the cache of {spec.name} in fp8", "use --kv-dtype fp8")
    if block_size % COMPRESSED_BLOCK:
        raise UsageError(
            f"--block-size {block_size}: vLLM's kernels for {spec.name} need multiples of {COMPRESSED_BLOCK}",
            f"use --block-size {COMPRESSED_BLOCK}",
        )
    rate = cache.compress_rate
    if cache.head_dim != _HEAD_DIM or spec.attention.rope_dim != _ROPE_DIM or rate not in (0, *_STATE_BLOCKS):
        raise ModelError(f"{spec.name}: vLLM's kernels need head_dim 512, qk_rope_head_dim 64 and rates of 4 or 128")
    pages = [("window", _aligned(Page(SLIDING, _WINDOW_BLOCK, _ROW_BYTES, cache.window)))]
    if not rate:
        return pages
    runs = 2 if cache.index_head_dim else 1
    pages.append(("compressed", _aligned(Page(MLA, block_size, _ROW_BYTES, rate=rate))))
    widths = [("buffers", cache.head_dim)]
    if cache.index_head_dim:
        # In fp8, with an fp32 scale per 128 elements.
        key_bytes = cache.index_head_dim + ceil_div(cache.index_head_dim, 128) * 4
        pages.append(("index keys", _aligned(Page(MLA, block_size, key_bytes, rate=rate))))
        widths.append(("", cache.index_head_dim))
    for part, width in widths:
        state_bytes = 2 * runs * width * 4
        pages.append((part, _aligned(Page(SLIDING, _STATE_BLOCKS[rate], state_bytes, runs * rate))))
    return pages


def _aligned(page: Page) -> Page:
    padded = round_up(page.own_bytes, _ALIGNMENT)
    return page._replace(padded_bytes=padded) if padded != page.own_bytes else page
