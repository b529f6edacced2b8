"""`sweep --plot`: the chart of the report as a file. matplotlib (the extra `plot`) only turns it into PNG or PDF."""

from __future__ import annotations

import io
import os
import re
from typing import TYPE_CHECKING, Any

from kvcalc.atomic_file import check_target, write_file
from kvcalc.errors import RunError, UsageError
from kvcalc.output.report.style import as_file, light_colors
from kvcalc.output.report.sweep import memory_chart
from kvcalc.writing import shell
from kvcalc.writing.html import tree

if TYPE_CHECKING:
    import kvcalc.documents as documents

_FORMATS = ("svg", "png", "pdf")
_PIXELS_PER_INCH = 90
_ANCHORS = {"end": "right", "middle": "center"}


def check_plot_file(path: str) -> None:
    """Check the file before a long run.

    Raises UsageError (exit 2) if the name or folder is wrong, and RunError (exit 1) if the file cannot be written or
    matplotlib is needed and missing.
    """
    if _format_of(path) not in _FORMATS:
        raise UsageError(f"--plot {path}: not an image file name", "end it in .svg, .png or .pdf")
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        raise UsageError(f"--plot {path}: folder {folder} does not exist", shell.join(["mkdir", "-p", folder]))
    check_target(path)
    import importlib.util

    if _format_of(path) != "svg" and importlib.util.find_spec("matplotlib") is None:
        raise RunError(
            f"--plot {path} needs matplotlib, which is not installed",
            "name an .svg file, or pip install 'kvcalc[plot]'",
        )


def write_plot(path: str, chart: documents.Chart) -> None:
    """Draw `chart` to the file at `path`. Equal charts give equal files.

    Raises UsageError (exit 2) if there is nothing to draw, and RunError (exit 1) if the file cannot be written.
    """
    svg = memory_chart(chart)
    if not svg:
        raise UsageError("--plot: a line needs two contexts", "for example --context 1k..128k")
    drawing, format = tree(svg), _format_of(path)
    width, height = map(int, (drawing.get("viewBox") or "").split()[2:])
    is_svg = format == "svg"
    write_file(as_file(svg, width, height).encode() if is_svg else _traced(drawing, width, height, format), path)


def _traced(drawing: Any, width: int, height: int, format: str) -> bytes:
    """The lines and the texts of a chart, drawn by matplotlib at their places."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["text.parse_math"] = False  # a dollar sign in a name is one
    from matplotlib.figure import Figure

    colors = light_colors()
    figure = Figure(figsize=(width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for element in drawing.iter():
        kind = element.get("class") or ""
        if element.tag == "path":
            color = colors[kind[-2:].replace("s", "c") if kind.startswith("line") else "rule"]
            dashes = (0, [float(length) for length in (element.get("stroke-dasharray") or "").split()])
            style, thickness = dashes if dashes[1] else "-", 1.5 if kind.startswith("line") else 0.8
            axes.plot(*_places(element.get("d") or ""), color=color, linestyle=style, linewidth=thickness)
        elif element.tag == "text":
            x, y = (float(element.get(axis) or 0) for axis in "xy")
            side = _ANCHORS.get(element.get("text-anchor") or "", "left")
            axes.text(x, y, element.text or "", color=colors[kind or "text"], ha=side)
    image = io.BytesIO()
    figure.savefig(
        image, format=format, dpi=2 * _PIXELS_PER_INCH, metadata={"CreationDate": None} if format == "pdf" else None
    )
    return image.getvalue()


def _places(path: str) -> tuple[list[float], list[float]]:
    """The x and the y of a path of a chart: M and L have both, H only x, V only y."""
    xs: list[float] = []
    ys: list[float] = []
    for letter, first, second in re.findall(r"([MLHV])([\d.]+)(?: ([\d.]+))?", path):
        xs.append(xs[-1] if letter == "V" else float(first))
        ys.append(ys[-1] if letter == "H" else float(second or first))
    return xs, ys


def _format_of(path: str) -> str:
    return os.path.splitext(path)[1].removeprefix(".").lower()
