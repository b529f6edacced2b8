"""One run of a benchmark: what ran, under which load, and the times it took."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvcalc.model.layout import LayoutAsked
from kvcalc.records import NamedTuple

# No benchmark has larger figures. Larger ones are mistakes, and products of them would not be finite.
_LARGEST = 1e12


class Measured(NamedTuple):
    """One time of a run, in seconds. `metric` is tpot, ttft, decode or prefill. At least one of the figures is known.

    `tpot` and `ttft` are those of served requests. `decode` is one step, `prefill` one prompt, both without a server.
    """

    metric: str
    mean_seconds: float | None
    median_seconds: float | None


class Point(NamedTuple):
    """One run. None means that the file does not say.

    `engine` and its `release` are those that the server itself stated. `likely_engine` is the engine that the client's
    options suggest. The same client measures every server, so it is only a default. `models` are the names that the
    file has for the model, the best one first. `concurrency` is the number of requests at the same time; `is_average`
    is true if it was computed with Little's law. A decode step follows `input_tokens` cached tokens and is the mean of
    `output_tokens` steps.
    `unknown_dtype` is the file's text for a type of weights that kvcalc does not know. `settings` are the engine's own
    options. `refusal` says why the run cannot be compared.
    """

    tool: str
    run: int = 1
    engine: str | None = None
    release: str | None = None
    models: tuple[str, ...] = ()
    gpu: str | None = None
    num_devices: int | None = None
    dtype: str | None = None
    unknown_dtype: str | None = None
    settings: Mapping[str, str] = {}
    layout: LayoutAsked = LayoutAsked()
    layers_on_device: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    concurrency: int | None = None
    is_average: bool = False
    times: tuple[Measured, ...] = ()
    refusal: str | None = None
    likely_engine: str | None = None


def number(row: Mapping[str, Any], key: str) -> float | None:
    """The positive number at `key`, or None if there is none."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _LARGEST:
        return None
    return float(value)


def whole(row: Mapping[str, Any], key: str) -> int | None:
    """The positive whole number at `key`, or None if there is none."""
    value = number(row, key)
    return int(value) if value is not None and value == int(value) else None


def text(row: Mapping[str, Any], key: str) -> str | None:
    """The text at `key`, or None if there is none."""
    value = row.get(key)
    return value.strip() if isinstance(value, str) and value.strip() else None


def table(row: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The object at the end of a path of keys. Empty if there is none."""
    for key in keys:
        part = row.get(key)
        if not isinstance(part, dict):
            return {}
        row = part
    return row


def rounded(value: float | None) -> int | None:
    """The nearest whole number of at least 1, or None."""
    return None if value is None else max(1, math.floor(value + 0.5))


def measured(metric: str, mean: float | None, median: float | None, scale: float = 1e-3) -> tuple[Measured, ...]:
    """One time with `scale` seconds per unit, or nothing if neither figure is known."""
    if mean is None and median is None:
        return ()
    return (Measured(metric, *(None if value is None else value * scale for value in (mean, median))),)


def littles_concurrency(requests_per_second: float | None, request_seconds: float | None) -> int | None:
    """The mean number of requests at the same time: the rate times the time that a request takes (Little's law)."""
    if requests_per_second is None or request_seconds is None:
        return None
    return rounded(requests_per_second * request_seconds)


def checked(point: Point) -> Point:
    """The point, with a refusal if a figure is missing that a prediction needs."""
    if point.refusal is not None:
        return point
    if point.input_tokens is None or point.output_tokens is None:
        return point._replace(refusal="it does not say how many tokens the requests had")
    if not point.times:
        return point._replace(refusal="it has no TPOT and no TTFT")
    if point.concurrency is None:
        return point._replace(
            refusal="it has a request rate, and neither a concurrency nor the throughput and latency that give one"
        )
    return point
