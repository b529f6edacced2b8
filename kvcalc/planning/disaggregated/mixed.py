"""Prefill and decode instances on different kinds of device.

A cache can only be read where it has the layout that it was written in. vLLM's instances refuse each other if their
attention backends differ (compute_nixl_compatibility_hash, kv_connector/v1/nixl/metadata.py, 0.33.0), and the default
backend follows from the architecture (_get_backend_priorities, platforms/cuda.py). SGLang's refuse another size of
pages, which follows from the backend, and another type (CommonKVReceiver, srt/disaggregation/common/conn.py, 0.5.23).
So pools are only mixed among devices of one architecture, whose caches have the same type and blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvcalc.errors import KvcalcError
from kvcalc.planning.cache_tiers import move_seconds
from kvcalc.planning.disaggregated.instances import Instance, transfer_bytes
from kvcalc.planning.disaggregated.matching import Load, Match, Pair
from kvcalc.planning.disaggregated.search import Instances, Link, Split, find_judge, link_of, most_devices
from kvcalc.planning.kept import prefixes_of
from kvcalc.planning.traffic import Kind, Traffic, Trouble, seconds_text
from kvcalc.planning.transfer import NVLINK

# Both are architectures of compute capability 8, for which vLLM and SGLang choose the same backends.
_ALIKE = {"ada": "ampere"}


class Mixed(NamedTuple):
    """Two pools on two kinds of device."""

    prefill_kind: Kind
    decode_kind: Kind
    split: Split

    @property
    def cost_per_hour(self) -> float | None:
        """The price of both pools. None if that of a kind is not known."""
        if self.prefill_kind.price is None or self.decode_kind.price is None:
            return None
        prefill, decode = devices_of(self.split)
        return prefill * self.prefill_kind.price + decode * self.decode_kind.price

    @property
    def text(self) -> str:
        """The instances, such as `2 x tp 4 prefill on h100-sxm + 1 x tp 8 decode on h200-sxm`."""
        prefill, decode = self.split.text.split(" + ")
        return f"{prefill} on {self.prefill_kind.gpu.name} + {decode} on {self.decode_kind.gpu.name}"


def devices_of(split: Split) -> tuple[int, int]:
    """The devices of the prefill and of the decode pool."""
    return split.match.prefills * split.prefill.shape.devices, split.match.decodes * split.decode.shape.devices


def join_caches(first: Kind, second: Kind) -> bool:
    """Whether instances on both kinds of device can read each other's cache, by their architecture."""
    known = _architecture(first)
    return known is not None and first.gpu.vendor == second.gpu.vendor and known == _architecture(second)


def find_mixed(known: Instances, kinds: Sequence[Kind], transfer: int | str, most: int) -> Mixed | Trouble | None:
    """The cheapest pools on two of the `kinds`, all of one engine, with at most `most` devices together.

    If a kind has no price, those with the fewest devices; of several, those with the most tokens per second. None if no
    two kinds can be joined.
    """
    traffic = known.traffic
    pairs = [
        (first, second) for first in kinds for second in kinds
        if first.gpu.name != second.gpu.name and join_caches(first, second)
    ]  # fmt: skip
    if not pairs or transfer == NVLINK or (traffic.limit is not None and not traffic.allow_beyond_limit):
        return None
    # All pairs are compared by cost, or all by their number of devices.
    has_prices = all(kind.price is not None for pair in pairs for kind in pair)
    pools = {kind.gpu.name: _pools(known, kind) for kind in kinds if any(kind in pair for pair in pairs)}
    found: list[tuple[tuple[float, float, float], Mixed]] = []
    for prefill_kind, decode_kind in pairs:
        link = _link(transfer, prefill_kind, decode_kind)
        if link is None:
            continue
        limits = _limits(prefill_kind, decode_kind, link, most)
        weights = (prefill_kind.price or 0.0, decode_kind.price or 0.0) if has_prices else (1.0, 1.0)
        candidates = _candidates(
            traffic, pools[prefill_kind.gpu.name][0], pools[decode_kind.gpu.name][1], weights
        )  # fmt: skip
        for bound, prefill, decode in candidates:
            worst = found[1][0][0] if len(found) > 1 else float("inf")
            if bound > worst * (1 + 1e-9):
                break
            split = _match(traffic, prefill, decode, link, weights, limits, worst)
            if split is not None:
                one = Mixed(prefill_kind, decode_kind, split)
                found.append((_rank(one, weights), one))
                found.sort(key=lambda pair: pair[0])
                del found[2:]
    if not found:
        return Trouble("no two pools on different kinds of device serve this load")
    best = found[0][1]
    why = _why_not(best, found[1][1]) if len(found) > 1 else None
    return best._replace(split=best.split._replace(next_layout=why))


