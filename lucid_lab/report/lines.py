"""Curves: learning curves, κ against N, cost against N."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .drawing import Colours, draw_svg, fitted
from .numbers import tick
from .palette import DASHED, Look, looks

WIDTH, HEIGHT = 4.7, 3.1
# A curve of at most this many points has a marker at every point, a longer curve at a few points.
MARKED = 25
TICKS = 8
# Names of marks that are closer than this share of the width do not fit side by side.
NEAR = 0.5


def draw_lines(figure: dict[str, Any], prefix: str) -> str:
    """A `lines` figure as SVG, without a legend: the page has its own."""
    return draw_svg(WIDTH, HEIGHT, lambda axes, colours: plot_lines(axes, figure, colours), figure["title"], prefix)


def plot_lines(axes: Any, figure: dict[str, Any], colours: Colours, styles: Sequence[Look] | None = None) -> None:
    """Plot the series of a `lines` figure. styles: of the series, None for those of their roles."""
    x, y = figure["x"], figure["y"]
    if x.get("log"):
        axes.set_xscale("log")
    if y.get("log"):
        axes.set_yscale("log")
    styles = looks(figure["series"]) if styles is None else styles
    for order, (series, style) in enumerate(zip(figure["series"], styles, strict=True)):
        _curve(axes, series, style, colours, bool(y.get("log")), order)
    if y.get("range"):
        axes.set_ylim(*y["range"])
    axes.set(xlabel=fitted(x.get("label", ""), 50, 2), ylabel=fitted(y.get("label", ""), 32, 2))
    _ticks(axes, figure)
    _marks(axes, [mark for mark in figure.get("marks") or [] if mark.get("x") is not None], colours["muted"])
    if not any(value is not None for series in figure["series"] for value in series["y"]):
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=colours["muted"])


def _curve(axes: Any, series: dict[str, Any], style: Look, colours: Colours, log: bool, order: int) -> None:
    x = [math.nan if value is None else float(value) for value in series["x"]]
    y = [math.nan if value is None or (log and value <= 0) else float(value) for value in series["y"]]
    # A look may also bring a colour of its own.
    colour, paper = colours.get(style.colour, style.colour), colours["paper"]
    # LUCID lies above the others.
    height = 6.0 if style.colour == "lucid" else 3.0
    every = 1 if len(x) <= MARKED else (order * 3 % 7 + 2, max(1, len(x) // 7))
    axes.plot(
        x,
        y,
        label=series["name"],
        color=colour,
        linewidth=style.width,
        linestyle=(0, style.dashes) if style.dashes else "-",
        marker=style.marker,
        markersize=7 if style.marker == "*" else 5.5 if style.colour == "lucid" else 4.8,
        markeredgecolor=paper,
        markeredgewidth=0.6,
        markevery=every,
        zorder=height,
    )
    if series.get("spread"):
        spread = [0.0 if value is None else float(value) for value in series["spread"]]
        top = [value + by for value, by in zip(y, spread, strict=True)]
        # On a logarithmic axis the band must stay above zero.
        bottom = [max(value - by, value / 10) if log else value - by for value, by in zip(y, spread, strict=True)]
        axes.fill_between(x, bottom, top, color=colour, alpha=0.17, linewidth=0, zorder=height - 1)


def _ticks(axes: Any, figure: dict[str, Any]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    points = sorted({value for series in figure["series"] for value in series["x"] if value is not None})
    if figure["x"].get("log"):
        ticks = [points[at] for at in _evenly(len(points))]
        if ticks and points[0] > 0 and len(points) <= 3 * TICKS:
            axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    elif 1 < len(points) <= TICKS and all(float(value).is_integer() for value in points):
        # Few whole numbers: a tick at every point, unless ticks would crowd.
        gaps = [b - a for a, b in pairwise(points)]
        if min(gaps) >= (points[-1] - points[0]) / 10:
            axes.xaxis.set_major_locator(FixedLocator(points))
    if figure["y"].get("log"):
        low, high = axes.get_ylim()
        decades = math.log10(high / low) if low > 0 else math.inf
        axes.yaxis.set_minor_locator(NullLocator())
        if decades < 0.5:
            # Over less than half a decade a logarithmic axis looks linear.
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            return
        if decades < 2.2:
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def _evenly(count: int) -> list[int]:
    """At most TICKS places among `count`, the last one included."""
    step = max(1, math.ceil(count / TICKS))
    return sorted(range(count - 1, -1, -step))


def _marks(axes: Any, marks: list[dict[str, Any]], colour: str) -> None:
    """Vertical lines with names above the plot. A name moves a line up if its neighbour is near."""
    level, before = 0, -1.0
    for mark in sorted(marks, key=lambda mark: mark["x"]):
        share = _share(axes, mark["x"])
        level = (level + 1) % 3 if share - before < NEAR else 0
        before = share
        _mark(axes, mark, colour, level, late=share > 0.5)


def _mark(axes: Any, mark: dict[str, Any], colour: str, level: int, late: bool) -> None:
    axes.axvline(mark["x"], color=colour, linewidth=1.0, linestyle=(0, DASHED), zorder=2)
    axes.annotate(
        fitted(mark.get("name", ""), 30),
        (mark["x"], 1),
        xycoords=axes.get_xaxis_transform(),
        xytext=(3 if late else -3, 2 + 12 * level),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        color=colour,
    )


def _share(axes: Any, x: float) -> float:
    """Where a value of x lies between the left and the right end of the axis: 0 to 1."""
    left, right = axes.get_window_extent().intervalx
    return float((axes.transData.transform((x, axes.get_ylim()[0]))[0] - left) / (right - left))
