"""Charts as SVG, in reports and for `sweep --plot`: a bar of parts, rows of bars, and lines over an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, log2, log10

from kvcalc.output.report.style import dashes_of, stroke
from kvcalc.records import NamedTuple
from kvcalc.writing.html import Markup, element, joined

_WIDTH, _HEIGHT, _BAR_HEIGHT, _ROW_HEIGHT = 720, 320, 44, 28
_LEFT, _RIGHT, _TOP, _BOTTOM = 100, 60, 30, 56
# The pixels between labels one above the other, and the columns of a legend by its longest name, up to characters.
_LABEL_HEIGHT, _COLUMNS = 18, ((12, 3), (24, 2))
# An axis is logarithmic if its ends are this many times apart, unless it is always linear. Those begin at 0.
_LOGARITHMIC = 8


class Line(NamedTuple):
    """A line of a chart, by x."""

    label: str
    points: Sequence[tuple[float, float]]


class Axis(NamedTuple):
    """An axis: its label, how its values are written, and whether it is never logarithmic, as for time.

    `is_bytes`: its steps are round in powers of 1024.
    """

    label: str
    write: Callable[[float], str]
    is_linear: bool = False
    is_bytes: bool = False


def bar(title: str, parts: Sequence[tuple[str, float, str]], end: float | None = None) -> Markup:
    """A bar of parts: name, amount and class. `end` is the whole, such as a device's memory, if the parts exceed it."""
    total = max(sum(amount for _, amount, _ in parts), end or 0)
    drawn, x = [], 0.0
    for name, amount, kind in parts:
        width = _WIDTH * amount / total if total else 0
        place = {"x": f"{x:.2f}", "y": 0, "width": f"{width:.2f}", "height": _BAR_HEIGHT}
        drawn.append(element("rect", element("title", name), class_=kind, **place))
        x += width
    if end is not None and end < total:
        drawn.append(element("path", class_="line s1", d=f"M{_WIDTH * end / total:.2f} 0V{_BAR_HEIGHT}"))
    return _svg(title, _BAR_HEIGHT, drawn)


def bars(title: str, rows: Sequence[tuple[str, float]], write: Callable[[float], str]) -> Markup:
    """A bar for each row, all on one scale, with its name before it and its value behind it."""
    most = max((amount for _, amount in rows), default=0) or 1
    drawn: list[Markup] = []
    for place, (name, amount) in enumerate(rows):
        top, width = place * _ROW_HEIGHT, (_WIDTH - 2 * _LEFT) * amount / most
        drawn.append(_label(name, _LEFT - 8, top + 18, None, "end"))
        drawn.append(element("rect", class_="f0", x=_LEFT, y=top + 4, width=f"{width:.1f}", height=_ROW_HEIGHT - 8))
        drawn.append(_label(write(amount), _LEFT + width + 6, top + 18))
    return _svg(title, _ROW_HEIGHT * max(len(rows), 1), drawn)


def lines(
    title: str, across: Axis, up: Axis, series: Sequence[Line], limits: Sequence[tuple[str, float]] = (),
    marks: Sequence[tuple[str, float]] = (),
) -> Markup:  # fmt: skip
    """Lines over x, with a legend if there are several. Empty without two places to draw between.

    `limits` are horizontal lines and `marks` vertical ones, with labels.
    """
    xs = [x for line in series for x, _ in line.points] + [x for _, x in marks]
    ys = [y for line in series for _, y in line.points] + [y for _, y in limits]
    if len(set(xs)) < 2:
        return joined([])
    is_wide = not across.is_linear and min(xs) > 0 and max(xs) >= _LOGARITHMIC * min(xs)
    x_scale = _Scale(0.0 if across.is_linear else min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, is_wide)
    is_log = not up.is_linear and min(ys) > 0 and max(ys) >= 10 * _LOGARITHMIC * min(ys)
    # Above the highest limit or line there is room for a label.
    top = max(ys) * (1.0 if not limits and not marks else 1.5 if is_log else 1.1)
    y_scale = _Scale(min(ys) if is_log else 0.0, top or 1.0, _HEIGHT - _BOTTOM, _TOP, is_log)
    drawn = [*_grid(x_scale, y_scale, across, up)]
    for number, line in enumerate(series):
        path = "L".join(f"{x_scale.place(x):.1f} {y_scale.place(y):.1f}" for x, y in line.points)
        drawn.append(element("path", element("title", line.label), **stroke(number), d=f"M{path}"))
    free = float(_HEIGHT)
    for number, (label, y) in enumerate(sorted(limits, key=lambda limit: limit[1])):
        at = y_scale.place(y)
        drawn.append(_limit(f"M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}", number))
        # Labels of limits that are close together stand one above the other.
        free = min(at - 4, free - _LABEL_HEIGHT)
        drawn.append(_label(label, _LEFT + 6, free))
    for label, x in marks:
        at = x_scale.place(x)
        drawn.append(_limit(f"M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"))
        is_right = at > (_LEFT + _WIDTH) / 2
        drawn.append(_label(label, at + (-4 if is_right else 4), _TOP + 12, anchor="end" if is_right else None))
    legend, height = _legend([line.label for line in series]) if len(series) > 1 else ([], 0)
    return _svg(title, _HEIGHT + height, [*drawn, *legend])


