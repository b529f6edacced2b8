"""Layouts that the closed form chooses for limits on means. Where it may be wrong, the one that wins is simulated.

The closed form is that of equal steps. Close to what a replica serves at most, and for clients that end together, a
simulation may find much longer times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcalc.errors import UsageError
from kvcalc.planning.plan.replicas import OnePool, devices_then_speed, find_layouts, why_not
from kvcalc.planning.plan.targets import POINT_CONFIDENCE
from kvcalc.planning.plan.traffic import Platform, Traffic, Trouble, times_of

if TYPE_CHECKING:
    from kvcalc.planning.plan.judge import Judge
    from kvcalc.planning.plan.targets import Simulates

# The closed form decides alone if its times are below this share of their limits, and the replicas less busy than this.
_FAR, _FREE = 0.5, 0.8
# A simulated time above this share of its limit, or a busier layout, needs more runs and a long one.
_CLOSE = 0.75
_MOST_TRIES = 12


def find_confirmed(traffic: Traffic, kind: Platform, make: Callable[[], Simulates] | None) -> OnePool | Trouble:
    """The fastest of the layouts with the fewest devices, or why the largest layout does not serve the traffic.

    `make` makes the load to simulate. None: the closed form decides. Times are judged at the estimate there, because
    the closed form has judged the ranges.
    """
    trouble, targets = None, traffic.targets
    for found in find_layouts(traffic, kind):
        trouble = found.trouble
        left, why = [*found.layouts], None
        judge: Judge | None = None
        for _ in range(_MOST_TRIES if left else 0):
            first = left.pop(0)
            if make is not None and judge is None and not _is_sure(first):
                from kvcalc.planning.plan.judge import Judge

                judge = Judge(targets._replace(confidence=POINT_CONFIDENCE), make())
            missed = None if judge is None else _missed(judge, first)
            if missed is None:
                return first._replace(next_layout=why or why_not(*found))
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
    traffic, serving = one.traffic, one.probe.serving
    shares = [
        times_of(limit.metric, traffic.lengths, serving, traffic.targets)[0] / limit.seconds
        for limit in traffic.targets.limits
    ]
    return max(shares, default=0.0) < _FAR and (one.utilisation or 0.0) < _FREE


def _missed(judge: Judge, one: OnePool) -> str | None:
    """The limit that a layout misses. None if it meets all, or is not simulated."""
    if _is_sure(one):
        return None
    try:
        found = judge.at(one, one.numbers)
        is_close = found is not None and (found.judged.worst > _CLOSE or (one.utilisation or 0.0) > _FREE)
        if found is not None and found.missed is None and is_close:
            found = judge.confirm(found)
    except UsageError:  # a layout that is not simulated
        return None
    return None if found is None else found.missed
