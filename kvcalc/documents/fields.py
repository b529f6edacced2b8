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
