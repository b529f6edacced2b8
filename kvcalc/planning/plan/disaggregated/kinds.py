"""The kinds of device of both pools, which may be the same, and the link between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from kvcalc.errors import KvcalcError
from kvcalc.planning.plan.disaggregated.joined import join_caches
from kvcalc.planning.plan.replicas import more_devices
from kvcalc.planning.plan.traffic import Kind
from kvcalc.planning.serving.transfer import NVLINK, PCIE, link_bytes_per_second
from kvcalc.records import NamedTuple

# A machine has at most this many devices, which PCIe connects.
_BOX = 8


class Link(NamedTuple):
    """What connects the instances: bytes per second of one device, and the name of the link, if it was named."""

    bytes_per_second: int
    name: str | None


class PoolKinds(NamedTuple):
    """The kinds of device of the prefill and of the decode instances, both of one engine.

    `weights` are what a device of each counts when pools are compared: its price, or 1. `most` are the most devices of
    the prefill instances, of the decode instances, and of both.
    """

    prefill: Kind
    decode: Kind
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
        """What so many devices of each pool count."""
        return devices[0] * self.weights[0] + devices[1] * self.weights[1]

    def allow(self, devices: tuple[int, int]) -> bool:
        """Whether there may be so many devices of each pool."""
        return devices[0] <= self.most[0] and devices[1] <= self.most[1] and sum(devices) <= self.most[2]

    def cost_per_hour(self, devices: tuple[int, int]) -> float | None:
        """The price of so many devices of each pool. None if that of a kind is not known."""
        if self.prefill.price is None or self.decode.price is None:
            return None
        return devices[0] * self.prefill.price + devices[1] * self.decode.price

    def why_more(self, devices: tuple[int, int], best: tuple[PoolKinds, tuple[int, int]]) -> str | None:
        """What pools of so many devices take more than the best ones: money or devices. None if they do not."""
        other, fewer = best
        if not self.is_mixed:
            return more_devices(self.prefill, sum(devices)) if sum(devices) > sum(fewer) else None
        cost, least = self.cost_per_hour(devices), other.cost_per_hour(fewer)
        if cost is not None and least is not None and cost > least:
            return f"{cost:,.2f} per hour instead of {least:,.2f}"
        return f"{sum(devices):,} devices instead of {sum(fewer):,}" if sum(devices) > sum(fewer) else None


def same_kind(kind: Kind, transfer: int | str) -> PoolKinds:
    """Both pools on one kind of device. UsageError (exit 2) if the link is not known, or not for this device."""
    link = _link_of(transfer, kind)
    most = _most_devices(kind, link)
    return PoolKinds(kind, kind, link, (1.0, 1.0), (most, most, most))


def joined_kinds(kinds: Sequence[Kind], transfer: int | str, most: int) -> list[PoolKinds]:
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
    found = (_two_kinds(prefill, decode, transfer, most, by_cost) for prefill, decode in pairs)
    return [pair for pair in found if pair is not None]


def _two_kinds(prefill: Kind, decode: Kind, transfer: int | str, most: int, by_cost: bool) -> PoolKinds | None:
    """Pools of at most `most` devices together, joined by the slower link. None if a kind has no link of this name."""
    try:
        link = min((_link_of(transfer, kind) for kind in (prefill, decode)), key=lambda one: one.bytes_per_second)
    except KvcalcError:
        return None
    joined = [_most_devices(kind, link) for kind in (prefill, decode)]
    is_limited = any(number < kind.max_devices for number, kind in zip(joined, (prefill, decode)))
    weights = (prefill.price or 0.0, decode.price or 0.0) if by_cost else (1.0, 1.0)
    return PoolKinds(prefill, decode, link, weights, (joined[0], joined[1], min(*joined, most) if is_limited else most))


def _link_of(transfer: int | str, kind: Kind) -> Link:
    if isinstance(transfer, int):
        return Link(transfer, None)
    return Link(link_bytes_per_second(transfer, kind.gpu), transfer.casefold())


def _most_devices(kind: Kind, link: Link) -> int:
    """The most devices that the link connects."""
    if link.name == NVLINK and kind.gpu.interconnect is not None:
        return min(kind.max_devices, kind.gpu.interconnect.devices)
    return min(kind.max_devices, _BOX) if link.name == PCIE else kind.max_devices
