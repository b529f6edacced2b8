"""DeepSeek-V4.1's layers in vLLM: a window in each, and in the source layers entries, index keys and a ring.

Source: DeepseekV4Attention, DeepseekV4IndexerCache and get_supported_kernel_block_sizes (attention.py, compressor.py
and sparse_mla.py of models/deepseek_v41), DeepseekV4SWACache (v1/attention/backends/mla/sparse_swa.py) and
_select_dsv4_attn_cls (models/deepseek_v41/nvidia/model.py), vLLM 0.33.0.
"""

from __future__ import annotations

from math import lcm

from kvcalc.engines.place import Place
from kvcalc.engines.rounding import ceil_div
from kvcalc.engines.vllm.defaults import V41
from kvcalc.engines.vllm.pages import MLA, RING, SLIDING, Page
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.model.caches import CompressedAttention
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple

_SINCE = (0, 33, 0)
_HEAD_DIM, _ROPE_DIM, _WINDOW_BLOCK = 512, 64, 32
_LEAST_RING = 8
# Mega attention, the default on B200 and B300, needs so many heads of each group of the output's projection.
_MEGA_HEADS = 8


class _Rows(NamedTuple):
    """The bytes of a row in the window and of an entry, and of what pages are a multiple."""

    window: int
    entry: int
    alignment: int


_V4, _NVFP4 = _Rows(584, 584, 576), _Rows(528, 288, 512)
NVFP4 = "nvfp4_ds_mla"


def v41_rows(spec: ModelSpec, name: str, place: Place) -> str:
    """The type of the rows that `name` (fp8 or a packed type) means on this device.

    On B200 and B300 it is nvfp4 for the entries. ModelError (exit 3) for fp8 entries there.
    """
    if place.is_sm100 and name == "fp8_ds_mla":
        raise ModelError(f"{spec.name}: vLLM's layout of fp8_ds_mla on B200 and B300 is not modelled", "use fp8")
    return NVFP4 if place.is_sm100 and name == "fp8" else name


def check_v41_device(spec: ModelSpec, device_class: str | None) -> None:
    """Raise ModelError (exit 3) for a device whose rows were not read."""
    if spec.model_type in V41 and device_class not in (None, "hopper", "blackwell"):
        raise ModelError(f"{spec.name}: vLLM's layout of {spec.model_type} on this device is not modelled")


def v41_pages(
    spec: ModelSpec, cache: CompressedAttention, dtype: Dtype, block_size: int, drafted: int, place: Place
) -> list[tuple[str, Page]]:
    """The pages of one layer, each with the part of the cache that it stores (`CompressedAttention.stored_parts`).

    The ring has keys and gates of the open entry in fp32, with room for `drafted` tokens.

    Raises UsageError (exit 2) for types that the kernels do not read, and ModelError (exit 3) for what was not read.
    """
    if not place.since(*_SINCE):
        raise ModelError(f"{spec.name}: vLLM before 0.33 does not run {spec.model_type}", "use --engine vllm")
    if dtype.name not in ("fp8", "fp8_ds_mla", NVFP4):
        raise UsageError(f"--kv-dtype {dtype.name}: vLLM keeps the cache of {spec.name} in fp8", "use --kv-dtype fp8")
    if cache.head_dim != _HEAD_DIM or spec.attention.rope_dim != _ROPE_DIM:
        raise ModelError(f"{spec.name}: vLLM's kernels need head_dim 512 and qk_rope_head_dim 64")
    rows = _NVFP4 if dtype.name == NVFP4 else _V4
    stride = lcm(rows.window, rows.entry) if rows is _NVFP4 else 0
    if rows is _NVFP4 and spec.attention.num_heads < _MEGA_HEADS:
        raise ModelError(f"{spec.name}: vLLM's layout with less than {_MEGA_HEADS} heads per device is not modelled")

    pages = [("window", Page(SLIDING, _WINDOW_BLOCK, rows.window, cache.window, stride=stride).aligned(rows.alignment))]
    if not (rate := cache.compress_rate):
        return pages
    key_bytes = cache.index_head_dim + ceil_div(cache.index_head_dim, 128) * 4
    pages.append(("compressed", Page(MLA, block_size, rows.entry, rate=rate).aligned(rows.alignment)))
    pages.append(("index keys", Page(MLA, block_size, key_bytes, rate=rate).aligned(rows.alignment)))
    if rate > 1:
        tokens = max(_LEAST_RING, 1 << (drafted + 1).bit_length())
        pages.append(("buffers", Page(RING, tokens, 2 * cache.head_dim * 4)))
    return pages
