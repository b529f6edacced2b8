"""The layouts between which a user can choose: each is cheaper, or faster for one user, than every other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.errors import KvcalcError
from kvcalc.planning.plan.replicas import shapes_of
from kvcalc.planning.plan.traffic import MOST_RUNNING, Kind, Traffic, probe

if TYPE_CHECKING:
    from kvcalc.planning.plan.disaggregated.rows import SplitPlan


def front(traffic: Traffic, kinds: Sequence[Kind], split: SplitPlan | None = None) -> list[dict[str, Any]]:
    """The Pareto front over kinds of device, layouts and running requests, the fastest for one user first.

    A point is one replica with a power of two of running requests that fits and meets the targets. It is compared by
    the tokens per second of one user, and by the cost of a million output tokens if every kind has a price, else by the
    tokens per second of one device. With `split`, there are points with prefill and decode on separate instances too.
    """
    priced = all(kind.price is not None for kind in kinds)
    points = [point for kind in kinds for point in _points(traffic, kind)]
    if split is not None:
        from kvcalc.planning.plan.disaggregated.front import split_points

        points = [{**point, "layout": None} for point in points]
        points += split_points(split, kinds, priced=priced)
    points.sort(key=lambda point: (-point["tokens_per_second_per_user"], _burden(point, priced)))
    found: list[dict[str, Any]] = []
    for point in points:
        if not found or _burden(point, priced) < _burden(found[-1], priced):
            found.append(point)
    return found


def _burden(point: Mapping[str, Any], priced: bool) -> float:
    """What a user pays for a token: money, or devices."""
    return float(point["cost_per_million_output_tokens"]) if priced else -float(point["tokens_per_second_per_device"])


def _points(traffic: Traffic, kind: Kind) -> Iterator[dict[str, Any]]:
    for shape in shapes_of(traffic, kind):
        own, running = traffic.of(shape), 1
        while running <= MOST_RUNNING:
            try:
                one = probe(own, kind, shape.tensor, shape.stages, running, is_brief=True)
            except KvcalcError:
                break
            # More requests are neither smaller nor faster.
            if one.trouble is not None:
                break
            serving = one.serving
            each = serving["tokens_per_second"] / shape.devices
            yield {
                "gpu": kind.gpu.name,
                "engine": kind.engine,
                **shape.describe(one.expert_parallel_size),
                "num_devices": shape.devices,
                "requests_per_replica": running,
                "ttft_seconds": serving["ttft_seconds"],
                "tpot_seconds": serving["tpot_seconds"],
                "tokens_per_second_per_user": 1 / serving["tpot_seconds"],
                "tokens_per_second_per_device": each,
                "cost_per_million_output_tokens": None if kind.price is None else kind.price / (each * 3600 / 1e6),
            }
            running *= 2
