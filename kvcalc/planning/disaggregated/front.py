"""Points of the Pareto front with prefill and decode on separate instances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcalc.errors import KvcalcError
from kvcalc.planning.disaggregated.matching import Load
from kvcalc.planning.disaggregated.search import Split, both_pools, find_judge, link_of, most_devices, pairs_of
from kvcalc.planning.traffic import Kind, Traffic

# The most running requests of a decode instance to look at, and the most decode instances that share prefill instances.
_MOST_RUNNING, _MOST_DECODES = 1024, 4
# Points are compared without their time to first token, which grows without limit as this share of time reaches 1.
_MOST_UTILIZATION = 0.9


def split_points(traffic: Traffic, kind: Kind, transfer: int | str) -> Iterator[dict[str, Any]]:
    """For every pair of layouts and a power of two of running requests: the ratio of instances that wastes the least.

    A point has 1 to 4 decode instances, each with this number of requests in its batch, and the fewest prefill
    instances that keep up with them within the targets, busy for at most 90 % of the time.
    """
    try:
        link = link_of(transfer, kind)
        prefills, decodes = both_pools(traffic, kind)
    except KvcalcError:
        return
    most = most_devices(kind, link)
    for prefill, decode, pair, moved in pairs_of(prefills, decodes, link):
        meets = find_judge(traffic.targets, prefill, decode)
        largest, running = decode.rates.largest(pair.transfer), 1
        while running <= min(largest, _MOST_RUNNING):
            found = []
            for number in range(1, _MOST_DECODES + 1):
                rate = number * decode.rates.rate(running)
                match = pair.fewest_prefills(
                    number,
                    Load(requests_per_second=rate),
                    lambda times: times.utilization <= _MOST_UTILIZATION and meets(times),  # noqa: B023 - called here
                    most,
                )
                if match is not None:
                    found.append(Split(prefill, decode, link, moved, match))
            if found:
                best = max(found, key=lambda split: split.tokens_per_second / split.num_devices)
                yield _point(kind, best, running)
            running *= 2


def _point(kind: Kind, split: Split, running: int) -> dict[str, Any]:
    times, shape = split.match.times, split.decode.shape
    each = split.tokens_per_second / split.num_devices
    return {
        "gpu": kind.gpu.name,
        "engine": kind.engine,
        **shape.describe(split.decode.case.workload.expert_parallel_size),
        "num_devices": split.num_devices,
        "requests_per_replica": running,
        "ttft_seconds": times.ttft_seconds,
        "tpot_seconds": times.tpot_seconds,
        "tokens_per_second_per_user": 1 / times.tpot_seconds,
        "tokens_per_second_per_device": each,
        "cost_per_million_output_tokens": None if kind.price is None else kind.price / (each * 3600 / 1e6),
        "layout": split.text,
    }
