"""Plot memory over context with matplotlib (the extra `plot`)."""

from __future__ import annotations

import io
import os
from itertools import cycle
from typing import TYPE_CHECKING

from kvcalc.atomic_file import check_target, write_file
from kvcalc.errors import RunError, UsageError
from kvcalc.units import format_size
from kvcalc.writing import shell
from kvcalc.writing.terminal import printable_document

if TYPE_CHECKING:
    import kvcalc.documents as documents

_FORMATS = ("svg", "png", "pdf")
_GIB = 1024**3
# The lines of capacities: lengths of dashes and gaps. There are 5 dashes and 4 colours, so that 20 lines differ.
_DASHES = ((6, 2), (1, 2), (6, 2, 1, 2), (12, 3), (3, 1, 1, 1, 1, 1))
_COLORS = ("black", "crimson", "navy", "darkgreen")


def check_plot_file(path: str) -> None:
    """Check the file before a long run.

    Raises UsageError (exit 2) if the name or folder is wrong, and RunError (exit 1) if the file cannot be written or
    matplotlib is missing.
    """
    if _format_of(path) not in _FORMATS:
        raise UsageError(f"--plot {path}: not an image file name", "end it in .svg, .png or .pdf")
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        raise UsageError(f"--plot {path}: folder {folder} does not exist", shell.join(["mkdir", "-p", folder]))
    check_target(path)
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise RunError("--plot needs matplotlib, which is not installed", "pip install 'kvcalc[plot]'")


def write_plot(path: str, chart: documents.Chart) -> None:
    """Draw `chart` (see `kvcalc.output.chart.draw_chart`) to the file at `path`. Equal charts give equal files.

    Raises RunError (exit 1) if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["text.parse_math"] = False  # a dollar sign in a name is one
    from matplotlib.figure import Figure

    chart = printable_document(chart)
    contexts, lines = chart["contexts"], chart["lines"]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for line in lines:
        points = [(c, v / _GIB) for c, v in zip(contexts, line["bytes"]) if v is not None]
        axes.plot(
            [c for c, _ in points], [v for _, v in points], label=line["label"],
            marker="o" if len(points) <= 40 else "", markersize=3, linewidth=1.5,
        )  # fmt: skip
    for capacity, dashes, color in zip(chart["capacities"], cycle(_DASHES), cycle(_COLORS)):
        label = f"{format_size(capacity['bytes'], capacity=True)} per device for the cache {capacity['label']}".rstrip()
        axes.axhline(capacity["bytes"] / _GIB, color=color, linestyle=(0, dashes), linewidth=1.2, label=label)
    if contexts[-1] >= 8 * contexts[0]:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("memory on one device, GiB")
    axes.set_title(chart["title"])
    axes.grid(visible=True, linewidth=0.4, alpha=0.5)
    # Label ticks with plain numbers, such as 8,192 and 0.5, instead of powers of two.
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    if lines:
        axes.legend(fontsize="small")
    format = _format_of(path)
    image = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "kvcalc"}):
        figure.savefig(image, format=format, dpi=150, metadata={"Date": None} if format == "svg" else None)
    write_file(image.getvalue(), path)


def _format_of(path: str) -> str:
    return os.path.splitext(path)[1].removeprefix(".").lower()
