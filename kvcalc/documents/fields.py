"""Numbers with a least and a largest value, and objects with more keys than those that are listed."""

from __future__ import annotations

from typing import Annotated, TypedDict

Whole = Annotated[int, {"minimum": 0}]
Count = Annotated[int, {"minimum": 1}]
Amount = Annotated[float, {"minimum": 0}]
Positive = Annotated[float, {"exclusiveMinimum": 0}]
Share = Annotated[float, {"minimum": 0, "maximum": 1}]


class Open(TypedDict):
    """An object with keys that are not listed, such as an engine's own settings."""


class LayoutSizes(TypedDict):
    """How one replica or one instance is split over its devices."""

    tensor_parallel_size: Count
    pipeline_parallel_size: Count
    data_parallel_size: Count
    expert_parallel_size: Count


class AllLayoutSizes(LayoutSizes):
    """The same, and the tensor-parallel ranks that divide the tokens of the cache."""

    decode_context_parallel_size: Count


class ChartLine(TypedDict):
    """A line of a chart: bytes at each context, None where they are not known."""

    label: str
    bytes: list[int | None]


class ChartCapacity(TypedDict):
    """A horizontal line: the memory for the cache of a device."""

    label: str
    bytes: int


class Chart(TypedDict):
    """Memory over context, as `kvcalc sweep` draws it. It is in no JSON."""

    title: str
    contexts: list[int]
    lines: list[ChartLine]
    capacities: list[ChartCapacity]
    omitted: int


class SimulatedTimes(TypedDict):
    """The times of a simulation, of which targets limit the mean or a percentile."""

    ttft_mean_seconds: Amount | None
    """time to first token, mean"""
    ttft_p50_seconds: Amount | None
    """time to first token, percentile 50"""
    ttft_p90_seconds: Amount | None
    """time to first token, percentile 90"""
    ttft_p95_seconds: Amount | None
    """time to first token, percentile 95"""
    ttft_p99_seconds: Amount | None
    """time to first token, percentile 99"""
    tpot_mean_seconds: Amount | None
    """time per output token, mean"""
    tpot_p50_seconds: Amount | None
    """time per output token, percentile 50"""
    tpot_p90_seconds: Amount | None
    """time per output token, percentile 90"""
    tpot_p95_seconds: Amount | None
    """time per output token, percentile 95"""
    tpot_p99_seconds: Amount | None
    """time per output token, percentile 99"""
    e2e_mean_seconds: Amount | None
    """time of the whole request, mean"""
    e2e_p50_seconds: Amount | None
    """time of the whole request, percentile 50"""
    e2e_p90_seconds: Amount | None
    """time of the whole request, percentile 90"""
    e2e_p95_seconds: Amount | None
    """time of the whole request, percentile 95"""
    e2e_p99_seconds: Amount | None
    """time of the whole request, percentile 99"""
