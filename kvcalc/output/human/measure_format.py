"""Durations, rates and shares as a person reads them."""

from __future__ import annotations

from kvcalc.output.human.console import duration
from kvcalc.units import format_size


def percent(share: float | None) -> str:
    """A share in whole percents, or a dash."""
    return "-" if share is None else f"{share:.0%}"


def seconds(value: float | None) -> str:
    """A duration in three digits, in microseconds below one millisecond, or a dash."""
    return f"{value * 1e6:.3g} us" if value is not None and value < 0.9995e-3 else duration(value)


def rate(bytes_per_second: float | None) -> str:
    """Bytes per second in powers of 1024, or a dash."""
    if bytes_per_second is None:
        return "-"
    return f"{format_size(int(bytes_per_second), capacity=True)}/s"
