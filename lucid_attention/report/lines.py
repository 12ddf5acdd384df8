"""Curves: learning curves, κ against N, cost against N."""

import math
from itertools import pairwise
from typing import Any

from .numbers import tick
from .palette import DASHED, Look, looks
from .svg import SENTINELS, draw, fitted

WIDTH, HEIGHT = 4.7, 3.1
# Up to so many points each is marked; of longer curves only a few are, to tell the curves apart.
MARKED = 25
TICKS = 8
# Names of marks that are nearer, as a share of the width, do not fit side by side.
NEAR = 0.5


def draw_lines(figure: dict[str, Any], prefix: str) -> str:
    """A `lines` figure as SVG. The legend is the page's."""
    return draw(WIDTH, HEIGHT, lambda axes: _plot(axes, figure), figure["title"], prefix)


def _plot(axes: Any, figure: dict[str, Any]) -> None:
    x, y = figure["x"], figure["y"]
    if x.get("log"):
        axes.set_xscale("log")
    if y.get("log"):
        axes.set_yscale("log")
    styles = looks(figure["series"])
    for order, (series, style) in enumerate(zip(figure["series"], styles, strict=True)):
        _curve(axes, series, style, bool(y.get("log")), order)
    if y.get("range"):
        axes.set_ylim(*y["range"])
    axes.set(xlabel=fitted(x.get("label", ""), 50, 2), ylabel=fitted(y.get("label", ""), 32, 2))
    _ticks(axes, figure)
    _marks(axes, [mark for mark in figure.get("marks") or [] if mark.get("x") is not None])
    if not any(value is not None for series in figure["series"] for value in series["y"]):
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=SENTINELS["muted"])


def _curve(axes: Any, series: dict[str, Any], style: Look, log: bool, order: int) -> None:
    x = [math.nan if value is None else float(value) for value in series["x"]]
    y = [math.nan if value is None or (log and value <= 0) else float(value) for value in series["y"]]
    colour = SENTINELS[style.colour]
    # LUCID lies above the others.
    height = 6.0 if style.colour == "lucid" else 3.0
    every = 1 if len(x) <= MARKED else (order * 3 % 7 + 2, max(1, len(x) // 7))
    axes.plot(
        x,
        y,
        color=colour,
        linewidth=style.width,
        linestyle=(0, style.dashes) if style.dashes else "-",
        marker=style.marker,
        markersize=7 if style.marker == "*" else 5.5 if style.colour == "lucid" else 4.8,
        markeredgecolor=SENTINELS["paper"],
        markeredgewidth=0.6,
        markevery=every,
        zorder=height,
    )
    if series.get("spread"):
        spread = [0.0 if value is None else float(value) for value in series["spread"]]
        top = [value + by for value, by in zip(y, spread, strict=True)]
        # On a logarithmic axis the band must not reach zero.
        bottom = [max(value - by, value / 10) if log else value - by for value, by in zip(y, spread, strict=True)]
        axes.fill_between(x, bottom, top, color=colour, alpha=0.17, linewidth=0, zorder=height - 1)


def _ticks(axes: Any, figure: dict[str, Any]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    points = sorted({value for series in figure["series"] for value in series["x"] if value is not None})
    if figure["x"].get("log"):
        few = [points[at] for at in _evenly(len(points))]
        if few and points[0] > 0 and len(points) <= 3 * TICKS:
            axes.xaxis.set_major_locator(FixedLocator(few))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    elif 1 < len(points) <= TICKS and all(float(value).is_integer() for value in points):
        # A handful of whole numbers: ticks where the points are, if they do not crowd.
        gaps = [b - a for a, b in pairwise(points)]
        if min(gaps) >= (points[-1] - points[0]) / 10:
            axes.xaxis.set_major_locator(FixedLocator(points))
    if figure["y"].get("log"):
        low, high = axes.get_ylim()
        decades = math.log10(high / low) if low > 0 else math.inf
        axes.yaxis.set_minor_locator(NullLocator())
        if decades < 0.5:
            # So little of the axis that it is as good as linear.
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


def _marks(axes: Any, marks: list[dict[str, Any]]) -> None:
    """Lines from top to bottom, named above the plot; a name goes a line up where its neighbour is near."""
    level, before = 0, -1.0
    for mark in sorted(marks, key=lambda each: each["x"]):
        share = _share(axes, mark["x"])
        level = (level + 1) % 3 if share - before < NEAR else 0
        before = share
        _mark(axes, mark, level, late=share > 0.5)


def _mark(axes: Any, mark: dict[str, Any], level: int, late: bool) -> None:
    axes.axvline(mark["x"], color=SENTINELS["muted"], linewidth=1.0, linestyle=(0, DASHED), zorder=2)
    axes.annotate(
        fitted(mark.get("name", ""), 30),
        (mark["x"], 1),
        xycoords=axes.get_xaxis_transform(),
        xytext=(3 if late else -3, 2 + 12 * level),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        color=SENTINELS["muted"],
    )


def _share(axes: Any, x: float) -> float:
    """How far from left to right a value lies: 0 to 1."""
    left, right = axes.get_window_extent().intervalx
    return float((axes.transData.transform((x, axes.get_ylim()[0]))[0] - left) / (right - left))
