"""The smallest pair of pools of one kind of device that serves the traffic.

The layouts of prefill and of decode instances are judged separately, each once: their memory and their times. Then
every pair of them is matched, which is plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvcalc.errors import LayoutError
from kvcalc.planning.cache_tiers import move_seconds
from kvcalc.planning.disaggregated.engines import rules_of
from kvcalc.planning.disaggregated.instances import (
    Instance,
    decode_instance,
    prefill_instance,
    transfer_bytes,
)
from kvcalc.planning.disaggregated.matching import Load, Match, Pair, Times
from kvcalc.planning.replicas import more_devices, shapes_of
from kvcalc.planning.shapes import Shape
from kvcalc.planning.targets import RANGE_CONFIDENCE, Targets
from kvcalc.planning.traffic import Kind, Traffic, Trouble, seconds_text
from kvcalc.planning.transfer import NVLINK, PCIE, link_bytes_per_second

# A machine has at most this many devices, which PCIe connects.
_BOX = 8


class Link(NamedTuple):
    """What connects the instances: bytes per second of one device, and the name of the link, if it was named."""

    bytes_per_second: int
    name: str | None


class Split(NamedTuple):
    """Two pools that serve the traffic. `transfer_bytes` are those of the busiest device.

    `next_layout` is the second choice, and why it was not chosen.
    """

    prefill: Instance
    decode: Instance
    link: Link
    transfer_bytes: int
    match: Match
    next_layout: str | None = None

    @property
    def num_devices(self) -> int:
        return self.match.num_devices

    @property
    def text(self) -> str:
        """The instances, such as `2 x tp 4 prefill + tp 8 decode`."""
        pools = (self.match.prefills, self.prefill, "prefill"), (self.match.decodes, self.decode, "decode")
        return " + ".join(f"{count} x {one.shape} {role}" for count, one, role in pools)

    def with_numbers(self, prefills: int, decodes: int, load: Load) -> Split | None:
        """The same layouts with other numbers of instances. None if these cannot serve the load."""
        pair = Pair(self.prefill.rates, self.decode.rates, self.match.times.transfer_seconds)
        times, devices = pair.times(prefills, decodes, load), self.devices_of(prefills, decodes)
        return None if times is None else self._replace(match=Match(prefills, decodes, devices, times))

    def devices_of(self, prefills: int, decodes: int) -> int:
        """The devices of other numbers of instances."""
        return prefills * self.prefill.shape.devices + decodes * self.decode.shape.devices

    def ttft_range(self) -> tuple[float, float]:
        """The low and high end of the time to first token."""
        return ttft_range(self.prefill, self.decode, self.match.times)

    def tpot_range(self) -> tuple[float, float]:
        """The low and high end of the time per output token."""
        low, high = self.decode.tpot_factors(self.match.times.decoding)
        return self.match.times.tpot_seconds * low, self.match.times.tpot_seconds * high

    @property
    def tokens_per_second(self) -> float:
        return self.match.times.requests_per_second * float(self.decode.rates.output_tokens)


def ttft_range(prefill: Instance, decode: Instance, times: Times) -> tuple[float, float]:
    """The low and high end of the time to first token.

    The prefill, what is waited for it, and the first step have the ranges of their engine. The transfer has none: it is
    the bytes at the rate of the link.
    """
    computed = times.host_seconds + times.queue_seconds + times.prefill_seconds
    first, step = prefill.ttft_factors(times.prompts), decode.tpot_factors(times.decoding)
    low, high = (
        computed * each + times.transfer_seconds + times.first_step_seconds * other for each, other in zip(first, step)
    )
    return low, high


class Instances:
    """The instances of a plan that can run. Those of each kind of device and engine are computed once."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self._found: dict[tuple[str, str, int, str], tuple[list[Instance], Trouble | None]] = {}

    def prefills(self, kind: Kind) -> tuple[list[Instance], Trouble | None]:
        """The prefill instances of all layouts that can run, and why the largest of the others cannot."""
        return self._of(kind, prefill_instance)

    def decodes(self, kind: Kind) -> tuple[list[Instance], Trouble | None]:
        """The decode instances, like `prefills`."""
        return self._of(kind, decode_instance)

    def _of(
        self, kind: Kind, make: Callable[[Traffic, Kind, Shape], Instance | Trouble]
    ) -> tuple[list[Instance], Trouble | None]:
        key = kind.gpu.name, kind.engine, kind.max_devices, make.__name__
        if key not in self._found:
            self._found[key] = _instances(self.traffic, kind, make)
        return self._found[key]


def find_split(
    traffic: Traffic, kind: Kind, transfer: int | str, instances: Instances | None = None
) -> Split | Trouble:
    """The pools with the fewest devices, and among these the most tokens per second, or why there are none.

    `instances` are those of the traffic, if they are shared with other searches. Raises what `find_splits` raises.
    """
    found = find_splits(traffic, kind, transfer, instances=instances)
    if isinstance(found, Trouble):
        return found
    return found[0]._replace(next_layout=_why_not(kind, *found) if len(found) > 1 else None)


