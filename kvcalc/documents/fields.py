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
