"""Prefill and decode instances on different kinds of device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from kvcalc.errors import KvcalcError
from kvcalc.planning.disaggregated.instances import Instance
from kvcalc.planning.disaggregated.joined import cache_of, join_caches
from kvcalc.planning.disaggregated.kinds import PoolKinds, two_kinds
from kvcalc.planning.disaggregated.matching import Load
from kvcalc.planning.disaggregated.search import Instances, Split, find_judge, pair_of, slower_text
from kvcalc.planning.targets import Targets
from kvcalc.planning.traffic import Kind, Trouble
from kvcalc.planning.transfer import NVLINK


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
    found = (two_kinds(prefill, decode, transfer, most, by_cost=by_cost) for prefill, decode in pairs)
    return [pair for pair in found if pair is not None]


def find_mixed(known: Instances, joined: Sequence[PoolKinds]) -> Split | Trouble | None:
    """The cheapest pools on two kinds of device, or with the fewest devices if these are compared.

    Of several, those with the most tokens per second. None if no two kinds can be joined.
    """
    found = find_all_mixed(known, joined, known.traffic.targets)
    if not isinstance(found, list):
        return found
    return found[0]._replace(next_layout=_why_not(*found) if len(found) > 1 else None)


def find_all_mixed(
    known: Instances, joined: Sequence[PoolKinds], targets: Targets, keep: int = 2
) -> list[Split] | Trouble | None:
    """The `keep` best pairs of layouts for the load and the limits of `targets`, like `find_mixed`."""
    traffic = known.traffic
    if not joined or (traffic.limit is not None and not traffic.allow_beyond_limit):
        return None
    found: list[Split] = []
    for kinds in joined:
        for bound, prefill, decode in candidates_of(known, kinds, targets):
            worst = found[-1].weight if len(found) >= keep else float("inf")
            if bound > worst * (1 + 1e-9):
                break
            split = _match(targets, prefill, decode, kinds, worst)
            if split is not None:
                found.append(split)
                found.sort(key=_rank)
                del found[keep:]
    return found or Trouble("no two pools on different kinds of device serve this load")


def candidates_of(known: Instances, kinds: PoolKinds, targets: Targets) -> Iterator[tuple[float, Instance, Instance]]:
    """All pairs of instances whose caches are alike, with a lower bound of their cost, the lowest bound first."""
    try:
        prefills, decodes = known.prefills(kinds.prefill)[0], known.decodes(kinds.decode, targets)[0]
    except KvcalcError:  # its own row says why
        return
    rate, clients = targets.requests_per_second, targets.concurrency
    rows: list[tuple[float, Instance, Instance]] = []
    of_decode = []
    for decode in decodes:
        largest = decode.rates.largest(0.0)
        if largest:
            needed = (clients or 0) / largest if rate is None else rate / decode.rates.rate(largest)
            of_decode.append(
                (kinds.weights[1] * decode.shape.devices * max(1.0, needed), decode, cache_of(decode.case))
            )
    for prefill in prefills:
        needed = 1.0 if rate is None else max(1.0, rate * prefill.rates.interval(0.0))
        bound, cache = kinds.weights[0] * prefill.shape.devices * needed, cache_of(prefill.case)
        rows += [(bound + other, prefill, decode) for other, decode, its in of_decode if its == cache]
    rows.sort(key=lambda row: row[0])
    yield from rows


def _match(
    targets: Targets, prefill: Instance, decode: Instance, kinds: PoolKinds, worst: float
) -> Split | None:  # fmt: skip
    pair, moved = pair_of(prefill, decode, kinds.link)
    load = Load(targets.requests_per_second, targets.concurrency)
    match = pair.cheapest(load, find_judge(targets, prefill, decode), kinds.weights, kinds.most, worst)
    return None if match is None else Split(prefill, decode, kinds, moved, match)


def _rank(split: Split) -> tuple[float, float, float]:
    # A rate is served by all of them, but for rounding.
    return split.weight, -round(split.tokens_per_second), split.match.times.ttft_seconds


def _why_not(first: Split, second: Split) -> str:
    return f"{second.text}: {second.why_more(first) or slower_text(second, first)}"
