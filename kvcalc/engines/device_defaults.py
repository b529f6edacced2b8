"""The defaults that engines choose by device: the tokens in a step, the requests that run, the prefill kernel."""

from __future__ import annotations

from kvcalc.engines.reserve import GIB, NEWEST
from kvcalc.records import NamedTuple
from kvcalc.releases import Release

# SGLang's defaults, in rows of (device memory below this many GiB, tokens in a prefill step, largest decode graph with
# fewer than four ranks, largest decode graph with four or more).
_SGLANG_BY_MEMORY = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
_SGLANG_LARGEST = (16384, 512, 512)

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
_VLLM_BATCHES = (
    _Batches(16384, 1024, 160 * GIB, Release.of(0, 9), "160 GiB and more"),
    _Batches(8192, 1024, 70 * GIB, Release.of(0, 8), "70 GiB and more, except A100 and GB10"),
    _Batches(2048, 256, 0, Release.of(0), "others"),
)
_SMALL_BATCHES = ("a100", "gb10")


class DeviceDefault(NamedTuple):
    """The default of an engine's option on some devices."""

    option: str
    value: str
    devices: str


def device_settings(
    engine: str, memory_bytes: int, device_name: str, device_class: str | None, release: Release | None
) -> dict[str, str]:
    """Default settings that `engine` chooses by device.

    These are the tokens in one step and the number of requests of vLLM's API server, the prefill kernel of gated delta
    nets, and the tokens in a prefill step of SGLang.
    """
    if engine == "sglang":
        return {"chunked-prefill-size": str(sglang_row(memory_bytes)[0])}
    if engine != "vllm":
        return {}
    rows = [row for row in _vllm_batches(release) if memory_bytes >= row.memory_bytes]
    row = rows[-1] if device_name.startswith(_SMALL_BATCHES) else rows[0]
    prefill = "flashinfer" if device_class in _FLASHINFER_DELTA_NETS else "triton"
    found = {
        "max-num-batched-tokens": str(row.tokens), "max-num-seqs": str(row.requests), "gdn-prefill-backend": prefill
    }  # fmt: skip
    if device_class in _XPU and (release or NEWEST) >= _XPU_BLOCKS_SINCE:
        found["block-size"] = _XPU_BLOCK
    return found


def device_defaults(engine: str, release: Release | None) -> list[DeviceDefault]:
    """Every default that `device_settings` may give for an option that does not need a device."""
    if engine == "sglang":
        sizes = {row[1]: f"less than {row[0]} GiB" for row in _SGLANG_BY_MEMORY}
        largest = {_SGLANG_LARGEST[0]: f"{_SGLANG_BY_MEMORY[-1][0]} GiB and more"}
        return [DeviceDefault("chunked-prefill-size", str(size), said) for size, said in {**sizes, **largest}.items()]
    if engine != "vllm":
        return []
    tokens = [DeviceDefault("max-num-batched-tokens", str(row.tokens), row.devices) for row in _vllm_batches(release)]
    return [
        *tokens,
        DeviceDefault("gdn-prefill-backend", "flashinfer", "Hopper and Blackwell"),
        DeviceDefault("gdn-prefill-backend", "triton", "others"),
    ]


def _vllm_batches(release: Release | None) -> list[_Batches]:
    return [row for row in _VLLM_BATCHES if (release or NEWEST) >= row.since]


def sglang_row(memory_bytes: int) -> tuple[int, ...]:
    """The tokens in a prefill step, and the largest batch in a graph with few devices and with four or more."""
    return next((row[1:] for row in _SGLANG_BY_MEMORY if memory_bytes < row[0] * GIB), _SGLANG_LARGEST)


def sglang_prefill_tokens(memory_bytes: int) -> int:
    """The tokens in a prefill step of SGLang on a device (chunked_prefill_size)."""
    return sglang_row(memory_bytes)[0]
