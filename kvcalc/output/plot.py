"""Memory over context as a picture, by matplotlib: the extra `plot`."""

from __future__ import annotations

import os
from typing import Any

from kvcalc.errors import RunError, UsageError

_FORMATS = ("svg", "png", "pdf")
_GIB = 1024**3


def check_plot_file(path: str) -> None:
    """Refuse, before a long run, a file that cannot be drawn to: UsageError (exit 2), RunError where there is no
    matplotlib (exit 1)."""
    if _format_of(path) not in _FORMATS:
        raise UsageError(f"--plot {path}: the name must end in {', '.join('.' + name for name in _FORMATS)}")
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        raise UsageError(f"--plot {path}: there is no folder {folder}")
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise RunError("--plot needs matplotlib, which is not installed", "pip install 'kvcalc[plot]'")


def write_plot(path: str, chart: dict[str, Any]) -> None:
    """Draw `chart` (see `kvcalc.output.chart.draw_chart`) to the file at `path`; the same chart is the same file.

    Raises RunError (exit 1) where the file cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    contexts, lines = chart["contexts"], chart["lines"]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for line in lines:
        points = [(c, v / _GIB) for c, v in zip(contexts, line["bytes"]) if v is not None]
        axes.plot(
            [c for c, _ in points], [v for _, v in points], label=line["label"],
            marker="o" if len(points) <= 40 else "", markersize=3, linewidth=1.5,
        )  # fmt: skip
    for capacity in chart["capacities"]:
        label = f"for the cache on a device {capacity['label']}".rstrip()
        axes.axhline(capacity["bytes"] / _GIB, color="black", linestyle="--", linewidth=1, label=label)
    if contexts[-1] >= 8 * contexts[0]:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("memory on one device, GiB")
    axes.set_title(chart["title"])
    axes.grid(visible=True, linewidth=0.4, alpha=0.5)
    # Ticks as plain numbers: 8,192 and 0.5 rather than powers of two.
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    if lines:
        axes.legend(fontsize="small")
    format = _format_of(path)
    try:
        with matplotlib.rc_context({"svg.hashsalt": "kvcalc"}):
            figure.savefig(path, format=format, dpi=150, metadata={"Date": None} if format == "svg" else None)
    except OSError as error:
        raise RunError(f"--plot {path}: {error.strerror or 'cannot be written'}") from None


def _format_of(path: str) -> str:
    return os.path.splitext(path)[1].removeprefix(".").lower()
