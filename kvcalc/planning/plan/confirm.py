"""Layouts that the closed form chooses for limits on means. Where it may be wrong, the one that wins is simulated.

The closed form is that of equal steps. Close to what a replica serves at most, and for clients that end together, a
simulation may find much longer times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from kvcalc.errors import UsageError
from kvcalc.planning.plan.replicas import OnePool, devices_then_speed, find_layouts, why_not
from kvcalc.planning.plan.traffic import Platform, Traffic, Trouble, times_of
from kvcalc.throughput.serving import requests_per_client

if TYPE_CHECKING:
    from kvcalc.planning.plan.judge import Finalist
    from kvcalc.planning.plan.targets import Simulates

# The closed form decides alone if its times are below this share of their limits, and the replicas less busy than this.
_FAR, _FREE = 0.5, 0.8
_MOST_TRIES = 12
# Replicas with more clients than this together are simulated as one of them with its share.
_MOST_CLIENTS = 500


def find_confirmed(traffic: Traffic, kind: Platform, make: Callable[[], Simulates] | None) -> OnePool | Trouble:
    """The fastest of the layouts with the fewest devices, or why the largest layout does not serve the traffic.

    `make` makes the load to simulate. None: the closed form decides.
    """
    trouble = None
    for found in find_layouts(traffic, kind):
        trouble = found.trouble
        left, why = [*found.layouts], None
        for _ in range(_MOST_TRIES if left else 0):
            first = left.pop(0)
            tried = None if make is None or _is_sure(first) else _simulated(make(), first)
            missed = None if tried is None else tried.missed
            if missed is None:
                # The server that is printed has the limit of running requests that was simulated.
                most = None if tried is None else tried.layout.most_running
                return first._replace(next_layout=why or why_not(*found), most_running=most)
            why = f"{first}: simulated, {missed}"
            more = first.replicas + max(1, first.replicas // 8)
            if more <= first.most_replicas(kind.max_devices):
                left.append(first.at((more,)))
            left.sort(key=devices_then_speed)
            if not left:
                break
        if why is not None:
            return Trouble(why)
    return trouble or Trouble("the model cannot be split over these devices")


def _is_sure(one: OnePool) -> bool:
    """Whether the closed form decides alone. Without limits, there is nothing to judge."""
    traffic, serving, benchmark = one.traffic, one.probe.serving, cast(Any, one.probe.benchmark)
    shares = [times_of(limit.metric, traffic.lengths, serving)[1] / limit.seconds for limit in traffic.targets.limits]
    first, clients = traffic.targets.max_ttft_seconds, traffic.targets.concurrency
    if first and clients:
        # Clients with equal answers may end together each time, and then wait as their first requests did.
        steady, mean = benchmark["steady_ttft_seconds"], benchmark["ttft_seconds"]
        shares.append((steady + requests_per_client(benchmark["concurrency"]) * (mean - steady)) / first)
    return not shares or (max(shares) < _FAR and one.judged_utilization < _FREE)


def _simulated(simulation: Simulates, layout: OnePool) -> Finalist | None:
    """A layout that was simulated. None if it is not."""
    from kvcalc.planning.plan.judge import CLOSE, Judge

    one, targets = layout, layout.traffic.targets
    if targets.concurrency is None or targets.concurrency > _MOST_CLIENTS:
        one, targets = layout._replace(replicas=1), targets.of_one(layout.replicas)
    judge = Judge(targets, simulation)
    try:
        found = judge.at(one, one.numbers)
        is_close = found is not None and (found.judged.worst > CLOSE or layout.judged_utilization > _FREE)
        if found is not None and found.missed is None and is_close:
            found = judge.confirm(found)
    except UsageError:  # a layout that is not simulated
        return None
    return found
