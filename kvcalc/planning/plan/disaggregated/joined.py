"""Which prefill and decode instances can read each other's cache.

A cache can only be read where it has the layout that it was written in. vLLM's instances refuse each other if their
attention backends differ (compute_nixl_compatibility_hash, kv_connector/v1/nixl/metadata.py, 0.33.0), and the default
backend follows from the architecture (_get_backend_priorities, platforms/cuda.py). SGLang's refuse another size of
pages, which follows from the backend, and another type (CommonKVReceiver, srt/disaggregation/common/conn.py, 0.5.23).
So pools are only mixed among devices of one architecture, whose caches have the same type and blocks.
"""

from __future__ import annotations

from kvcalc.errors import UsageError
from kvcalc.planning.cases.case import Case
from kvcalc.throughput.hardware import Gpu

# Both are architectures of compute capability 8, for which vLLM and SGLang choose the same backends.
_ALIKE = {"ada": "ampere"}


def join_caches(first: Gpu, second: Gpu) -> bool:
    """Whether instances on both kinds of device can read each other's cache, by their architecture."""
    known = _architecture(first)
    return known is not None and first.vendor == second.vendor and known == _architecture(second)


def cache_of(case: Case) -> tuple[str, int]:
    """What must be alike in both instances: the type of the cache, and the tokens in a block."""
    return case.workload.kv_dtype.name, case.prefixes().block_tokens


def check_joined(prefill: Case, decode: Case) -> None:
    """Raise UsageError (exit 2) for instances on two kinds of device that cannot read each other's cache."""
    first, second = prefill.devices.gpu, decode.devices.gpu
    if first.name == second.name:
        return
    if not join_caches(first, second):
        raise UsageError(
            f"--prefill-gpu {first.name}: its cache has another layout than that of {second.name}",
            "use two kinds of device of one architecture, such as h100 and h200",
        )
    if cache_of(prefill) != cache_of(decode):
        raise UsageError(f"--prefill-gpu {first.name}: its cache has another type or other blocks than {second.name}'s")


def _architecture(gpu: Gpu) -> str | None:
    name = gpu.device_class
    return name if name is None else _ALIKE.get(name, name)
