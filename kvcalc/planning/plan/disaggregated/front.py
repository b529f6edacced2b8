"""Points of the Pareto front with prefill and decode on separate instances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from kvcalc.errors import KvcalcError
from kvcalc.planning.plan.disaggregated.instances import Instance
from kvcalc.planning.plan.disaggregated.kinds import PoolKinds, joined_kinds, same_kind
from kvcalc.planning.plan.disaggregated.matching import Load
from kvcalc.planning.plan.disaggregated.rows import SplitPlan
from kvcalc.planning.plan.disaggregated.search import Instances, candidates_of, find_judge, pair_of
from kvcalc.planning.plan.disaggregated.split import Split
from kvcalc.planning.plan.traffic import MOST_RUNNING, Kind

if TYPE_CHECKING:
    import kvcalc.documents as documents

# The most decode instances that share prefill instances.
_MOST_DECODES = 4
# Points are compared without their time to first token, which grows without limit as this share of time reaches 1.
_MOST_UTILIZATION = 0.9


def split_points(asked: SplitPlan, kinds: Sequence[Kind], *, priced: bool) -> Iterator[documents.ParetoPoint]:
    """The points of every kind of device, and of two kinds that can be joined.

    Of the ratios of two kinds, the cheapest ones if they are `priced`, else those with the fewest devices.
    """
    known, transfer = asked.known, asked.transfer
    for kind in kinds:
        try:
            alone = same_kind(kind, transfer)
            pools = known.prefills(kind)[0], known.decodes(kind)[0]
        except KvcalcError:  # its own row says why
            continue
        yield from _points(known, alone, list(product(*pools)), priced)
    for engine in dict.fromkeys(kind.engine for kind in kinds):
        for pair in joined_kinds([kind for kind in kinds if kind.engine == engine], transfer, asked.most):
            alike = [row[1:] for row in candidates_of(known, pair, known.traffic.targets)]
            yield from _points(known, pair, alike, priced)


def _points(
    known: Instances, kinds: PoolKinds, layouts: list[tuple[Instance, Instance]], priced: bool
) -> Iterator[documents.ParetoPoint]:
    """For every pair of layouts and a power of two of running requests: the ratio of instances that wastes the least.

    A point has 1 to 4 decode instances, each with this number of requests in its batch, and the fewest prefill
    instances that keep up with them within the targets, busy for at most 90 % of the time.
    """

    def worth(split: Split) -> float:
        return split.tokens_per_second / ((priced and split.cost_per_hour) or split.num_devices)

    for prefill, decode in layouts:
        pair, moved = pair_of(prefill, decode, kinds.link)
        meets = find_judge(known.traffic.targets, prefill, decode)
        largest, running = decode.rates.largest(pair.transfer), 1
        while running <= min(largest, MOST_RUNNING):
            found = []
            for number in range(1, _MOST_DECODES + 1):
                used = number * decode.shape.devices
                rate = number * decode.rates.rate(running)
                match = pair.fewest_prefills(
                    number,
                    Load(requests_per_second=rate),
                    lambda times: times.utilization <= _MOST_UTILIZATION and meets(times),  # noqa: B023 - called here
                    min(kinds.most[0], kinds.most[2] - used) // prefill.shape.devices,
                )
                if match is not None and used <= kinds.most[1]:
                    found.append(Split(prefill, decode, kinds, moved, match))
            if found:
                yield _point(max(found, key=worth), running)
            running *= 2


def _point(split: Split, running: int) -> documents.ParetoPoint:
    times, shape, cost = split.match.times, split.decode.shape, split.cost_per_hour
    return {
        "gpu": split.kinds.text,
        "engine": split.kinds.decode.engine,
        **shape.describe(split.decode.case.workload.expert_parallel_size),
        "num_devices": split.num_devices,
        "requests_per_replica": running,
        "ttft_seconds": times.ttft_seconds,
        "tpot_seconds": times.tpot_seconds,
        "tokens_per_second_per_user": 1 / times.tpot_seconds,
        "tokens_per_second_per_device": split.tokens_per_second / split.num_devices,
        "cost_per_million_output_tokens": None if cost is None else cost / (split.tokens_per_second * 3600 / 1e6),
        "layout": str(split),
    }
