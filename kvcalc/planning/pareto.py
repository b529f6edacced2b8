"""The layouts between which a user can choose: each is cheaper, or faster for one user, than every other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcalc.errors import KvcalcError
from kvcalc.planning.replicas import Kind, Traffic, probe, sizes_of

# The most running requests to look at. Numbers in between lie between the points of their neighbours.
_MOST_RUNNING = 1024


def front(traffic: Traffic, kinds: Sequence[Kind], prices: Mapping[str, float]) -> list[dict[str, Any]]:
    """The Pareto front over kinds of device, layouts and running requests, the fastest for one user first.

    A point is one replica with a power of two of running requests that fits and meets the targets. It is compared by
    the tokens per second of one user, and by the cost of a million output tokens if every kind has a price, else by the
    tokens per second of one device.
    """
    priced = all(kind.gpu.name in prices for kind in kinds)
    points = [point for kind in kinds for point in _points(traffic, kind, prices.get(kind.gpu.name))]
    points.sort(key=lambda point: (-point["tokens_per_second_per_user"], _burden(point, priced)))
    found: list[dict[str, Any]] = []
    for point in points:
        if not found or _burden(point, priced) < _burden(found[-1], priced):
            found.append(point)
    return found


def _burden(point: Mapping[str, Any], priced: bool) -> float:
    """What a user pays for a token: money, or devices."""
    return float(point["cost_per_million_output_tokens"]) if priced else -float(point["tokens_per_second_per_device"])


def _points(traffic: Traffic, kind: Kind, price: float | None) -> Iterator[dict[str, Any]]:
    for tensor, stages in sizes_of(traffic, kind):
        devices = tensor * stages * traffic.question.data_parallel_size * traffic.prompt_ranks(kind.engine)
        running = 1
        while running <= _MOST_RUNNING:
            try:
                one = probe(traffic, kind, tensor, stages, running)
            except KvcalcError:
                break
            # More requests are neither smaller nor faster.
            if one.trouble is not None:
                break
            serving = one.serving
            each = serving["tokens_per_second"] / devices
            yield {
                "gpu": kind.gpu.name,
                "engine": kind.engine,
                "tensor_parallel_size": tensor,
                "pipeline_parallel_size": stages,
                "data_parallel_size": traffic.question.data_parallel_size,
                "num_devices": devices,
                "requests_per_replica": running,
                "ttft_seconds": serving["ttft_seconds"],
                "tpot_seconds": serving["tpot_seconds"],
                "tokens_per_second_per_user": 1 / serving["tpot_seconds"],
                "tokens_per_second_per_device": each,
                "cost_per_million_output_tokens": None if price is None else price / (each * 3600 / 1e6),
            }
            running *= 2