def find_splits(
    traffic: Traffic, kind: Kind, transfer: int | str, keep: int = 2, instances: Instances | None = None
) -> list[Split] | Trouble:
    """The best `keep` pairs of layouts with their smallest pools, the best first, or why there are none.

    Raises UsageError (exit 2) if the engine has no separate instances, or for an unknown link.
    """
    rules_of(kind.engine)
    link = link_of(transfer, kind)
    if traffic.limit is not None and not traffic.allow_beyond_limit:
        return Trouble(traffic.beyond_limit, "to plan them anyway, add --allow-beyond-limit")
    most = most_devices(kind, link)
    known = instances or Instances(traffic)
    prefills, trouble = known.prefills(kind)
    if not prefills:
        return _named("prefill", trouble)
    decodes, trouble = known.decodes(kind)
    if not decodes:
        return _named("decode", trouble)
    load = Load(traffic.targets.requests_per_second, traffic.targets.concurrency)
    found: list[Split] = []
    pairs = sorted(pairs_of(prefills, decodes, link), key=lambda pair: pair[2].prefill.devices + pair[2].decode.devices)
    for prefill, decode, pair, moved in pairs:
        limit = most if len(found) < keep else min(most, found[-1].num_devices)
        match = pair.smallest(load, find_judge(traffic.targets, prefill, decode), limit)
        if match is not None:
            found.append(Split(prefill, decode, link, moved, match))
            found.sort(key=_devices_then_speed)
            del found[keep:]
    if not found:
        return _why_none(traffic.targets, prefills, decodes, kind, link, most)
    return found


def pairs_of(
    prefills: list[Instance], decodes: list[Instance], link: Link
) -> Iterator[tuple[Instance, Instance, Pair, int]]:
    """Every pair of instances, with the bytes that the busiest device sends or receives for a request."""
    for prefill in prefills:
        for decode in decodes:
            moved = transfer_bytes(prefill.sent, decode.sent)
            yield prefill, decode, Pair(prefill.rates, decode.rates, move_seconds(moved, link.bytes_per_second)), moved


def both_pools(traffic: Traffic, kind: Kind) -> tuple[list[Instance], list[Instance]]:
    """All prefill and all decode instances that can run."""
    return _instances(traffic, kind, prefill_instance)[0], _instances(traffic, kind, decode_instance)[0]


def link_of(transfer: int | str, kind: Kind) -> Link:
    """The link between the instances. UsageError (exit 2) if it is not known, or not for this device."""
    if isinstance(transfer, int):
        return Link(transfer, None)
    return Link(link_bytes_per_second(transfer, kind.gpu), transfer.casefold())


def most_devices(kind: Kind, link: Link) -> int:
    """The most devices that the link connects."""
    if link.name == NVLINK and kind.gpu.interconnect is not None:
        return min(kind.max_devices, kind.gpu.interconnect.devices)
    return min(kind.max_devices, _BOX) if link.name == PCIE else kind.max_devices


def _instances(
    traffic: Traffic, kind: Kind, make: Callable[[Traffic, Kind, Shape], Instance | Trouble]
) -> tuple[list[Instance], Trouble | None]:
    """The instances of all layouts that can run, and why the largest of the others cannot."""
    found, trouble = [], None
    for shape in shapes_of(traffic, kind):
        try:
            one = make(traffic, kind, shape)
        except LayoutError:
            continue
        if isinstance(one, Trouble):
            trouble = one
        else:
            found.append(one)
    return found, trouble


def _named(role: str, trouble: Trouble | None) -> Trouble:
    if trouble is None:
        return Trouble(f"the model cannot be split over these devices for {role} instances")
    return trouble._replace(reason=f"{role} instance: {trouble.reason}")


def find_judge(targets: Targets, prefill: Instance, decode: Instance) -> Callable[[Times], bool]:
    """Whether TTFT and the time of a whole request meet their targets: at the upper end, or the point estimate."""
    first, whole, is_high = targets.max_ttft_seconds, targets.max_e2e_seconds, targets.confidence == RANGE_CONFIDENCE

    def meets(times: Times) -> bool:
        ttft = ttft_range(prefill, decode, times)[1] if is_high else times.ttft_seconds
        if first is not None and ttft > first:
            return False
        if whole is None:
            return True
        tpot = times.tpot_seconds * (decode.tpot_factors(times.decoding)[1] if is_high else 1.0)
        return bool(ttft + (decode.rates.output_tokens - 1) * tpot <= whole)

    return (lambda _: True) if first is None and whole is None else meets


def _devices_then_speed(split: Split) -> tuple[int, float, float]:
    return split.num_devices, -split.tokens_per_second, split.match.times.ttft_seconds


def _why_not(kind: Kind, first: Split, second: Split) -> str:
    if second.num_devices > first.num_devices:
        return f"{second.text}: {more_devices(kind, second.num_devices)}"
    slower, faster = second.tokens_per_second, first.tokens_per_second
    if round(slower) < round(faster):
        return f"{second.text}: as many devices, but {slower:,.0f} tokens per second instead of {faster:,.0f}"
    times = (seconds_text(one.match.times.ttft_seconds) for one in (second, first))
    return f"{second.text}: as many devices, but TTFT is {' instead of '.join(times)}"


def _why_none(
    targets: Targets, prefills: list[Instance], decodes: list[Instance], kind: Kind, link: Link, most: int
) -> Trouble:
    """Why no pair serves the load: its time to first token even for one request, or the number of devices."""
    longest = targets.max_ttft_seconds
    if longest is not None:
        alone = [
            (pair.times(1, 1, Load(concurrency=1)), prefill, decode)
            for prefill, decode, pair, _ in pairs_of(prefills, decodes, link)
        ]
        fastest = [
            ttft_range(prefill, decode, times)[1] if targets.confidence == RANGE_CONFIDENCE else times.ttft_seconds
            for times, prefill, decode in alone
            if times is not None
        ]
        if fastest and min(fastest) > longest:
            found = seconds_text(min(fastest))
            return Trouble(f"TTFT of one request is up to {found}, and the limit is {seconds_text(longest)}")
    if most < kind.max_devices:
        return Trouble(
            f"two pools need more than the {most:,} devices that {link.name} connects",
            "--transfer-bandwidth infiniband-400g, or another network",
        )
    return Trouble(f"two pools need more than {most:,} devices", f"--max-gpus {2 * most}")
