"""The platforms of both pools, which may be the same, the link between them, and which can read each other's cache.

A cache can only be read where it has the layout that it was written in. vLLM's instances refuse each other if their
attention backends differ (compute_nixl_compatibility_hash, kv_connector/v1/nixl/metadata.py, 0.33.0), and the default
backend follows from the architecture (_get_backend_priorities, platforms/cuda.py). SGLang's refuse another size of
pages, which follows from the backend, and another type (CommonKVReceiver, srt/disaggregation/common/conn.py, 0.5.23).
So pools are only mixed among devices of one architecture, whose caches have the same type and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import cast

from kvcalc.errors import KvcalcError, UsageError
from kvcalc.planning.plan.replicas import more_devices
from kvcalc.planning.plan.traffic import Platform
from kvcalc.records import NamedTuple
from kvcalc.server.case import Case
from kvcalc.server.transfer import NVLINK, PCIE, link_bytes_per_second
from kvcalc.throughput.hardware import Gpu

# A machine has at most this many devices, which PCIe connects.
_BOX = 8


class Link(NamedTuple):
    """The link between the instances: bytes per second of one device, and its name, if it was given."""

    bytes_per_second: int
    name: str | None


class PoolPlatforms(NamedTuple):
    """The kinds of device of the prefill and of the decode instances, both of one engine.

    `weights` are what a device of each counts when pools are compared: its price, or 1. `most` are the most devices of
    the prefill instances, of the decode instances, and of both.
    """

    prefill: Platform
    decode: Platform
    link: Link
    weights: tuple[float, float]
    most: tuple[int, int, int]

    @property
    def names(self) -> tuple[str, str]:
        return self.prefill.gpu.name, self.decode.gpu.name

    @property
    def is_mixed(self) -> bool:
        return self.prefill.gpu.name != self.decode.gpu.name

    @property
    def text(self) -> str:
        """The names of the devices, such as `h100-sxm + h200-sxm`."""
        return " + ".join(dict.fromkeys(self.names))

    def weigh(self, devices: tuple[int, int]) -> float:
        """The weighted number of `devices` of each pool."""
        return devices[0] * self.weights[0] + devices[1] * self.weights[1]

    def allow(self, devices: tuple[int, int]) -> bool:
        """Whether these numbers of devices are allowed."""
        return devices[0] <= self.most[0] and devices[1] <= self.most[1] and sum(devices) <= self.most[2]

    def cost_per_hour(self, devices: tuple[int, int]) -> float | None:
        """The price of these devices of each pool. None if the price of a kind is not known."""
        if self.prefill.price is None or self.decode.price is None:
            return None
        return devices[0] * self.prefill.price + devices[1] * self.decode.price

    def why_more(self, devices: tuple[int, int], best: tuple[PoolPlatforms, tuple[int, int]]) -> str | None:
        """Why pools with these devices cost more than the best ones: money or devices. None if they do not."""
        other, fewer = best
        if not self.is_mixed:
            return more_devices(self.prefill, sum(devices), sum(fewer)) if sum(devices) > sum(fewer) else None
        cost, least = self.cost_per_hour(devices), other.cost_per_hour(fewer)
        if cost is not None and least is not None and cost > least:
            return f"{cost:,.2f} per hour instead of {least:,.2f}"
        return f"{sum(devices):,} devices instead of {sum(fewer):,}" if sum(devices) > sum(fewer) else None


def same_kind(kind: Platform, transfer: int | str) -> PoolPlatforms:
    """Both pools on one kind of device. UsageError (exit 2) if the link is not known, or not for this device."""
    link = _link_of(transfer, kind)
    most = _most_devices(kind, link)
    return PoolPlatforms(kind, kind, link, (1.0, 1.0), (most, most, most))


def joined_kinds(kinds: Sequence[Platform], transfer: int | str, most: int) -> list[PoolPlatforms]:
    """All pairs of different `kinds` that can be joined, with at most `most` devices together.

    The kinds are those of one engine. All pairs are compared by cost, or if a kind has no price, by their devices.
    """
    pairs = [
        pair
        for pair in permutations(kinds, 2)
        if pair[0].gpu.name != pair[1].gpu.name and join_caches(*(kind.gpu for kind in pair))
    ]
    if transfer == NVLINK:
        return []
    by_cost = all(kind.price is not None for pair in pairs for kind in pair)
    joined = (_two_kinds(prefill, decode, transfer, most, by_cost) for prefill, decode in pairs)
    return [pair for pair in joined if pair is not None]


def _two_kinds(
    prefill: Platform, decode: Platform, transfer: int | str, most: int, by_cost: bool
) -> PoolPlatforms | None:
    """Pools of at most `most` devices together, joined by the slower link. None if a kind has no link of this name."""
    try:
        link = min((_link_of(transfer, kind) for kind in (prefill, decode)), key=lambda link: link.bytes_per_second)
    except KvcalcError:
        return None
    joined = [_most_devices(kind, link) for kind in (prefill, decode)]
    is_limited = any(number < kind.max_devices for number, kind in zip(joined, (prefill, decode)))
    prices = cast("tuple[float, float]", (prefill.price, decode.price))
    return PoolPlatforms(
        prefill,
        decode,
        link,
        prices if by_cost else (1.0, 1.0),
        (joined[0], joined[1], min(*joined, most) if is_limited else most),
    )


def _link_of(transfer: int | str, kind: Platform) -> Link:
    if isinstance(transfer, int):
        return Link(transfer, None)
    return Link(link_bytes_per_second(transfer, kind.gpu), transfer.casefold())


def _most_devices(kind: Platform, link: Link) -> int:
    """The most devices that the link connects."""
    if link.name == NVLINK and kind.gpu.interconnect is not None:
        return min(kind.max_devices, kind.gpu.interconnect.devices)
    return min(kind.max_devices, _BOX) if link.name == PCIE else kind.max_devices


# Both are architectures of compute capability 8, for which vLLM and SGLang choose the same backends.
_ALIKE = {"ada": "ampere"}


def join_caches(first: Gpu, second: Gpu) -> bool:
    """Whether instances on both kinds of device can read each other's cache, by their architecture."""
    known = _architecture(first)
    return known is not None and first.vendor == second.vendor and known == _architecture(second)


def cache_of(case: Case) -> tuple[str, int]:
    """The facts that must be equal in both instances: the type of the cache, and the tokens in a block."""
    return case.workload.kv_dtype.name, case.prefixes().block_tokens


def check_joined(prefill: Case, decode: Case) -> None:
    """Raise UsageError (exit 2) for instances on two kinds of device that cannot read each other's cache."""
    first, second = prefill.devices.gpu, decode.devices.gpu
    if first.name == second.name:
        return
    if not join_caches(first, second):
        raise UsageError(
            f"--prefill-gpu {first.name}: its cache has a different layout than that of {second.name}",
            "use two kinds of device of one architecture, such as h100 and h200",
        )
    if cache_of(prefill) != cache_of(decode):
        raise UsageError(f"--prefill-gpu {first.name}: its cache has another type or other blocks than {second.name}'s")


def _architecture(gpu: Gpu) -> str | None:
    name = gpu.device_class
    return name if name is None else _ALIKE.get(name, name)
