"""How human output writes numbers, times, names and workloads. A dash stands for a null."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from kvcalc.units import format_size


def size(value: int | None) -> str:
    """Bytes in powers of 1024, or a dash for None."""
    return "-" if value is None else format_size(value)


def room(value: int) -> str:
    """Bytes that are there, rounded down, in powers of 1024."""
    return format_size(max(value, 0), capacity=True)


def count(value: Any) -> str:
    """A number with thousands separators, or a dash for None."""
    return "-" if value is None else f"{value:,}"


def text(value: str | None) -> str:
    """The text, or a dash if it is empty."""
    return value or "-"


def yes_or_no(value: bool | None) -> str:
    """yes, no, or a dash for None."""
    return {True: "yes", False: "no", None: "-"}[value]


def attention(kind: str | None) -> str:
    """A kind of attention, with MHA, MQA, GQA and MLA in capitals, or a dash for None."""
    return text(kind) if kind in (None, "hybrid", "none") else str(kind).upper()


def percent(share: float | None) -> str:
    """A share as a whole percentage, or a dash for None."""
    return "-" if share is None else f"{share:.0%}"


def share(value: float) -> str:
    """A share as a percentage with a decimal."""
    return f"{value:.1%}"


def duration(seconds: float | None) -> str:
    """Seconds with three digits in a suitable unit, such as `840 us` and `11.4 ms`, or a dash for None."""
    if seconds is None:
        return "-"
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    unit, scale = (
        ("s", 1.0) if seconds >= 0.9995 or not seconds else ("ms", 1e3) if seconds >= 0.9995e-3 else ("us", 1e6)
    )
    return f"{seconds * scale:.3g} {unit}"


OVERLOADED = "overloaded"
"""Instead of a time in a queue that grows without bound: it would be longer the longer one simulates."""


def duration_or_overloaded(seconds: float | str | None) -> str:
    """A duration, or OVERLOADED as it is."""
    return seconds if isinstance(seconds, str) else duration(seconds)


def requests_per_second(value: float) -> str:
    """A rate of requests with three digits, such as `1 request per second`."""
    return f"{rate(value)} request{'' if value == 1 else 's'} per second"


def users_text(users: int, think_seconds: float, arriving: float | None, headroom: float = 0.0) -> str:
    """Users, the requests per second that they make (None is not known), and how many of these are in flight."""
    more = f" and {headroom:.0%} more" if headroom else ""
    text = f"{count(users)} users{more}, {duration(think_seconds)} between messages"
    if arriving is None:
        return text
    running = max(0, round(ceil(users * (1 + headroom)) - arriving * think_seconds))
    return f"{text} = {requests_per_second(arriving)} and {count(running)} in flight"


def sessions_text(turns: int, growth_tokens: int) -> str:
    """Sessions whose context grows."""
    return f"sessions of {count(turns)} turns that grow by {growth_tokens:,} tokens each"


def rate(value: float | None) -> str:
    """A rate per second: a whole number from 100 on, three digits below, or a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def byte_rate(bytes_per_second: float | None) -> str:
    """Bytes per second in powers of 1024, or a dash for None."""
    return "-" if bytes_per_second is None else f"{format_size(int(bytes_per_second), capacity=True)}/s"


def flop_rate(flop_per_second: float | None) -> str:
    """FLOP per second with three digits, in TFLOP/s or GFLOP/s, or a dash for None."""
    if flop_per_second is None:
        return "-"
    unit, scale = ("TFLOP/s", 1e12) if flop_per_second >= 0.9995e12 else ("GFLOP/s", 1e9)
    return f"{flop_per_second / scale:.3g} {unit}"


def split(sizes: Mapping[str, Any]) -> str:
    """How a replica is split, such as `tp 8 x pp 2` or `dp 4 x tp 2`. Empty if it uses one device."""
    parts = (
        ("dp", sizes["data_parallel_size"]),
        ("pcp", sizes.get("prefill_context_parallel_size", 1)),
        ("tp", sizes["tensor_parallel_size"]),
        ("pp", sizes["pipeline_parallel_size"]),
    )
    return " x ".join(f"{name} {size}" for name, size in parts if size > 1)


def describe_workload(workload: Mapping[str, Any]) -> list[str]:
    """The context and the batch as text, such as `8,192 tokens` and `batch 4`."""
    return [f"{count(workload['context_tokens'])} tokens", f"batch {count(workload['batch_size'])}"]


def describe_images(workload: Mapping[str, Any]) -> list[str]:
    """The images of a request as text, such as `2 images of 2,691 tokens`. Empty without images."""
    images = workload["images"]
    if images is None:
        return []
    return [f"{count(images['count'])} {'image' if images['count'] == 1 else 'images'} of "
            f"{count(images['tokens_per_image'])} tokens"]  # fmt: skip


def name_engine(engine: Mapping[str, Any]) -> str:
    """The engine's name, the program that is counted if it has several, and the release.

    The release is the one that was asked for, or else the one that the rules are from, if any.
    """
    program = engine.get("program")
    return " ".join(str(value) for value in (engine["name"], program and f"({program})", engine["version"]) if value)


UNKNOWN_RANGE = "range unknown"


def span(seconds: float | None, low: float | None, high: float | None) -> str:
    """The range of a time in `seconds`, such as `39.1-54.7 ms`: `unknown` if it is not known, a dash without a time."""
    if low is None or high is None:
        return "-" if seconds is None else "unknown"
    (first, first_unit), (last, last_unit) = duration(low).split(), duration(high).split()
    return f"{first}-{last} {last_unit}" if first_unit == last_unit else f"{first} {first_unit}-{last} {last_unit}"


def judged_with(confidence: int) -> str:
    """The confidence of judged times as text."""
    names = {50: ", the estimate", 80: ", the upper end of the range"}
    return f"judged at {confidence}% confidence{names.get(confidence, '')}"