def _architecture(kind: Kind) -> str | None:
    name = kind.gpu.device_class
    return name if name is None else _ALIKE.get(name, name)


def _pools(known: Instances, kind: Kind) -> tuple[list[Instance], list[Instance]]:
    try:
        return known.prefills(kind)[0], known.decodes(kind)[0]
    except KvcalcError:  # its own row says why
        return [], []


def _link(transfer: int | str, first: Kind, second: Kind) -> Link | None:
    """The slower of both kinds' links. None if a kind has none of this name."""
    try:
        return min((link_of(transfer, kind) for kind in (first, second)), key=lambda link: link.bytes_per_second)
    except KvcalcError:
        return None


def _limits(prefill: Kind, decode: Kind, link: Link, most: int) -> tuple[int, int, int]:
    """The most devices of the prefill pool, of the decode pool, and of both."""
    joined = [most_devices(kind, link) for kind in (prefill, decode)]
    is_limited = any(number < kind.max_devices for number, kind in zip(joined, (prefill, decode)))
    return joined[0], joined[1], min(*joined, most) if is_limited else most


def _candidates(
    traffic: Traffic, prefills: Sequence[Instance], decodes: Sequence[Instance], weights: tuple[float, float]
) -> Iterator[tuple[float, Instance, Instance]]:
    """All pairs of instances whose caches are alike, with a lower bound of their cost, the lowest bound first."""
    rate, clients = traffic.targets.requests_per_second, traffic.targets.concurrency
    rows: list[tuple[float, Instance, Instance]] = []
    of_decode = []
    for decode in decodes:
        largest = decode.rates.largest(0.0)
        if largest:
            needed = (clients or 0) / largest if rate is None else rate / decode.rates.rate(largest)
            of_decode.append((weights[1] * decode.shape.devices * max(1.0, needed), decode, _cache(decode)))
    for prefill in prefills:
        needed = 1.0 if rate is None else max(1.0, rate * prefill.rates.interval(0.0))
        bound, cache = weights[0] * prefill.shape.devices * needed, _cache(prefill)
        rows += [(bound + other, prefill, decode) for other, decode, its in of_decode if its == cache]
    rows.sort(key=lambda row: row[0])
    return iter(rows)


def _cache(one: Instance) -> tuple[str, int]:
    """What must be alike in both instances: the type of the cache, and the tokens in a block."""
    return one.case.workload.kv_dtype.name, prefixes_of(one.case).block_tokens


def _match(
    traffic: Traffic, prefill: Instance, decode: Instance, link: Link, weights: tuple[float, float],
    limits: tuple[int, int, int], worst: float,
) -> Split | None:  # fmt: skip
    moved = transfer_bytes(prefill.sent, decode.sent)
    pair = Pair(prefill.rates, decode.rates, move_seconds(moved, link.bytes_per_second))
    load = Load(traffic.targets.requests_per_second, traffic.targets.concurrency)
    meets = find_judge(traffic.targets, prefill, decode)
    match: Match | None = pair.cheapest(load, meets, weights, limits, worst)
    return None if match is None else Split(prefill, decode, link, moved, match)


def _rank(mixed: Mixed, weights: tuple[float, float]) -> tuple[float, float, float]:
    split = mixed.split
    prefill, decode = devices_of(split)
    # A rate is served by all of them, but for rounding.
    return prefill * weights[0] + decode * weights[1], -round(split.tokens_per_second), split.match.times.ttft_seconds


def _why_not(first: Mixed, second: Mixed) -> str:
    costs = second.cost_per_hour, first.cost_per_hour
    if costs[0] is not None and costs[1] is not None and costs[0] > costs[1]:
        return f"{second.text}: {costs[0]:,.2f} per hour instead of {costs[1]:,.2f}"
    numbers = second.split.num_devices, first.split.num_devices
    if numbers[0] > numbers[1]:
        return f"{second.text}: {numbers[0]:,} devices instead of {numbers[1]:,}"
    times = (seconds_text(one.split.match.times.ttft_seconds) for one in (second, first))
    return f"{second.text}: as many devices, but TTFT is {' instead of '.join(times)}"
