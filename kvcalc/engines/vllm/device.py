"""The defaults that vLLM chooses by device: tokens in a step, running requests, the prefill kernel and the block."""

from __future__ import annotations

from kvcalc.engines.engine import DeviceDefault
from kvcalc.engines.reserve import GIB, NEWEST
from kvcalc.records import NamedTuple
from kvcalc.releases import Release

# The devices on which FlashInfer prefills gated delta nets, if CUDA is 13 or newer and keys have 128 elements, as in
# every Qwen model (_resolve_gdn_prefill_backend, layers/mamba/gdn/qwen_gdn_linear_attn.py, vLLM 0.33.0).
_FLASHINFER_DELTA_NETS = ("hopper", "blackwell", "blackwell-rtx")

# Intel's GPUs, on which every block is a multiple of 64 tokens since this release (XPU_BLOCK of engines/vllm).
_XPU, _XPU_BLOCKS_SINCE, _XPU_BLOCK = ("xe-hpg", "xe2"), Release.of(0, 32), "64"


class _Batches(NamedTuple):
    """The tokens in one step and the requests of vLLM's API server, on the `devices` with at least this memory."""

    tokens: int
    requests: int
    memory_bytes: int
    since: Release
    devices: str


# The largest devices first (get_batch_defaults, engine/arg_utils.py). The middle row is not for these devices.
_BATCHES = (
    _Batches(16384, 1024, 160 * GIB, Release.of(0, 9), "160 GiB and more"),
    _Batches(8192, 1024, 70 * GIB, Release.of(0, 8), "70 GiB and more, except A100 and GB10"),
    _Batches(2048, 256, 0, Release.of(0), "others"),
)
_SMALL_BATCHES = ("a100", "gb10")


def device_settings(
    memory_bytes: int, device_name: str, device_class: str | None, release: Release | None
) -> dict[str, str]:
    """The tokens in one step and the number of requests of the API server, and the prefill kernel of delta nets."""
    rows = [row for row in _batches(release) if memory_bytes >= row.memory_bytes]
    row = rows[-1] if device_name.startswith(_SMALL_BATCHES) else rows[0]
    prefill = "flashinfer" if device_class in _FLASHINFER_DELTA_NETS else "triton"
    found = {
        "max-num-batched-tokens": str(row.tokens), "max-num-seqs": str(row.requests), "gdn-prefill-backend": prefill
    }  # fmt: skip
    if device_class in _XPU and (release or NEWEST) >= _XPU_BLOCKS_SINCE:
        found["block-size"] = _XPU_BLOCK
    return found


def device_defaults(release: Release | None) -> list[DeviceDefault]:
    """Every default of these that does not need a device."""
    tokens = [DeviceDefault("max-num-batched-tokens", str(row.tokens), row.devices) for row in _batches(release)]
    return [
        *tokens,
        DeviceDefault("gdn-prefill-backend", "flashinfer", "Hopper and Blackwell"),
        DeviceDefault("gdn-prefill-backend", "triton", "others"),
    ]


def _batches(release: Release | None) -> list[_Batches]:
    return [row for row in _BATCHES if (release or NEWEST) >= row.since]
