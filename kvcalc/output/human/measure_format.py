"""Durations, rates and shares as a person reads them."""

from __future__ import annotations

from kvcalc.units import format_size


def percent(share: float | None) -> str:
    """A share in whole percents, or a dash."""
    return "-" if share is None else f"{share:.0%}"


def seconds(value: float | None) -> str:
    """A duration in the unit that gives it three digits or so, or a dash."""
    if value is None:
        return "-"
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if value * scale >= 1:
            return f"{value * scale:,.3g} {unit}" if value * scale < 1000 else f"{value * scale:,.0f} {unit}"
    return f"{value * 1e6:.3f} us"


def rate(bytes_per_second: float | None) -> str:
    """Bytes per second in powers of 1024, or a dash."""
    if bytes_per_second is None:
        return "-"
    return f"{format_size(int(bytes_per_second), capacity=True)}/s"
