"""Heat maps side by side on one scale: scores with their numbers, or large matrices as pixels."""

import math
from functools import partial
from typing import Any

from .drawing import Colours, draw_svg, fitted
from .numbers import places_of, shown, with_spread

# Both colour maps suit readers with red-green blindness. The first one also rises evenly in brightness.
SEQUENTIAL, DIVERGING = "cividis", "RdBu"
STOPS = 9
# With more columns than this the numbers are small.
CROWDED = 8
FEW_COLUMNS = 4
# With too many names for an axis, every STEPS-th is written.
STEPS = (1, 2, 4, 5, 8, 10, 20, 40, 50, 80, 100, 200, 400, 500, 800, 1000, 2000, 5000, 10_000, 100_000)


def draw_panels(figure: dict[str, Any], prefix: str) -> list[tuple[str, str]]:
    """A `heatmaps` figure as (heading, SVG) of its panels."""
    drawn = []
    for number, panel in enumerate(figure["panels"]):
        width, height = _size(panel, figure)
        label = f"{figure['title']}: {panel.get('name', '')}"
        plot = partial(_plot_alone, figure=figure, panel=panel)
        drawn.append((str(panel.get("name", "")), draw_svg(width, height, plot, label, f"{prefix}p{number}")))
    return drawn


def gradient(figure: dict[str, Any]) -> list[str]:
    """Colours from the low to the high end of a figure's scale."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    colours = colormaps[_colours(figure)]
    return [to_hex(colours(stop / (STOPS - 1))) for stop in range(STOPS)]


def limits(figure: dict[str, Any]) -> tuple[float, float]:
    """Ends of the scale; around zero for signed values."""
    low, high = (float(end) for end in figure["range"])
    if figure.get("signed"):
        high = max(abs(low), abs(high))
        low = -high
    return low, (high if high > low else low + 1.0)


def is_small(figure: dict[str, Any]) -> bool:
    """Whether all panels have few columns, so that more of them fit side by side."""
    return all(len(panel["columns"]) <= FEW_COLUMNS for panel in figure["panels"])


def _colours(figure: dict[str, Any]) -> str:
    return DIVERGING if figure.get("signed") else SEQUENTIAL


def _numbers(figure: dict[str, Any]) -> bool:
    return bool(figure.get("numbers", True))


def _size(panel: dict[str, Any], figure: dict[str, Any]) -> tuple[float, float]:
    rows, columns = len(panel["rows"]), len(panel["columns"])
    if _numbers(figure):
        return 2.9 if is_small(figure) else max(3.6, min(5.2, 0.9 + 0.46 * columns)), 0.75 + 0.3 * rows
    width = 2.35
    return width, 0.55 + (width - 0.55) * min(max(rows / columns, 0.3), 1.6)


def _plot_alone(axes: Any, colours: Colours, *, figure: dict[str, Any], panel: dict[str, Any]) -> None:
    plot_panel(axes, figure, panel, colours)


def plot_panel(axes: Any, figure: dict[str, Any], panel: dict[str, Any], colours: Colours) -> Any:
    """Plot one panel of a `heatmaps` figure; give matplotlib's image, for a colour bar."""
    import numpy as np

    low, high = limits(figure)
    grid = np.array([[math.nan if value is None else value for value in row] for row in panel["values"]], dtype=float)
    axes.grid(visible=False)
    axes.set_facecolor(colours["missing"])
    cells = np.ma.masked_invalid(grid)
    scale = {"cmap": _colours(figure), "vmin": low, "vmax": high}
    if _numbers(figure):
        rows, columns = grid.shape
        sides = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
        image = axes.pcolormesh(*sides, cells, edgecolors=colours["paper"], linewidth=1.5, **scale)
        axes.set_xlim(-0.5, columns - 0.5)
        axes.set_ylim(rows - 0.5, -0.5)
        _write_numbers(axes, grid, image, colours["muted"], _places(figure, columns > CROWDED))
    else:
        # Without interpolation, so that an enlarged map is not blurred.
        image = axes.imshow(cells, aspect="auto", interpolation="none", **scale)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    _name(axes.set_xticks, panel["columns"], 10 if _numbers(figure) else 4)
    _name(axes.set_yticks, panel["rows"], 30 if _numbers(figure) else 5)
    axes.set(xlabel=fitted(figure["columns"].get("label", ""), 36), ylabel=fitted(figure["rows"].get("label", ""), 24))
    return image


def _places(figure: dict[str, Any], crowded: bool) -> int:
    """Places after the point, the same in all panels of a figure."""
    if crowded and limits(figure)[1] >= 10:
        return 0
    values = [value for panel in figure["panels"] for row in panel["values"] for value in row]
    return places_of([*values, *figure["range"]])


def _write_numbers(axes: Any, grid: Any, image: Any, missing: str, places: int) -> None:
    """A number in every cell, in black or white; a dash in the colour `missing` for a missing one."""
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            if math.isnan(value):
                axes.text(x, y, "–", ha="center", va="center_baseline", color=missing)
                continue
            red, green, blue, _ = image.to_rgba(value)
            ink = "white" if _brightness(red, green, blue) < 0.179 else "black"
            axes.text(
                x,
                y,
                with_spread(value, None, places),
                ha="center",
                va="center_baseline",
                color=ink,
                fontsize=8.5 if grid.shape[1] > CROWDED else 10,
            )


def _brightness(red: float, green: float, blue: float) -> float:
    """Relative luminance (WCAG). Below 0.179 white letters have more contrast than black ones."""
    linear = [light / 12.92 if light <= 0.04045 else ((light + 0.055) / 1.055) ** 2.4 for light in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _name(set_ticks: Any, names: list[Any], most: int) -> None:
    """Names at rows or columns: all, or every n-th if there are more than `most`."""
    step = next(step for step in STEPS if len(names) <= most * step)
    places = list(range(0, len(names), step))
    set_ticks(places, [fitted(shown(names[place]), 14) for place in places])