def _legend(names: Sequence[str]) -> tuple[list[Markup], int]:
    """A stroke and a name for each line, and the height that they take."""
    longest = max(map(len, names))
    columns = next((number for most, number in _COLUMNS if longest <= most), 1)
    drawn = []
    for place, name in enumerate(names):
        x = _LEFT + (_WIDTH - _LEFT) * (place % columns) / columns
        y = _HEIGHT + _LABEL_HEIGHT * (place // columns + 0.5)
        drawn += [
            element("path", **stroke(place), d=f"M{x:.1f} {y - 4:.1f}H{x + 36:.1f}"),
            _label(name, x + 44, y, None),
        ]
    return drawn, _LABEL_HEIGHT * ceil(len(names) / columns)


def _limit(path: str, number: int = 0) -> Markup:
    return element("path", class_="line s6", stroke_dasharray=dashes_of(number + 1), d=path)


def _label(text: str, x: float, y: float, kind: str | None = "quiet", anchor: str | None = None) -> Markup:
    return element("text", text, class_=kind, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


class _Scale:
    """Maps values to places between two ends."""

    def __init__(self, low: float, high: float, start: float, end: float, is_log: bool) -> None:
        self.low, self.high, self.is_log = low, high, is_log
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = log2(low), log2(high), log2(max(value, low))
        share = (value - low) / (high - low) if high > low else 0.0
        return self._start + (self._end - self._start) * min(max(share, 0.0), 1.0)

    def ticks(self, most: int, *, is_bytes: bool = False) -> list[float]:
        """Round values within the ends: powers of two, or steps of 1, 2 or 5 times a power of ten.

        With `is_bytes`, the steps are so many KiB, MiB or GiB.
        """
        if self.is_log:
            first, last = ceil(log2(self.low)), int(log2(self.high))
            step = max(1, ceil((last - first + 1) / most))
            return [2.0**power for power in range(first, last + 1, step)]
        size = (self.high - self.low) / most
        whole = 1024.0 ** max(int(log2(size) // 10), 0) if is_bytes and size > 0 else 1.0
        unit = whole * 10.0 ** int(log10(size / whole) // 1)
        step_size = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= size)
        first = ceil(self.low / step_size)
        return [step_size * number for number in range(first, int(self.high / step_size) + 1)]


def _grid(x_scale: _Scale, y_scale: _Scale, across: Axis, up: Axis) -> list[Markup]:
    bottom = _HEIGHT - _BOTTOM
    drawn = [_axis(f"M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}")]
    for value in y_scale.ticks(5, is_bytes=up.is_bytes):
        y = y_scale.place(value)
        drawn.append(_axis(f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"))
        drawn.append(_label(up.write(value), _LEFT - 8, y + 4, None, "end"))
    for value in x_scale.ticks(6, is_bytes=across.is_bytes):
        drawn.append(_label(across.write(value), x_scale.place(value), bottom + 20, None, "middle"))
    drawn.append(_label(across.label, _WIDTH - _RIGHT, bottom + 44, anchor="end"))
    drawn.append(_label(up.label, _LEFT, _TOP - 8))
    return drawn


def _axis(path: str) -> Markup:
    return element("path", class_="axis", d=path)


def _svg(title: str, height: int, drawn: Sequence[Markup]) -> Markup:
    inner = joined(["", element("title", title), *drawn, ""])
    return element("svg", inner, viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=title)
