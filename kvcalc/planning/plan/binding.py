"""What binds a plan: the memory of a replica, how little is known of a time, or the time that a request alone takes."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from kvcalc.errors import KvcalcError
from kvcalc.notes import Note
from kvcalc.planning.plan.replicas import OnePool, shapes_of
from kvcalc.planning.plan.traffic import Platform, Traffic, Trouble, probe

if TYPE_CHECKING:
    from kvcalc.planning.plan.judge import Judge, Layout

# The type that is tried in the cache and in the weights. It may be the one that they have.
_SMALLER = "fp8"
# A time that is judged at so many times its estimate is hardly known.
_FAR = 1.5


def memory_notes(layout: OnePool) -> list[Note]:
    """A note if fewer replicas would do, but for the requests that each holds. It says what would hold more.

    How fast they are then is the question of another plan.
    """
    probed, replicas = layout.probe, layout.replicas
    held = probed.memory.fit["max_batch_size"] or 0
    if replicas < 2 or ceil(probed.running * replicas / (replicas - 1)) <= held:
        return []
    traffic, kind = layout.traffic, layout.kind
    types = (
        ("--kv-dtype", traffic.question._replace(kv_dtype=_SMALLER), kind),
        ("--dtype", traffic.question, kind._replace(dtype=_SMALLER)),
    )
    more = list[str]()
    for option, question, platform in types:
        try:
            other = probe(traffic.without_limits()._replace(question=question), platform, layout.shape, 1)
        except KvcalcError:  # the engine or the device has no such type
            continue
        if (most := other.memory.fit["max_batch_size"] or 0) > held:
            more.append(f"{most:,} with {option} {_SMALLER}")
    text = f"memory binds: a replica holds {held:,} {'request' if held == 1 else 'requests'} at once"
    return [Note("plans", "memory-binds", ", ".join([text, *more]))]


def range_notes(judge: Judge, layout: Layout) -> list[Note]:
    """A note if the time that is nearest to its target is judged far above its estimate."""
    finalist = judge.at(layout, layout.numbers) if judge.targets.limits else None
    metric = None if finalist is None else finalist.judged.worst_metric
    if metric not in ("ttft", "tpot"):
        return []
    factor = layout.factors(judge.targets)[metric][2]
    if factor < _FAR:
        return []
    text = f"{metric.upper()} binds, and is judged at {factor:.1f} times its estimate: so little is known of it"
    return [Note("plans", "wide-range", f"{text} here. --confidence 50 plans with the estimate")]


def too_slow_alone(traffic: Traffic, kind: Platform) -> Trouble | None:
    """Why a request alone is too slow in every layout, if it is: then more devices do not help."""
    trouble = None
    for shape in shapes_of(traffic, kind):
        try:
            alone = probe(traffic, kind, shape, 1)
        except KvcalcError:  # the model cannot be split this way
            continue
        if alone.trouble is None:
            return None
        if alone.speed is not None:  # it fits
            trouble = alone.trouble._replace(reason=f"{shape}: {alone.trouble.reason}")
    return trouble
